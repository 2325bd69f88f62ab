"""Quantization of the base model: while loading with bitsandbytes, or in the published checkpoint.

The sizes of scales follow bitsandbytes 0.50 functional.py and nn/modules.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from backend.registry.types import PrequantizedFormat, Quantization

BNB_MIN_VERSION = "0.46.1"  # transformers 5.23 utils/import_utils.py, BITSANDBYTES_MIN_VERSION

QUANTIZATIONS: Mapping[str, Quantization] = {
    "none": Quantization("None", "Base weights in the compute dtype."),
    "nf4": Quantization(
        "4-bit (NF4)",
        "QLoRA with 4-bit NormalFloat, made for normally distributed weights; the usual choice.",
        package="bitsandbytes",
        package_min_version=BNB_MIN_VERSION,
        bits=4,
    ),
    "fp4": Quantization(
        "4-bit (FP4)",
        "4-bit floating point; less accurate than NF4.",
        package="bitsandbytes",
        package_min_version=BNB_MIN_VERSION,
        bits=4,
    ),
    "int8": Quantization(
        "8-bit (LLM.int8)",
        "More accurate than 4-bit, with twice the memory.",
        package="bitsandbytes",
        package_min_version=BNB_MIN_VERSION,
        bits=8,
        min_capability=(7, 5),
    ),
}
FOUR_BIT = tuple(name for name, row in QUANTIZATIONS.items() if row.bits == 4)
# Weights that share an fp32 scale; with double quantization, 8-bit scales that share a second fp32 scale.
BLOCK, SECOND_BLOCK = 64, 256

# quantization_config.quant_method -> format. Source: transformers 5.23 quantizers/*.py, is_trainable and
# validate_environment.
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
