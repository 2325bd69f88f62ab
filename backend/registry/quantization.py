"""How base weights are packed: by us while loading, or by whoever made the model.

Floor 0. What is stored beside the packed weights: bitsandbytes' functional.py and nn/modules.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from backend.registry.types import Packed, Quantization

QUANTIZATIONS: Mapping[str, Quantization] = {
    "none": Quantization("None", "Frozen weights in the computing precision."),
    "nf4": Quantization(
        "4 bit (NF4)", "QLoRA: levels that fit weights as they are spread.", package="bitsandbytes", bits=4
    ),
    "fp4": Quantization("4 bit (FP4)", "A tiny floating-point number.", package="bitsandbytes", bits=4),
    "int8": Quantization("8 bit (LLM.int8)", "Nearer to the weights, twice the bytes.", package="bitsandbytes", bits=8),
}
FOUR_BIT = tuple(name for name, row in QUANTIZATIONS.items() if row.bits == 4)
BLOCK, SECOND_BLOCK = 64, 256  # weights that share a scale of fp32; scales of 8 bits that share another

# By config.json's quant_method. Source: transformers 5.23 quantizers/*.py, is_trainable and validate_environment.
PACKED: Mapping[str, Packed] = {
    "bitsandbytes": Packed("bitsandbytes", adapters=True, packages=("bitsandbytes",)),
    "gptq": Packed("GPTQ", adapters=True, packages=("gptqmodel", "optimum")),
    "awq": Packed("AWQ", adapters=True, packages=("gptqmodel",)),
    "hqq": Packed("HQQ", adapters=True, packages=("hqq",), gpu=True),
    "mxfp4": Packed("MXFP4", unpacked=True),
    "fp8": Packed("FP8", unpacked=True),
    "compressed-tensors": Packed("compressed-tensors", unpacked=True, packages=("compressed-tensors",)),
}
