"""Base weights that are packed, and what is stored beside them. Floor 2. Imports catalog, shape, spec.

Source: bitsandbytes 0.50 functional.py (QuantState) and nn/modules.py; Dettmers et al. 2023, QLoRA, section 3.
"""

from __future__ import annotations

from collections.abc import Iterable

from backend import registry
from backend.config import RunSpec
from backend.modelspec import Leaf, ModelShape
from backend.registry.quantization import BLOCK, SECOND_BLOCK

TABLES = 16 * 4  # the levels of 4 bits; a second table and an offset come with double quantization
SECOND_TABLES = 256 * 4 + 4


def bits(spec: RunSpec, shape: ModelShape) -> int:
    """Bits of a packed weight: of how the model came, or as it is packed while loading; 0: nothing is packed."""
    asked = registry.QUANTIZATIONS[spec.method.quantization].bits if spec.method.kind == "lora" else 0
    return shape.bits or asked


def leaves(spec: RunSpec, shape: ModelShape) -> list[Leaf]:
    """The modules that are packed: every linear one but the output layer."""
    if not bits(spec, shape):
        return []
    return [leaf for leaf in shape.leaves() if leaf.linear and leaf.path != shape.head]


def weights(found: Iterable[Leaf]) -> int:
    """Weights of these modules; biases stay as they are."""
    return sum(leaf.inputs * leaf.outputs for leaf in found)


def scales(spec: RunSpec, shape: ModelShape, found: Iterable[Leaf]) -> int:
    """Bytes beside the packed weights: scales, and tables of levels."""
    if shape.bits:  # a scale of 16 bits and a zero point for each group
        return (
            sum(leaf.outputs * -(-leaf.inputs // (shape.group or leaf.inputs)) for leaf in found)
            * (16 + shape.bits)
            // 8
        )
    if spec.method.quantization == "int8":
        return sum(leaf.outputs * 4 for leaf in found)
    blocks = [-(-leaf.inputs * leaf.outputs // BLOCK) for leaf in found]
    if not spec.method.bnb_4bit_use_double_quant:
        return sum(count * 4 + TABLES for count in blocks)
    return sum(count + -(-count // SECOND_BLOCK) * 4 + TABLES + SECOND_TABLES for count in blocks)


def scales_in_words(spec: RunSpec, shape: ModelShape) -> str:
    """As `scales`."""
    if shape.bits:
        return f"{16 + shape.bits} bits for every {shape.group or 'row'} weights, as the model came"
    if spec.method.quantization == "int8":
        return "4 bytes for every output"
    if not spec.method.bnb_4bit_use_double_quant:
        return f"4 bytes for every {BLOCK} weights"
    return f"a byte for every {BLOCK} weights, and 4 bytes for every {SECOND_BLOCK} of those"
