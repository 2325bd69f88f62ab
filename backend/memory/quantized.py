"""Quantized base weights: the modules, their bits and their scales. Imports registry, config, modelspec.

Source: bitsandbytes 0.50 functional.py (QuantState) and nn/modules.py; Dettmers et al. 2023, QLoRA, section 3.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from backend import registry
from backend.config import RunSpec
from backend.modelspec import ModelShape, ModuleSpec
from backend.registry.quantization import BLOCK, SECOND_BLOCK

CODEBOOK_BYTES = 16 * 4  # the 16 levels of 4 bits in fp32
SECOND_CODEBOOK_BYTES = 256 * 4 + 4  # of double quantization: 256 levels and an offset


def bits(spec: RunSpec, shape: ModelShape) -> int:
    """Bits of a quantized weight: of a prequantized checkpoint, or of the quantization at load time; 0 without any."""
    requested = registry.QUANTIZATIONS[spec.method.quantization].bits if spec.method.kind == "lora" else 0
    return shape.weight_bits or requested


def quantized_modules(spec: RunSpec, shape: ModelShape) -> list[ModuleSpec]:
    """The modules that are quantized: every linear layer but the output layer."""
    if not bits(spec, shape):
        return []
    return _linear_modules(shape)


@lru_cache(maxsize=64)  # one check asks for it dozens of times
def _linear_modules(shape: ModelShape) -> list[ModuleSpec]:
    return [leaf for leaf in shape.all_modules() if leaf.is_linear and leaf.path != shape.head]


def weight_count(modules: Iterable[ModuleSpec]) -> int:
    """Quantized weights of these modules; biases are not quantized."""
    return sum(leaf.in_features * leaf.out_features for leaf in modules)


def scale_bytes(spec: RunSpec, shape: ModelShape, modules: Iterable[ModuleSpec]) -> int:
    """Bytes of scales and codebooks."""
    if shape.weight_bits:  # a 16-bit scale and a zero point for each group
        groups = sum(
            leaf.out_features * -(-leaf.in_features // (shape.group_size or leaf.in_features)) for leaf in modules
        )
        return groups * (16 + shape.weight_bits) // 8
    if spec.method.quantization == "int8":
        return sum(leaf.out_features * 4 for leaf in modules)
    blocks = [-(-leaf.in_features * leaf.out_features // BLOCK) for leaf in modules]
    if not spec.method.bnb_4bit_use_double_quant:
        return sum(count * 4 + CODEBOOK_BYTES for count in blocks)
    return sum(count + -(-count // SECOND_BLOCK) * 4 + CODEBOOK_BYTES + SECOND_CODEBOOK_BYTES for count in blocks)


def scale_formula(spec: RunSpec, shape: ModelShape) -> str:
    """The formula of `scale_bytes`."""
    if shape.weight_bits:
        group = f"group of {shape.group_size} weights" if shape.group_size else "output feature"
        return f"{16 + shape.weight_bits} bits per {group}: scale and zero point of the checkpoint"
    if spec.method.quantization == "int8":
        return "4 bytes per output feature"
    if not spec.method.bnb_4bit_use_double_quant:
        return f"4 bytes per block of {BLOCK} weights"
    return f"1 byte per block of {BLOCK} weights and 4 bytes per {SECOND_BLOCK} blocks (double quantization)"
