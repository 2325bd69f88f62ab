"""A trial: a short training whose steps are timed after a warm-up."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

# torch.compile, DataLoader workers and memory allocators need a few steps.
WARM_UP, MEASURED = 3, 10
STEPS = WARM_UP + MEASURED
LEAST_MEASURED, ENOUGH_SECONDS = 6, 20.0  # if steps are long, fewer are measured
NOISE = 3.5  # times the spread of n pairs / sqrt(n): settings without effect seldom look faster than this
LEAST_GAIN = 0.02  # a smaller difference is not kept, however small the spread is
CLEARLY_SLOWER, SURE_AFTER = 0.75, 3  # a trial stops if this many measured steps are all below this speed
COMPARED_STEPS = 3  # steps whose losses are compared
SIGMA = 1.4826  # the standard deviation of a normal distribution, as a multiple of the median absolute deviation

End = Literal["measured", "slow", "late", "stopped", "failed"]


@dataclass(frozen=True)
class Step:
    """An optimizer step: its seconds, the tokens of all ranks (0: not counted), its loss (None: not finite)."""

    seconds: float
    tokens: float
    loss: float | None

    @property
    def rate(self) -> float:
        """Tokens per second, or steps per second if the tokens are not counted."""
        return (self.tokens or 1) / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class Trial:
    """What a trial has measured. `end`: why it ended: all steps were measured, the trial was stopped as clearly slower
    or at the time limit (late), the user stopped the tuning, or the trial failed. `reason`: why it failed, as a
    sentence. `peak_bytes`: the highest peak of a rank. `wall_seconds`: the whole time that another trial like this
    would take."""

    steps: tuple[Step, ...]
    end: End = "measured"
    reason: str = ""
    peak_bytes: int | None = None
    wall_seconds: float = 0

    @property
    def measured(self) -> tuple[Step, ...]:
        """The steps after the warm-up."""
        return self.steps[WARM_UP:]

    @property
    def step_seconds(self) -> float:
        """The median of the measured steps."""
        return statistics.median(step.seconds for step in self.measured)

    @property
    def tokens_per_second(self) -> float | None:
        """The median of the measured steps, as all other figures; None if the tokens are not counted."""
        return statistics.median(step.rate for step in self.measured) if all(s.tokens for s in self.measured) else None

    @property
    def spread(self) -> float:
        """How far the speeds of the measured steps are from their median, as a share: the standard deviation without
        outliers. Where sequence lengths differ, steps differ too."""
        return deviation([step.rate for step in self.measured]) / statistics.median(s.rate for s in self.measured)

    @property
    def warm_up_seconds(self) -> float:
        """How much longer the warm-up took than as many measured steps, for example for compiling."""
        return max(0.0, sum(step.seconds for step in self.steps[:WARM_UP]) - WARM_UP * self.step_seconds)

    def with_warm_up_of(self, other: Trial) -> Trial:
        """This trial with the warm-up of `other`, if that was shorter."""
        if other.warm_up_seconds >= self.warm_up_seconds:
            return self
        seconds = WARM_UP * self.step_seconds + other.warm_up_seconds
        factor = seconds / sum(step.seconds for step in self.steps[:WARM_UP])
        warm = (replace(step, seconds=factor * step.seconds) for step in self.steps[:WARM_UP])
        return replace(self, steps=(*warm, *self.measured))


@dataclass(frozen=True)
class Speed:
    """The speed of one trial as a multiple of another one's, and by how much it may be off."""

    ratio: float
    margin: float

    @property
    def is_faster(self) -> bool:
        """Whether the trial is faster by more than the measured spread."""
        return self.ratio > 1 + self.margin

    @property
    def is_slower(self) -> bool:
        """Whether the trial is slower by more than the measured spread."""
        return self.ratio * (1 + self.margin) < 1


def deviation(values: Sequence[float]) -> float:
    """The standard deviation, estimated from the median absolute deviation."""
    middle = statistics.median(values)
    return SIGMA * statistics.median(abs(value - middle) for value in values)


def compare(trial: Trial, other: Trial, total_steps: int | None = None) -> Speed:
    """How fast `trial` is compared with `other`. Steps are compared in pairs, because both train on the same examples
    in the same order. With the number of steps of the run, the longer warm-up counts too."""
    pairs = zip(trial.measured, other.measured, strict=False)
    ratios = [one.rate / another.rate for one, another in pairs]
    ratio = statistics.median(ratios)
    margin = max(LEAST_GAIN, NOISE * deviation(ratios) / len(ratios) ** 0.5)
    if total_steps:
        each = other.step_seconds
        ratio = (other.warm_up_seconds + total_steps * each) / (trial.warm_up_seconds + total_steps * each / ratio)
    return Speed(ratio, margin)


def is_enough(steps: Sequence[Step]) -> bool:
    """Whether enough steps are measured."""
    measured = steps[WARM_UP:]
    return len(measured) >= LEAST_MEASURED and sum(step.seconds for step in measured) >= ENOUGH_SECONDS


def is_clearly_slower(steps: Sequence[Step], other: Trial) -> bool:
    """Whether all measured steps so far are much slower than those of `other`."""
    pairs = list(zip(steps[WARM_UP:], other.measured, strict=False))
    return len(pairs) >= SURE_AFTER and all(one.rate < CLEARLY_SLOWER * another.rate for one, another in pairs)


def loss_difference(trial: Trial, other: Trial, tolerance: float) -> str:
    """How the losses of the first steps differ by more than `tolerance`, for a message; '' if they do not."""
    pairs = zip(trial.steps[:COMPARED_STEPS], other.steps[:COMPARED_STEPS], strict=False)
    for number, (one, another) in enumerate(pairs, start=1):
        if one.loss is None or another.loss is None:
            same = one.loss is another.loss
        else:
            same = abs(one.loss - another.loss) <= tolerance
        if not same:
            return f"{_loss(one)} instead of {_loss(another)} in step {number}"
    return ""


def _loss(step: Step) -> str:
    return "a loss that is not finite" if step.loss is None else f"{step.loss:.6g}"


def read_steps(points: Iterable[Mapping[str, Any]]) -> list[Step]:
    """The steps in the points of metrics.jsonl, of a run that logs each step."""
    found: list[Step] = []
    time, tokens = None, 0.0
    for point in points:
        if "loss" not in point or point.get("step") != len(found) + 1:
            continue
        total = float(point.get("tokens") or 0)
        speed = point.get("tokens_per_second")
        # The time of the first step is known from its speed only; all others are between two points.
        first = total / speed if speed else 0.0
        found.append(Step(point["time"] - time if time is not None else first, total - tokens, point["loss"]))
        time, tokens = point["time"], total
    return found
