"""The tokens of a batch: how many are computed, and how many of them are padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backend import registry
from backend.memory import MemoryContext
from backend.memory.steps import MAX_LENGTHS, trained_lengths


@dataclass(frozen=True)
class Batch:
    """A batch of one device, on average. `length`: tokens of each sequence, padding included; `trained`: those without
    padding; `attended`: tokens of the sequence that attention is computed over, less than `length` if packed sequences
    are kept apart; `imbalance`: how much longer than the average the longest batch of all ranks is."""

    sequences: int
    length: float
    trained: float
    attended: float
    imbalance: float = 1.0

    @property
    def tokens(self) -> float:
        """Tokens that are computed."""
        return self.sequences * self.length


def expected_batch(ctx: MemoryContext, lengths: Sequence[int], is_packed: bool = True) -> Batch:
    """The average batch of examples with these token counts, in ascending order; without any, all have the max sequence
    length. `is_packed`: the examples are packed if the spec says so."""
    data, limit, sequences = ctx.spec.data, ctx.spec.data.max_length, ctx.sequences
    known = [length for length in lengths[:: len(lengths) // MAX_LENGTHS + 1] if length > 0]
    if not known:
        return Batch(sequences, limit, limit, limit)
    if data.packing and is_packed:
        attended = sum(min(length, limit) * length for length in known) / sum(known)
        is_apart = ctx.spec.model.attn_implementation in registry.FLASH_ATTENTIONS
        return Batch(sequences, limit, limit, attended if is_apart else limit)
    pieces = trained_lengths(known, limit, ctx.spec.train.stage == "pretraining")
    mean = sum(pieces) / len(pieces)
    if ctx.spec.train.train_sampling_strategy == "group_by_length":
        return Batch(sequences, mean, mean, mean)
    padded = expected_maximum(pieces, sequences)
    longest = expected_maximum(pieces, sequences * ctx.run.data_parallel_size)
    return Batch(sequences, padded, mean, padded, longest / padded)


def expected_maximum(values: Sequence[int], count: int) -> float:
    """The expected largest of `count` values drawn from `values`, which are in ascending order."""
    size = len(values)
    return sum(value * (((i + 1) / size) ** count - (i / size) ** count) for i, value in enumerate(values))
