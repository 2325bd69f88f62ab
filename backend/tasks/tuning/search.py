"""The search: axis by axis from the settings of the spec, keeping what is faster by more than the measured spread.

It starts nothing itself: what a trial measures and what the checks say comes from a `Workbench`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Protocol

from backend.rules import Fix
from backend.runs.throughput import duration
from backend.tasks.tuning.trial import Trial, compare, loss_difference
from backend.wording import counted

Patch = Mapping[str, Any]
BASE, REPEATED = "Current settings", "Current settings, measured again"
LATE = "The time limit was reached before enough steps were measured."
STOPPED = "The measurement was stopped before enough steps were measured."
RESERVE = 1.5  # durations of the first trial that are reserved for the repeated one at the end
COMPILE = "torch.compile"  # the axis whose trials have a longer warm-up than the others
CHANGED = 0.05  # share by which the speed of the same settings may differ at the end

State = Literal["base", "faster", "same", "slower", "refused", "failed", "skipped", "stopped", "repeated"]


@dataclass(frozen=True)
class Axis:
    """One coordinate of the search, such as the attention implementation. `safe`: its settings do not change the
    result."""

    name: str
    safe: bool = True


@dataclass(frozen=True)
class Row:
    """A line of the result. `patch`: all that differs from the spec; `gain`: the speed of the whole run as a multiple
    of that with the settings of the spec; `margin`: by how much it may be off; `reason`: a sentence."""

    label: str
    patch: Patch
    safe: bool
    state: State
    reason: str = ""
    tokens_per_second: float | None = None
    spread: float | None = None
    step_seconds: float | None = None
    warm_up_seconds: float | None = None
    peak_bytes: int | None = None
    gain: float | None = None
    margin: float | None = None
    losses: Sequence[float | None] = ()

    @property
    def is_usable(self) -> bool:
        """Whether the settings were measured, so that they can be adopted."""
        return self.state in ("faster", "same", "slower")

    def as_json(self) -> dict[str, Any]:
        """All fields."""
        return {**asdict(self), "patch": dict(self.patch)}


class Workbench(Protocol):
    """What the search needs from the class that runs the trials."""

    total_steps: int | None  # of the run

    def tolerance(self, patch: Patch) -> float:
        """How far losses that should be equal may differ, with the precision of the spec with this patch."""

    def propose(self, axis: Axis, patch: Patch) -> Sequence[Fix]:
        """The candidates of an axis, as changes of the spec with `patch`, the most promising first."""

    def changes(self, patch: Patch) -> Patch:
        """The part of a patch that changes the effective options of the spec."""

    def refusal(self, patch: Patch) -> str:
        """Why the spec with this patch cannot run, as a sentence; '' if it can."""

    def measure(self, label: str, patch: Patch, other: Trial | None, reserve: float) -> Trial:
        """Run a trial, and stop it once it is clearly slower than `other`, or once only `reserve` seconds are left."""

    def left(self) -> float:
        """Seconds of the allowed time that are left."""

    def is_stopped(self) -> bool:
        """Whether a stop is requested."""

    def show(self) -> None:
        """The rows have changed."""


@dataclass
class Search:
    """The rows so far, and the best settings: their labels by axis, patch and trial. `reference`: the trial whose
    losses a safe candidate must reproduce."""

    bench: Workbench
    axes: Sequence[Axis]
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    is_doubtful: bool = False  # the fastest settings are not faster than the repeated trial of the base
    is_late: bool = False  # the time limit was reached before everything was measured
    labels: dict[str, str] = field(default_factory=dict)
    patch: Patch = field(default_factory=dict)

    def run(self) -> None:
        """Measure the settings of the spec, the candidates of every axis, and the settings of the spec again."""
        self.base = self.best = self.reference = self.bench.measure(BASE, {}, None, 0)
        if self.base.end != "measured":
            is_stopped, self.is_late = self.base.end == "stopped", self.base.end == "late"
            why = f"{STOPPED if is_stopped else LATE}{'' if is_stopped else ' Allow more minutes.'}"
            self._add(Row(BASE, {}, True, "stopped" if is_stopped else "failed", self.base.reason or why))
            return
        self._add(_measured(Row(BASE, {}, True, "base", gain=1.0), self.base))
        self.tried: list[Patch] = [{}]
        self.expected_seconds = self.base.wall_seconds
        for axis in self.axes:
            start = self.patch  # the candidates of an axis are alternatives on top of this patch
            for fix in self.bench.propose(axis, start):
                if self.bench.is_stopped():
                    return
                self._try(axis, fix, start)
        self._repeat_base()

    @property
    def fastest(self) -> Row | None:
        """The row of the fastest settings; None if none is faster than those of the spec."""
        faster = [row for row in self.rows if row.state == "faster"]
        return faster[-1] if faster and not self.is_doubtful else None

    def _try(self, axis: Axis, fix: Fix, start: Patch) -> None:
        """One candidate, on top of `start`: skipped, or measured and compared with the best so far."""
        patch = self.bench.changes({**start, **fix.patch})
        if patch in self.tried:
            return
        self.tried.append(patch)
        labels = {**self.labels, axis.name: fix.label}
        label, expected = " + ".join(labels.values()), self.expected_seconds
        safe = axis.safe and self.reference is self.base
        if reason := self.bench.refusal(patch):
            self._add(Row(label, patch, safe, "skipped", reason))
        elif self.bench.left() < (1 + RESERVE) * expected:
            self.is_late = True
            self._add(Row(label, patch, safe, "skipped", "Not tried: the time limit was reached. Allow more minutes."))
        else:
            trial = self.bench.measure(label, patch, self.best, RESERVE * expected)
            if trial.end == "measured" and axis.name != COMPILE:
                self._warm_base(trial)
            row = self._row(Row(label, patch, safe, "stopped"), trial, axis)
            self._add(row)
            if row.state == "faster":
                self.labels, self.patch, self.best = labels, patch, trial
                self.reference = self.reference if axis.safe else trial
            if trial.end == "measured":  # the first trial on CPU imports the libraries for all
                self.expected_seconds = min(self.expected_seconds, trial.wall_seconds)

    def _row(self, row: Row, trial: Trial, axis: Axis) -> Row:
        """`row` with the result of its trial: "faster" if it is faster than the best so far."""
        if trial.end == "failed":
            return replace(row, state="failed", reason=trial.reason)
        difference = loss_difference(trial, self.reference, self.bench.tolerance(row.patch)) if axis.safe else ""
        if difference:
            return replace(row, state="refused", reason=f"The loss differs: {difference}.")
        self.is_late = self.is_late or trial.end == "late"
        if trial.end in ("late", "stopped"):
            return replace(row, reason=LATE if trial.end == "late" else STOPPED)
        steps = self.bench.total_steps
        speed, total = compare(trial, self.best, steps), compare(trial, self.base, steps)
        is_faster = speed.is_faster and trial.end == "measured"
        state: State = "faster" if is_faster else "slower" if speed.is_slower or trial.end == "slow" else "same"
        why = "Stopped early, because its first steps were clearly slower." if trial.end == "slow" else ""
        return replace(_measured(row, trial), state=state, reason=why, gain=total.ratio, margin=total.margin)

    def _repeat_base(self) -> None:
        """Measure the settings of the spec again, and say if the machine has changed meanwhile."""
        if not any(row.is_usable for row in self.rows):  # there is nothing to compare with
            if self.is_late:
                least = math.ceil((2 + RESERVE) * self.expected_seconds / 60)
                self.notes.append(
                    f"One trial took about {duration(self.expected_seconds)} here. Allow at least "
                    f"{counted(least, 'minute')} to measure other settings."
                )
            return
        if self.bench.left() < self.expected_seconds:
            self.is_late = True
            self.notes.append("The current settings were not measured again at the end: the time limit was reached.")
            return
        again = self.bench.measure(REPEATED, {}, None, 0)
        if again.end != "measured":
            if again.end != "stopped":
                why = again.reason or LATE
                self.notes.append(f"The current settings could not be measured again at the end. {why}")
            return
        self._warm_base(again)
        if best := self.fastest:
            total = compare(self.best, self.base, self.bench.total_steps)
            self.rows[self.rows.index(best)] = replace(best, gain=total.ratio, margin=total.margin)
        speed = compare(again, self.base)
        row = _measured(Row(REPEATED, {}, True, "repeated"), again)
        self._add(replace(row, gain=speed.ratio, margin=speed.margin))
        if abs(speed.ratio - 1) > max(CHANGED, speed.margin):
            word = "faster" if speed.ratio > 1 else "slower"
            percent = round(100 * abs(speed.ratio - 1))
            self.notes.append(
                f"The machine changed meanwhile: the current settings were {percent}% {word} at the end than at the "
                f"start. Differences of up to {percent}% are not meaningful; measure again when nothing else runs."
            )
        if self.fastest and not compare(self.best, again, self.bench.total_steps).is_faster:
            label, self.is_doubtful = self.fastest.label, True
            self.notes.append(
                f"{label}: not faster than the current settings at the end, so this difference was not caused by "
                "the settings."
            )
        if difference := loss_difference(again, self.base, self.bench.tolerance({})):
            self.notes.append(
                f"Two trials with the current settings have different losses ({difference}), so settings that "
                "were refused for a different loss may not change the result either."
            )

    def _warm_base(self, trial: Trial) -> None:
        """Give the first trial the warm-up of a later one if that was shorter: only the first trial reads the libraries
        and compiles kernels, which are cached from then on, whatever the settings are."""
        base = self.base.with_warm_up_of(trial)
        self.best = base if self.best is self.base else self.best
        self.reference = base if self.reference is self.base else self.reference
        self.base = base

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        self.bench.show()


def _measured(row: Row, trial: Trial) -> Row:
    """`row` with the figures of its trial."""
    return replace(
        row,
        tokens_per_second=trial.tokens_per_second,
        spread=trial.spread,
        step_seconds=trial.step_seconds,
        warm_up_seconds=trial.warm_up_seconds,
        peak_bytes=trial.peak_bytes,
        losses=[step.loss for step in trial.steps],
    )
