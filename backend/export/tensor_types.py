"""The type of each quantized weight of a k-quant: for the certificate, and in a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from backend.wording import names

BLOCK = 256  # elements of a block of a k-quant


class QuantizedWeight(NamedTuple):
    """A weight: its name, the elements of a row, and its type, such as Q4_K."""

    name: str
    columns: int
    type: str


def group(weights: Sequence[QuantizedWeight]) -> dict[str, list[str]]:
    """Type -> the names of the weights that have it."""
    types = sorted({weight.type for weight in weights})
    return {type: [weight.name for weight in weights if weight.type == type] for type in types}


def describe_replaced(weights: Sequence[QuantizedWeight], format: str) -> str:
    """A sentence about the weights whose type is not a k-quant because of their size; '' if there are none."""
    replaced = [weight for weight in weights if weight.columns % BLOCK]
    if not replaced:
        return ""
    sizes, types = (sorted({weight[field] for weight in replaced}) for field in (1, 2))
    return (
        f"{len(replaced)} of {len(weights)} quantized weights have rows of {names(sizes)} elements, which is not a "
        f"multiple of {BLOCK}, so they cannot have the types of {format}. Footplate uses {names(types)} "
        "instead, which needs more space."
    )
