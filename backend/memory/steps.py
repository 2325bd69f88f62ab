"""The optimizer steps of a run, also where packing decides how many sequences there are."""

from __future__ import annotations

import math
from collections.abc import Sequence

from backend.config import RunSpec
from backend.resolve import ResolvedRun

MAX_LENGTHS = 2000  # lengths that are used; more would change the averages by less than 1%


def epoch_steps(spec: RunSpec, run: ResolvedRun, lengths: Sequence[int]) -> float | None:
    """Optimizer steps of an epoch; packed sequences are counted by the tokens of examples with these `lengths`. None if
    unknown."""
    examples, limit = run.num_train_examples, spec.data.max_length
    if run.steps_per_epoch or not examples or not spec.data.packing or not lengths:
        return run.steps_per_epoch
    trained = trained_lengths(lengths, limit, spec.train.stage == "pretraining")
    return examples * sum(trained) / len(trained) / (limit * run.global_batch_size)


def run_steps(spec: RunSpec, run: ResolvedRun, lengths: Sequence[int]) -> int | None:
    """Optimizer steps of the whole run, counted in the same way."""
    each = epoch_steps(spec, run, lengths)
    if run.total_steps is not None or each is None:
        return run.total_steps
    return max(1, math.ceil(spec.train.num_train_epochs * each))


def trained_lengths(lengths: Sequence[int], limit: int, splits: bool) -> list[int]:
    """The token counts of the sequences that examples of these token counts become, ascending: cut at `limit`, or
    split into several sequences of at most `limit` tokens."""
    if not splits:
        return [min(length, limit) for length in lengths]
    whole = [limit for length in lengths for _ in range(min(length // limit, MAX_LENGTHS))]
    return sorted([*whole, *(length % limit for length in lengths if length % limit)])
