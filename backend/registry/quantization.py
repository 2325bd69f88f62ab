"""How base weights are packed: by us while loading, or by whoever made the model.

Floor 0. What is stored beside the packed weights: bitsandbytes' functional.py and nn/modules.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from backend.registry.types import PrequantizedFormat, Quantization

BNB_MIN_VERSION = "0.46.1"  # transformers 5.23 utils/import_utils.py, BITSANDBYTES_MIN_VERSION

QUANTIZATIONS: Mapping[str, Quantization] = {
    "none": Quantization("None", "Frozen weights in the computing precision."),
    "nf4": Quantization(
        "4 bit (NF4)",
        "QLoRA: levels that fit weights as they are spread.",
        package="bitsandbytes",
        package_min_version=BNB_MIN_VERSION,
        bits=4,
    ),
    "fp4": Quantization(
        "4 bit (FP4)",
        "A tiny floating-point number.",
        package="bitsandbytes",
        package_min_version=BNB_MIN_VERSION,
        bits=4,
    ),
    "int8": Quantization(
        "8 bit (LLM.int8)",
        "Nearer to the weights, twice the bytes.",
        package="bitsandbytes",
        package_min_version=BNB_MIN_VERSION,
        bits=8,
        min_capability=(7, 5),
    ),
}
FOUR_BIT = tuple(name for name, row in QUANTIZATIONS.items() if row.bits == 4)
BLOCK, SECOND_BLOCK = 64, 256  # weights that share a scale of fp32; scales of 8 bits that share another

# By config.json's quant_method. Source: transformers 5.23 quantizers/*.py, is_trainable and validate_environment.
PREQUANTIZED: Mapping[str, PrequantizedFormat] = {
    "bitsandbytes": PrequantizedFormat("bitsandbytes", is_trainable=True, packages={"bitsandbytes": BNB_MIN_VERSION}),
    "gptq": PrequantizedFormat("GPTQ", is_trainable=True, packages={"gptqmodel": "", "optimum": ""}),
    "awq": PrequantizedFormat("AWQ", is_trainable=True, packages={"gptqmodel": "5.0.0"}),
    "hqq": PrequantizedFormat(
        "HQQ", is_trainable=True, packages={"hqq": "0.2.1"}, devices=("cuda", "npu", "xpu", "mps")
    ),
    "mxfp4": PrequantizedFormat("MXFP4", dequantized_on_load=True),
    "fp8": PrequantizedFormat("FP8", dequantized_on_load=True),
    "compressed-tensors": PrequantizedFormat(
        "compressed-tensors", dequantized_on_load=True, packages={"compressed-tensors": "0.15.0"}
    ),
}
