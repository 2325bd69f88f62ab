"""Which examples a run trains on, and which it evaluates on: the validation split and data.max_samples.

The run selects examples with these functions, and the inspection selects their positions, so that the checks know which
examples are left.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


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


def sample(examples: Sequence[T], max_samples: int, seed: int, shuffles: bool = False) -> list[T]:
    """At most `max_samples` examples, drawn at random; 0: all, in their order unless `shuffles`."""
    drawn = list(examples)
    if max_samples or shuffles:
        random.Random(seed).shuffle(drawn)
    return drawn[: max_samples or None]
