"""What a run's own figures tell about its health: spikes, drops, a slow rank, a disk that is nearly full.

Figures are compared with the last ones of the same run, on a logarithmic scale: losses, gradient norms and throughput
differ by orders of magnitude between runs, and vary by factors within one.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backend.wording import data_size

KEPT, NEEDED = 50, 20  # earlier figures that a new one is compared with: at most, and at least
SPREADS = 6.0  # standard deviations, estimated from the median absolute deviation
DEVIATION = 1.4826  # a normal distribution's standard deviation in median absolute deviations
ADOPTED = 10  # this many unusual figures in a row are a new level, which later ones are compared with

FIRST_LOSSES, LAST_LOSSES = 3, 5  # what is compared for a rise over the whole run; a spike needs more points
FEWEST_LOSSES = 2  # instead of LAST_LOSSES, with an evaluation or at the end
# (factor, distance) by which a loss must exceed all of the first losses; the very first one, that of the untrained
# model; or the lowest of them, after which the loss may have exploded at once. Factor and distance must both be
# exceeded, since a loss near 0 easily doubles.
ABOVE_ALL, ABOVE_FIRST, ABOVE_LEAST = (3.0, 3.0), (5.0, 7.0), (10.0, 10.0)

LOSS, GRADIENT, THROUGHPUT, NOT_FINITE = "loss spike", "gradient spike", "throughput drop", "non-finite loss"
RISE = "loss rise"
SLOW_RANK, DATA, IDLE, DISK = "slow rank", "data loading", "idle GPU", "disk"
SKIPPED, EXAMPLES = "skipped steps", "other examples"
KINDS = (LOSS, RISE, GRADIENT, THROUGHPUT, NOT_FINITE, SKIPPED, SLOW_RANK, DATA, IDLE, DISK, EXAMPLES)
SPIKES = (LOSS, RISE, GRADIENT)  # after which train.stop_on_spike stops

# Skipped optimizer steps that are reported. fp16's loss scale of 65,536 is halved after each: a few at the start are
# usual.
MANY_SKIPPED = 10

SAMPLES = 5  # measurements of the ranks that are averaged: one alone may be an accident
SLOW_FACTOR = 1.5  # times the median of the other ranks
DATA_SHARE = 0.3  # of the time
IDLE_PERCENT = 10.0
CHECKPOINTS_LEFT = 1.5  # free space, in checkpoints, below which the disk is nearly full
BYTES_LEFT = 1024**3  # free bytes below which it is nearly full before the first checkpoint


@dataclass(frozen=True)
class Alert:
    """Something that needs a user's attention; `text` is one sentence."""

    kind: str
    text: str


