"""What a device test measured on each rank, in words: which device or link is slow."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from backend.wording import figure

# GPUs of one model differ by a few percent; one that is throttled, shared or in a slower slot differs by far more.
SLOW_DEVICE = 0.85  # of the median
SLOW_LINK = 0.5  # of the median: links between nodes are compared with each other only


def problems(ranks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A sentence for each device and each link that is slow."""
    typical = statistics.median(rank["flops"] for rank in ranks)
    for number, rank in enumerate(ranks):
        if rank["flops"] < SLOW_DEVICE * typical:
            yield (
                f"Rank {number} ({rank['device']} on {rank['host']}) is slow: its matmul throughput is "
                f"{rank['flops'] / typical:.0%} of the median of all ranks. Check the device for other processes, a "
                "power limit and thermal throttling."
            )
    for within in (True, False):
        yield from _slow_links(ranks, within)


def _slow_links(ranks: Sequence[Mapping[str, Any]], within: bool) -> Iterator[str]:
    """The slow links `within` nodes, or between them."""
    pairs = [(number, (number + 1) % len(ranks)) for number in range(len(ranks))]
    links = [(a, b) for a, b in pairs if a != b and (ranks[a]["host"] == ranks[b]["host"]) == within]
    typical = statistics.median([ranks[a]["to_next"] for a, _ in links] or [0.0])
    for a, b in links:
        if ranks[a]["to_next"] < SLOW_LINK * typical:
            share = ranks[a]["to_next"] / typical
            yield (
                f"The link from rank {a} on {ranks[a]['host']} to rank {b} on {ranks[b]['host']} is slow: its "
                f"bandwidth is {share:.0%} of the median {'intra' if within else 'inter'}-node bandwidth. "
                "With NCCL, NCCL_DEBUG=INFO shows which transport it uses."
            )


def summary(ranks: Sequence[Mapping[str, Any]], all_reduce: float) -> str:
    """The figures of all ranks in a sentence. `all_reduce` is a bus bandwidth in bytes/s."""
    flops = [rank["flops"] / 1e12 for rank in ranks]
    reached = f"{figure(min(flops))} to {figure(max(flops))} TFLOP/s"
    return (
        f"The devices reach {reached} in a matmul, and an all-reduce {figure(all_reduce / 1e9)} GB/s of bus bandwidth."
    )
