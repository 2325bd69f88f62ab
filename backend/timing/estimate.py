"""time_of(): seconds of an optimizer step and of the whole run, as items with formulas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from backend.config import RunSpec
from backend.inspect import CpuSpeed, InputFacts
from backend.machine import Machine
from backend.memory import MemoryContext
from backend.resolve import ResolvedRun
from backend.timing.batch import expected_batch
from backend.timing.communication import Communication, communication
from backend.timing.computing import Part, batch_parts, host_seconds, optimizer_part
from backend.timing.context import TimeContext
from backend.timing.rates import CALIBRATION, Calibration, cpu_calibration, models_of
from backend.timing.uncertainty import step_range
from backend.timing.unpredictable import device_reason, run_reason, step_reason
from backend.timing.whole_run import REST, RunTime, run_time

CPU, OPERATIONS, NETWORK, GPUS, PROCESSES, RANKS = (
    "Waiting for the CPU", "Operator overhead", "Waiting for the network", "Waiting for transfers between GPUs",
    "Transfers between processes", "Waiting for the rank with the longest batch",
)  # fmt: skip
MEASURED_START = 1.5  # uncertainty factor of a start that was measured in earlier runs
NEGLIGIBLE = 0.0005  # of a step: such items are left out
HEADROOM, SAVING_SECONDS = 1.1, 600  # of a time limit: factor on the predicted range, time for a checkpoint
LIMITS = ((6 * 3600, 900), (48 * 3600, 3600), (math.inf, 6 * 3600))  # (time, unit of the limits up to it)


@dataclass(frozen=True)
class TimeEstimate:
    """Seconds of one optimizer step by item, and of the whole run.

    `unknown` is why no time is predicted, the end of a sentence; then all else is empty. `factor`: the real time of a
    step is between the prediction divided by `factor` and multiplied by it, for the reason `factor_reason`. `tokens`
    are those of one step on all devices that are trained on, without padding; `padded` is the share of computed tokens
    that are padding. `run` is None if the number of steps is not known. `cpu` is this machine's CPU, if the run uses
    it. `assumed_length`: the tokens of each example, if they are not known; else 0.
    """

    items: tuple[Part, ...] = ()
    unknown: str = ""
    factor: float = 1.0
    factor_reason: str = ""
    tokens: float = 0
    padded: float = 0
    gpus: int = 0
    run: RunTime | None = None
    price_per_gpu_hour: float | None = None
    cpu: CpuSpeed | None = None
    assumed_length: int = 0

    @property
    def step_seconds(self) -> float:
        """Seconds of one optimizer step."""
        return sum(item.seconds for item in self.items)

    @property
    def tokens_per_second(self) -> float:
        """Tokens that all devices together train on per second, without padding."""
        return self.tokens / self.step_seconds if self.items else 0

    @property
    def dominating(self) -> Part | None:
        """The item that takes the most time."""
        return max(self.items, key=lambda item: item.seconds, default=None)

    @property
    def run_seconds(self) -> tuple[float, float, float] | None:
        """(lowest, predicted, highest) seconds of the whole run; None if the number of steps is not known."""
        if self.run is None:
            return None
        steps, rest = self.run.step_seconds, self.run.assumed_seconds
        start = self.run.seconds - steps - rest
        low = steps / self.factor + start / MEASURED_START + rest / REST
        return low, self.run.seconds, steps * self.factor + start * MEASURED_START + rest * REST

    @property
    def time_limit(self) -> int | None:
        """Seconds of a time limit that the run keeps if its time is within the predicted range: the upper end with
        headroom, rounded up; None if the number of steps is not known."""
        if self.run_seconds is None:
            return None
        least = HEADROOM * self.run_seconds[2] + SAVING_SECONDS
        unit = next(unit for until, unit in LIMITS if least <= until)
        return unit * math.ceil(least / unit)

    @property
    def price(self) -> tuple[float, float, float] | None:
        """(lowest, predicted, highest) price of the whole run; None if the machine's description has no price."""
        if self.price_per_gpu_hour is None or self.run_seconds is None:
            return None
        low, middle, high = (seconds / 3600 * self.gpus * self.price_per_gpu_hour for seconds in self.run_seconds)
        return low, middle, high