class Level:
    """The usual values of a figure. `factor` is the least change that counts; below 1, a drop is looked for. An alert
    takes `in_a_row` unusual values, each of them at least `floor`."""

    def __init__(self, factor: float, in_a_row: int, floor: float = 0.0) -> None:
        self.least, self.in_a_row, self.floor = math.log(factor), in_a_row, floor
        self._usual: deque[float] = deque(maxlen=KEPT)  # logarithms
        self._unusual: list[float] = []

    def add(self, value: Any) -> float | None:
        """Take note of a value. Returns the usual value if this one completes a series of unusual values."""
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            return None
        new = math.log(value)
        if value < self.floor or len(self._usual) < NEEDED or not self._is_unusual(new):
            self._usual.append(new)
            self._unusual.clear()
            return None
        self._unusual.append(new)
        usual = math.exp(statistics.median(self._usual))
        if len(self._unusual) == ADOPTED:
            self._usual = deque(self._unusual * (NEEDED // ADOPTED), maxlen=KEPT)
            self._unusual.clear()
        return usual if len(self._unusual) == self.in_a_row else None

    def _is_unusual(self, new: float) -> bool:
        middle = statistics.median(self._usual)
        spread = DEVIATION * statistics.median(abs(value - middle) for value in self._usual)
        change, limit = new - middle, max(abs(self.least), SPREADS * spread)
        return change > limit if self.least > 0 else change < -limit


class Rise:
    """Whether the loss is far above the first ones of this start. It is reported once."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=LAST_LOSSES)
        self._reported, self._count = False, 0

    def add(self, loss: Any) -> None:
        """Take note of a loss."""
        if not isinstance(loss, int | float) or not math.isfinite(loss):
            return
        self._count += 1
        if len(self._first) < FIRST_LOSSES:
            self._first.append(loss)
        if len(self._first) > 1:
            self._last.append(loss)

    def check(self, needed: int = LAST_LOSSES) -> Alert | None:
        """The alert if the last losses, at least `needed`, are all far above the first ones."""
        if self._reported or len(self._last) < needed:
            return None
        count = max(needed, min(LAST_LOSSES, self._count // 2))  # the later half of a short run
        if min([*self._last][-count:]) <= _far_above(self._first):
            return None
        self._reported = True
        text = f"The loss rose from {_figure(self._first[0])} to {_figure(self._last[-1])}."
        return Alert(RISE, f"{text} Lower the learning rate.")


def _far_above(first: Sequence[float]) -> float:
    """What a loss must exceed to be far above the first ones."""
    starts = ((max(first), ABOVE_ALL), (first[0], ABOVE_FIRST), (min(first), ABOVE_LEAST))
    return min(max(factor * start, start + distance) for start, (factor, distance) in starts)


def before_rise(losses: Iterable[tuple[int, float]]) -> int | None:
    """The step of the last loss that was not far above the first ones, of (step, loss) in order; None without any."""
    finite = [(step, loss) for step, loss in losses if math.isfinite(loss)]
    if not finite:
        return None
    limit = _far_above([loss for _, loss in finite[:FIRST_LOSSES]])
    return next(step for step, loss in reversed(finite) if loss <= limit)


def _figure(loss: float) -> str:
    return f"{loss:,.0f}" if abs(loss) >= 100 else f"{loss:.3g}"


class Curves:
    """The logged points of one start of a run."""

    def __init__(self) -> None:
        # Noise of small batches is symmetric and wide; two values in a row above it are a change of the training.
        self._loss, self._gradient = Level(1.5, in_a_row=2, floor=0.1), Level(5.0, in_a_row=2, floor=1.0)
        self._throughput = Level(1 / 1.5, in_a_row=3)
        self._finite, self._rise, self._spiked = True, Rise(), False
        self._skipped = 0

    def add(self, point: Mapping[str, Any]) -> list[Alert]:
        """The alerts of a new point: loss, grad_norm, tokens_per_second, skipped_steps; or eval_loss."""
        loss = point.get("loss")
        if loss is None:
            self._rise.add(point.get("eval_loss"))
            return self._check_rise(FEWEST_LOSSES) if "eval_loss" in point else []
        self._rise.add(loss)
        checks = (self._check_finite(loss), self._check_skipped(point), *self._check_levels(point))
        found = [alert for alert in checks if alert]
        self._spiked = self._spiked or any(alert.kind == LOSS for alert in found)
        return found + self._check_rise(LAST_LOSSES)

    def end(self) -> list[Alert]:
        """The alerts at the end of the training, which may have few points."""
        found = self._rise.check(FEWEST_LOSSES)
        return [found] if found else []

    def _check_rise(self, needed: int) -> list[Alert]:
        """During training, a rise that was reported as a spike is not reported again: the loss may still recover."""
        found = None if self._spiked else self._rise.check(needed)
        return [found] if found else []

    def _check_finite(self, loss: float) -> Alert | None:
        was, self._finite = self._finite, math.isfinite(loss)
        if self._finite or not was:
            return None
        return Alert(NOT_FINITE, f"The loss is {'NaN' if math.isnan(loss) else 'infinite'}.")

    def _check_skipped(self, point: Mapping[str, Any]) -> Alert | None:
        was, self._skipped = self._skipped, point.get("skipped_steps", 0)
        if not was < MANY_SKIPPED <= self._skipped:
            return None
        return Alert(
            SKIPPED,
            f"{self._skipped} optimizer steps were skipped because gradients were NaN or infinite; a skipped step "
            "changes no weight.",
        )

    def _check_levels(self, point: Mapping[str, Any]) -> list[Alert | None]:
        def compare(level: Level, key: str, kind: str, text: str) -> Alert | None:
            usual = level.add(point.get(key))
            return None if usual is None else Alert(kind, text.format(value=point[key], usual=usual))

        last = f"median of the last {KEPT} points"
        return [
            compare(self._loss, "loss", LOSS, f"The loss rose to {{value:.4g}}; the {last} is {{usual:.4g}}."),
            compare(
                self._gradient, "grad_norm", GRADIENT,
                f"The gradient norm rose to {{value:.4g}}; the {last} is {{usual:.4g}}.",
            ),
            compare(
                self._throughput, "tokens_per_second", THROUGHPUT,
                f"Throughput fell to {{value:,.0f}} tokens/s; the {last} is {{usual:,.0f}} tokens/s.",
            ),
        ]  # fmt: skip


class Ranks:
    """Measurements of all ranks at the same moments: dicts with `host`, `device`, `probe` (seconds of the same small
    matmul), `data` (the share of time spent waiting for batches) and, on a GPU, `utilization` in percent. `can_add`:
    whether the run may have more DataLoader workers; with data.streaming, one is the maximum."""

    def __init__(self, can_add: bool = True) -> None:
        self._faster = "Raise train.dataloader_num_workers" if can_add else "Set data.streaming to false"
        self._samples: deque[Sequence[Mapping[str, Any]]] = deque(maxlen=SAMPLES)
        self._reported: set[tuple[str, int]] = set()

    def add(self, ranks: Sequence[Mapping[str, Any]]) -> list[Alert]:
        """The alerts of a new measurement. Each rank has one alert of a kind until the rank has recovered."""
        self._samples.append(ranks)
        if len(self._samples) < SAMPLES:
            return []
        found = {**self._slow(), **self._waiting(), **self._idle()}
        new = [Alert(kind, text) for (kind, rank), text in found.items() if (kind, rank) not in self._reported]
        self._reported = set(found)
        return new

    def _means(self, key: str) -> dict[int, float]:
        """The mean of a measurement for each rank that has it."""
        columns = zip(*self._samples, strict=True)
        return {
            rank: statistics.fmean(sample[key] for sample in column)
            for rank, column in enumerate(columns)
            if all(key in sample for sample in column)
        }

    def _name(self, rank: int) -> str:
        here = self._samples[-1][rank]
        return f"Rank {rank} ({here['device']} on {here['host']})"

    def _slow(self) -> dict[tuple[str, int], str]:
        found, means = {}, self._means("probe")
        for rank, seconds in means.items():
            others = [value for other, value in means.items() if other != rank]
            if others and seconds > SLOW_FACTOR * statistics.median(others):
                found[SLOW_RANK, rank] = (
                    f"{self._name(rank)} is slow: a matmul takes {seconds / statistics.median(others):.1f} times as "
                    "long as on the other ranks, which wait for it. Check the device for other processes, a power "
                    "limit and thermal throttling."
                )
        return found

    def _waiting(self) -> dict[tuple[str, int], str]:
        return {
            (DATA, rank): (
                f"{self._name(rank)} spends {share:.0%} of its time waiting for batches. {self._faster}, or check the "
                "storage that holds the data."
            )
            for rank, share in self._means("data").items()
            if share > DATA_SHARE
        }

    def _idle(self) -> dict[tuple[str, int], str]:
        return {
            (IDLE, rank): f"{self._name(rank)} is nearly idle: its GPU is busy {busy:.0f}% of the time."
            for rank, busy in self._means("utilization").items()
            if busy < IDLE_PERCENT
        }


class Disk:
    """The free space of the file system with the run's folder."""

    def __init__(self) -> None:
        self._reported = False

    def add(self, free: int, checkpoint: int) -> list[Alert]:
        """`checkpoint`: bytes of the last checkpoint, 0 before the first one or if none is saved."""
        was, self._reported = self._reported, free < (CHECKPOINTS_LEFT * checkpoint or BYTES_LEFT)
        if was or not self._reported:
            return []
        need = f", and a checkpoint takes {data_size(checkpoint)}" if checkpoint else ""
        return [Alert(DISK, f"The disk is nearly full: {data_size(free)} is free{need}.")]
