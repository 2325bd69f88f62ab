"""Which examples a run trains on, and which it evaluates on: the validation split, data.max_samples, and the mixture of
several datasets.

The run selects examples with these functions, and the inspection selects their positions, so that the checks know which
examples are left.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, TypeVar

from backend.data.copies import digest

T = TypeVar("T")
FIRST_VALIDATION = 1000  # how many of the examples held out of a streamed dataset are evaluated


def validation_size(count: int, share: float) -> int:
    """Examples of a validation split. Both parts get at least one; a single example cannot be split."""
    return min(count - 1, max(1, round(count * share))) if count > 1 else 0


def split(examples: Sequence[T], share: float, seed: int) -> tuple[list[T], list[T]]:
    """(training, validation) examples, each in their order; `seed` decides which."""
    order = list(range(len(examples)))
    random.Random(seed).shuffle(order)
    chosen = set(order[: validation_size(len(examples), share)])
    train = [example for number, example in enumerate(examples) if number not in chosen]
    return train, [example for number, example in enumerate(examples) if number in chosen]


def is_held_out(value: Any, share: float, seed: int) -> bool:
    """Whether an example of a streamed dataset belongs to its validation split. Its content decides, with `seed`, since
    the number of examples is not known; so equal examples are in the same part."""
    return digest([seed, value]) < share * 2**64


def sample(examples: Sequence[T], max_samples: int, seed: int, shuffles: bool = False) -> list[T]:
    """At most `max_samples` examples, drawn at random; 0: all, in their order unless `shuffles`."""
    drawn = list(examples)
    if max_samples or shuffles:
        random.Random(seed).shuffle(drawn)
    return drawn[: max_samples or None]


MOST_TIMES = 100  # the most examples of an epoch, as a multiple of those of all datasets


def is_absurd(sizes: Sequence[int], counts: Sequence[int]) -> bool:
    """Whether an epoch would be so much longer than the datasets that the weights must be wrong."""
    return sum(counts) > MOST_TIMES * max(1, sum(sizes))


def mixed_counts(sizes: Sequence[int], weights: Sequence[float], mixing: str) -> list[int]:
    """How many examples of each dataset an epoch has, at least one. `sizes`: its training examples; `mixing`: a value
    of data.mixing."""
    if mixing == "concatenate":
        return [max(1, round(size * weight)) if size else 0 for size, weight in zip(sizes, weights, strict=True)]
    limit = min if mixing == "interleave_first_exhausted" else max
    per_weight = limit(size / weight for size, weight in zip(sizes, weights, strict=True))
    return [max(1, round(per_weight * weight)) if size else 0 for size, weight in zip(sizes, weights, strict=True)]


def mixed(sizes: Sequence[int], weights: Sequence[float], mixing: str, seed: int, shuffles: bool = False) -> array[int]:
    """The examples of an epoch in their order, as positions in all datasets one after the other. An example is repeated
    only after all others of its dataset are used as often; `seed` decides which are used once more, and the order."""
    starts = accumulate((0, *sizes))
    parts = []
    rows = zip(starts, sizes, mixed_counts(sizes, weights, mixing), strict=False)
    for number, (start, size, count) in enumerate(rows):
        draw = random.Random(f"{seed} {number}")  # else datasets of the same size would draw the same rows
        chosen = sorted(draw.sample(range(size), count % size)) if size else []
        parts.append([*list(range(size)) * (count // size), *chosen] if size else [])
        parts[-1] = [start + position for position in parts[-1]]
    order = [number for number, part in enumerate(parts) for _ in part]
    if mixing != "concatenate" or shuffles:
        random.Random(seed).shuffle(order)
    remaining = [iter(part) for part in parts]
    return array("q", (next(remaining[number]) for number in order))
