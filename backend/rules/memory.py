"""Rules of memory: what clearly does not fit, what is close, and the changes that make it fit.

Floor 3. Imports: below.
"""

from __future__ import annotations

from dataclasses import replace

from backend.config import RunSpec
from backend.machine import GIB
from backend.memory import Estimate, estimate
from backend.rules.base import Case, Example, Fix, Violation, amount, rule
from backend.rules.common_fixes import FSDP2
from backend.rules.examples import DEMO, H100, LAPTOP, LLAMA_8B, TWO_H100
from backend.rules.memory_remedies import CLEARLY, ways

PERHAPS = 1.25  # of what is free, at most: the estimate itself is within it, or nearly
EIGHT_B = replace(DEMO, shape=LLAMA_8B)
WHOLE = {"method.kind": "full", "train.learning_rate": 2e-5}
NEED = estimate(RunSpec(), LAPTOP, DEMO.shape, longest=DEMO.longest_example).device_bytes
ZERO = {**WHOLE, "parallel.strategy": "zero3"}
POOR = replace(TWO_H100, ram_bytes=48 * GIB, ram_free_bytes=48 * GIB)
NO_WAY = "No option changes that: it takes a smaller model, or a machine with more memory."
THERE = "more memory on the devices"
SOURCE = "the estimate: closed formulas, checked against measured peaks"


@rule(
    "MEM001",
    "error",
    fields=("train.per_device_train_batch_size", "data.max_length", "method.kind"),
    title="It does not fit into memory",
    source=SOURCE,
    fails_on=Example(WHOLE, H100, EIGHT_B),
    passes_on=Example({}, H100, EIGHT_B),
    at_start=True,
)
def does_not_fit(case: Case) -> Violation | None:
    """The run would end with an out-of-memory error, on a CPU by the system's hand and without a word."""
    found = case.estimate
    if found.fits is None or not _beyond(found):
        return None
    fixes = ways(case, 1.0) or ways(case, PERHAPS)
    return Violation(_message(case) if fixes else f"{_message(case)} {NO_WAY}", tuple(fixes), _fields(case))


@rule(
    "MEM002",
    "warning",
    fields=("train.per_device_train_batch_size", "data.max_length", "method.kind"),
    title="It may not fit into memory",
    source=SOURCE,
    fails_on=Example({}, replace(LAPTOP, ram_free_bytes=NEED)),
    passes_on=Example(),
    at_start=True,
)
def nearly_full(case: Case) -> Violation | None:
    """The most that the estimate allows for is more than what is free, so this may or may not fit."""
    found = case.estimate
    if found.fits is None or found.high_bytes <= found.capacity_bytes or _beyond(found):
        return None
    most = f"It may come to {amount(found.high_bytes)}" if found.fits else "Most likely it does not"
    return Violation(f"{most}: {_message(case)}", tuple(ways(case, 1.0)), _fields(case))


@rule(
    "MEM003",
    "error",
    fields=("parallel.strategy", "parallel.offload_optimizer", "parallel.cpu_offload"),
    title="It does not fit into the host's RAM",
    source=SOURCE,
    manual_fix="Fewer processes on a machine hold fewer copies; a machine with more RAM holds them all.",
    fails_on=Example({**ZERO, "parallel.offload_optimizer": "cpu"}, POOR, EIGHT_B),
    passes_on=Example({**ZERO, "parallel.offload_optimizer": "cpu"}, TWO_H100, EIGHT_B),
    at_start=True,
)
def host_full(case: Case) -> Violation | None:
    """Each process reads the weights into RAM before its device has them, and what is offloaded stays there. Where it
    ends, the system kills processes without a word."""
    found, room = case.estimate, case.machine.ram_free_bytes
    if found.fits is None or found.host_bytes <= CLEARLY * room:
        return None
    largest = max((row for row in found.rows if row.where == "host"), key=lambda row: row.bytes)
    said = f"{amount(found.host_bytes)} on each node, and it has {amount(room)} free"
    ways = (
        FSDP2,
        Fix("Optimizer state on the devices", {"parallel.offload_optimizer": "none"}, cost=THERE),
        Fix(
            "Nothing offloaded",
            {"parallel.offload_optimizer": "none", "parallel.offload_param": "none"},
            cost=THERE,
        ),
        Fix("Nothing offloaded", {"parallel.cpu_offload": False}, cost=THERE),
    )
    good = [way for way in ways if case.takes(way.patch) and _frees(case, way, room)]
    return Violation(f"{said}. Most of it: {largest.name.lower()}, {amount(largest.bytes)}.", tuple(good[:2]))


def _frees(case: Case, fix: Fix, room: int) -> bool:
    """Whether host and devices have room after it."""
    found = case.estimated(case.with_patch(fix.patch))
    return found.host_bytes <= CLEARLY * room and not _beyond(found)


def _beyond(found: Estimate) -> bool:
    return found.device_bytes > CLEARLY * found.capacity_bytes


def _message(case: Case) -> str:
    found = case.estimate
    place = "each process" if case.run.device == "cpu" else "each device"
    largest = max((row for row in found.rows if row.where == "device"), key=lambda row: row.bytes)
    parts = f"{amount(found.device_bytes)} on {place}, and {amount(found.capacity_bytes)} free"
    return f"{parts}. Most of it: {largest.name.lower()}, {amount(largest.bytes)}."


def _fields(case: Case) -> tuple[str, ...]:
    """The options that the largest row depends on."""
    largest = max((row for row in case.estimate.rows if row.where == "device"), key=lambda row: row.bytes)
    if largest.name in ("Activations", "A layer's gradients", "Loss"):
        return ("train.per_device_train_batch_size", "data.max_length", "train.activation_checkpointing")
    return ("method.kind", "train.optim", "precision.compute")