def time_of(
    spec: RunSpec, run: ResolvedRun, machine: Machine, facts: InputFacts, calibration: Calibration = CALIBRATION
) -> TimeEstimate:
    """The time of `spec`, which resolves to `run` on `machine`, for the model and the data that were inspected."""
    reason = run_reason(spec, facts) or device_reason(run, machine, facts)
    if reason or facts.shape is None:
        return TimeEstimate(unknown=reason)
    memory = MemoryContext(spec, run, machine, facts.shape, facts.longest_used)
    if reason := step_reason(memory):
        return TimeEstimate(unknown=reason)
    cpu = facts.cpu if run.device == "cpu" else None
    models = () if cpu else tuple(models_of(run, machine))
    rates = cpu_calibration(cpu) if cpu else calibration
    batch = expected_batch(memory, facts.used_lengths)
    found = _predict(TimeContext(memory, batch, models, rates, cpu, facts.labeled_share), facts)
    assumed = 0 if facts.used_lengths or spec.data.packing else spec.data.max_length
    return replace(found, cpu=cpu, assumed_length=assumed)


def _predict(ctx: TimeContext, facts: InputFacts) -> TimeEstimate:
    run, batches = ctx.memory.run, ctx.memory.spec.train.gradient_accumulation_steps
    parts, host, sent = batch_parts(ctx), host_seconds(ctx), communication(ctx)
    gpu = sum(part.seconds for part in parts)
    # The CPU runs ahead of a GPU, unless both need about as long; on a CPU, both follow one another.
    batch = gpu + host if ctx.cpu else (gpu**4 + host**4) ** 0.25
    times = f", for each of {batches} batches" if batches > 1 else ""
    items = [part._replace(seconds=part.seconds * batches, formula=part.formula + times) for part in parts]
    items.append(_cpu_item(ctx, host, batches * (batch - gpu)))
    items += _waiting_items(ctx, batch, sent)
    items.append(optimizer_part(ctx))
    least = NEGLIGIBLE * sum(item.seconds for item in items)
    items = [item for item in items if item.seconds > least]
    total = sum(item.seconds for item in items)
    waiting = sum(item.seconds for item in items if item.label in (NETWORK, GPUS, PROCESSES)) / total
    attention = sum(item.seconds for item in items if item.label == "Attention") / total
    factor, reason = step_range(ctx, waiting, host / batch, attention)
    trained = ctx.batch.sequences * ctx.batch.trained * batches * run.data_parallel_size
    estimate = TimeEstimate(
        tuple(items), "", factor, reason, trained, 1 - ctx.batch.trained / ctx.batch.length, run.world_size,
        price_per_gpu_hour=ctx.memory.machine.price_per_gpu_hour,
    )  # fmt: skip
    return replace(estimate, run=run_time(ctx, facts, total))


def _cpu_item(ctx: TimeContext, host: float, seconds: float) -> Part:
    formula = (
        f"launching the operators of a batch takes {host:.2g} s, {ctx.calibration.operation_seconds * 1e6:.0f} us each"
    )
    return Part(OPERATIONS if ctx.cpu else CPU, seconds, formula)


def _waiting_items(ctx: TimeContext, batch: float, sent: Communication) -> Sequence[Part]:
    """The communication that computing does not hide, and waiting for the rank with the longest batch."""
    label = NETWORK if sent.between_nodes else PROCESSES if ctx.cpu else GPUS
    batches, overlap = ctx.memory.spec.train.gradient_accumulation_steps, ctx.calibration.overlap
    each = sent.hidden / sent.rounds
    exposed = sent.rounds * (max(batch, each) + (1 - overlap) * min(batch, each) - batch)
    rate = ctx.links.between if sent.between_nodes else ctx.links.inside
    formula = f"{sent.bytes:,} bytes per step, at {rate / 1e9:,.3g} GB/s, minus what overlaps with computing"
    # Without communication in each batch, ranks wait only once for a step of several batches.
    spread = (ctx.batch.imbalance - 1) / (1 if sent.rounds == batches else batches**0.5)
    ranks = spread * batch * batches if ctx.memory.run.data_parallel_size > 1 else 0
    return [
        Part(label, sent.blocking + exposed, formula),
        Part(RANKS, ranks, "in each step, all ranks wait for the one with the longest sequences"),
    ]
