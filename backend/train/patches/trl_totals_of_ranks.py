"""TRL's trainers sum tokens, entropies and KL estimates over the ranks with a function that is meant for examples.

accelerate accelerator.py, `gather_for_metrics`: in the last optimizer step of an epoch it keeps only as many of the
gathered values as the last batches have examples that are not repeated. TRL gathers one value per rank.

Without the patch the values of the last ranks are missing: the number of trained tokens and the tokens per second are
too low, for all micro-batches of that step, and the KL estimate of KTO, which is part of its loss, is that of the first
ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LIBRARY, SEEN_IN = "trl", "1.16.0"


@contextmanager
def kept(accelerator: Any) -> Iterator[None]:
    """While a batch is trained, `gather_for_metrics` keeps the values of all ranks. What is trained counts, also if it
    is trained a second time in this epoch."""
    accelerator.gather_for_metrics = accelerator.gather
    try:
        yield
    finally:
        del accelerator.gather_for_metrics
