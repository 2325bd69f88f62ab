"""Device test: seconds of matmul, point-to-point messages and all-reduce on every rank of a spec; names what is slow.

Imports preflight, runs. It is a run in a scratch folder whose command starts backend.train.device_test instead of the
trainer, on the same nodes with the same launcher and environment.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from backend.preflight import Report
from backend.runs import Plan
from backend.runs.folder import ALIVE, Run, RunError, runs

FOLDER = ".device-tests"  # in the runs folder
TRAINER, TEST = "backend.train", "backend.train.device_test"
# Equal GPUs differ by a few percent, and a GPU that is throttled, shared or in a slower slot by far more.
SLOW_DEVICE = 0.85  # of the median
SLOW_LINK = 0.5  # of the median: links between nodes are compared with each other only


def create(root: Path, report: Report) -> Run:
    """The run of a device test in the scratch folder of the runs folder `root`. Raises RunError."""
    for earlier in runs(root / FOLDER):
        if earlier.state not in ALIVE:
            shutil.rmtree(earlier.path, ignore_errors=True)
    return Run.create(root / FOLDER, f"{report.title} devices", planned_test(report.plan), datetime.now())


def planned_test(plan: Plan) -> Plan:
    """`plan` with the test in place of the trainer, on every node."""
    nodes = {name: _tested(argv) for name, argv in plan.other_nodes.items()}
    return replace(plan, argv=_tested(plan.argv), other_nodes=nodes, then=())


def _tested(argv: Sequence[str]) -> tuple[str, ...]:
    return tuple(TEST if argument == TRAINER else argument for argument in argv)


def result(run: Run) -> dict[str, Any]:
    """What a test measured: `ranks` (host, device, flops, and bytes/s to_next), all_reduce in bytes/s; and `problems`,
    sentences. Raises RunError if the test has no result."""
    found = run.result()
    if not found:
        failure = run.failure()
        raise RunError(f"{failure['sentence']} {failure['help']}".strip() if failure else run.summary()["sentence"])
    return {**found, "problems": list(problems(found["ranks"]))}


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
