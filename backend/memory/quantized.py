"""Quantized base weights: the modules, their bits and their scales.

Source: bitsandbytes 0.50 functional.py (QuantState) and nn/modules.py; Dettmers et al. 2023, QLoRA, section 3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from backend import registry
from backend.config import RunSpec
from backend.modelspec import ModelShape, ModuleSpec
from backend.registry.quantization import BLOCK, SECOND_BLOCK

CODEBOOK_BYTES = 16 * 4  # the 16 levels of 4 bits in fp32
SECOND_CODEBOOK_BYTES = 256 * 4 + 4  # of double quantization: 256 levels and an offset


def bits(spec: RunSpec, shape: ModelShape) -> int:
    """Bits of a quantized weight, in a prequantized checkpoint or by quantization at load time; 0 without either."""
    requested = registry.QUANTIZATIONS[spec.method.quantization].bits if spec.method.kind == "lora" else 0
    return shape.weight_bits or requested


def quantized_modules(spec: RunSpec, shape: ModelShape, names: Sequence[str] = ()) -> list[ModuleSpec]:
    """The modules that are quantized: every linear layer but the output layer. `names`: as in ModelShape.modules."""
    return list(_linear_modules(shape, names)) if bits(spec, shape) else []


def quantized_matrices(spec: RunSpec, shape: ModelShape) -> Mapping[tuple[int, int], int]:
    """The sizes of the matrices that are quantized, (rows, columns), and how often each occurs."""
    return _linear_matrices(shape) if bits(spec, shape) else {}


def _linear_modules(shape: ModelShape, names: Sequence[str] = ()) -> Iterator[ModuleSpec]:
    return (leaf for leaf in shape.modules(names) if leaf.is_linear and leaf.path != shape.head)


@lru_cache(maxsize=64)  # one check needs it dozens of times
def _linear_matrices(shape: ModelShape) -> Mapping[tuple[int, int], int]:
    found: Counter[tuple[int, int]] = Counter()
    for leaf in _linear_modules(shape):
        found[leaf.out_features, leaf.in_features] += leaf.count
    return found


def weight_count(matrices: Mapping[tuple[int, int], int]) -> int:
    """Weights in all of these matrices; biases are not quantized."""
    return sum(count * rows * columns for (rows, columns), count in matrices.items())


def scale_bytes(spec: RunSpec, shape: ModelShape, matrices: Mapping[tuple[int, int], int]) -> int:
    """Bytes of scales and codebooks of all of these matrices."""
    if shape.weight_bits:  # a 16-bit scale and a zero point for each group
        groups = sum(
            count * rows * -(-columns // (shape.group_size or columns)) for (rows, columns), count in matrices.items()
        )
        return groups * (16 + shape.weight_bits) // 8
    return sum(count * _scale_bytes(spec, *size) for size, count in matrices.items())


def _scale_bytes(spec: RunSpec, rows: int, columns: int) -> int:
    if spec.method.quantization == "int8":
        return rows * 4
    blocks = -(-rows * columns // BLOCK)
    if not spec.method.bnb_4bit_use_double_quant:
        return blocks * 4 + CODEBOOK_BYTES
    return blocks + -(-blocks // SECOND_BLOCK) * 4 + CODEBOOK_BYTES + SECOND_CODEBOOK_BYTES


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
