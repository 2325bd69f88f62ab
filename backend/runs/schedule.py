"""When waiting runs start and when they end, from the runs before them in the queue.

A run that trains has measured its steps; one that waits has only the prediction that was saved with it. So all times
are ranges, and their texts are rounded so coarsely that they do not jump. Like the prediction, they do not include
downloads and generated outputs. What is not known is said with the run that it depends on.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from backend.runs import ESTIMATE, processes, queue, sweeps, throughput
from backend.runs.folder import ALIVE, UNREADABLE, Run

MEASURED = 1.15  # the real remaining time is expected within this factor of the measured one
ENDING_SECONDS = 60.0  # for the final model and the end of the processes
STEPPING = ("training", "evaluating", "checkpoint")
# Up to each number of seconds, what a duration is rounded to.
ROUNDED = ((600, 60), (3600, 300), (6 * 3600, 1800), (48 * 3600, 3600), (float("inf"), 86_400))


@dataclass(frozen=True)
class Span:
    """A time between `low` and `high` seconds; or `unknown`: why it is not known, as the end of a sentence."""

    low: float = 0.0
    high: float = 0.0
    unknown: str = ""

    def then(self, other: Span) -> Span:
        """This time and then the other one."""
        return Span(self.low + other.low, self.high + other.high, self.unknown or other.unknown)

    def within(self, seconds: float) -> Span:
        """This time, limited to that many seconds; 0: no limit."""
        if seconds <= 0:
            return self
        return Span(0.0, seconds) if self.unknown else Span(min(self.low, seconds), min(self.high, seconds))

    def text(self) -> str:
        """As words after "takes": about 40 min; 30 min to 1 h; at most 5 min."""
        low, high = _rounded(self.low), max(ROUNDED[0][1], _rounded(self.high))
        if low == high:
            return f"about {throughput.duration(low)}"
        between = f"{throughput.duration(low)} to {throughput.duration(high)}"
        return between if low else f"at most {throughput.duration(high)}"

    def when(self) -> str:
        """As words after "starts": in about 40 min; in 30 min to 1 h; within 5 min."""
        text = self.text()
        return f"in {text}" if _rounded(self.low) else f"within {text.removeprefix('at most ')}"


def _rounded(seconds: float) -> float:
    unit = next(unit for until, unit in ROUNDED if seconds <= until)
    return unit * round(seconds / unit)


def latest(spans: Iterable[Span]) -> Span:
    """When the last of these spans is over."""
    found = list(spans)
    unknown = next((span.unknown for span in found if span.unknown), "")
    return Span(max((s.low for s in found), default=0.0), max((s.high for s in found), default=0.0), unknown)


@dataclass(frozen=True)
class Times:
    """When a waiting run starts and ends, from now."""

    start: Span
    end: Span

    @property
    def sentence(self) -> str:
        """When the run starts, as a sentence."""
        if self.start.unknown:
            return f"When it starts is not known: {self.start.unknown}."
        return f"Starts {self.start.when()}."


class Devices:
    """When each slot of each device is free, while one run after the other takes its devices."""

    def __init__(self, busy: Mapping[str, Sequence[Span]] | None = None) -> None:
        self._free: dict[str, list[Span]] = {name: list(spans) for name, spans in (busy or {}).items()}

    def start(self, names: Iterable[str]) -> Span:
        """When all of these devices are free."""
        return latest(slots[_first(slots)] for slots in map(self._slots, names))

    def take(self, names: Iterable[str], end: Span) -> None:
        """Mark these devices as taken, from when they are free until `end`."""
        for slots in map(self._slots, names):
            slots[_first(slots)] = end

    def _slots(self, name: str) -> list[Span]:
        return self._free.setdefault(name, [Span()] * len(queue.slots(name)))


def _first(slots: Sequence[Span]) -> int:
    """The slot that is free first."""
    return min(range(len(slots)), key=lambda n: (bool(slots[n].unknown), slots[n].high))


def remaining(run: Run, now: float) -> Span:
    """How long a run that is alive still takes: measured if it trains, else as predicted, and no longer than its time
    limit. `now`: Unix seconds."""
    summary = run.summary(now)
    passed = now - summary["started"] if summary["started"] else 0.0
    limit = _prediction(run).limit
    return _unlimited(run, summary, passed, now).within(max(ENDING_SECONDS, limit - passed) if limit else 0.0)


def _unlimited(run: Run, summary: Mapping[str, Any], passed: float, now: float) -> Span:
    if summary["state"] == "stopping":
        return Span(0.0, ENDING_SECONDS)
    try:
        progress = run.progress()
        phase, least = progress.get("phase"), 0.0
        if phase in STEPPING and (step_seconds := throughput.seconds_per_step(progress, run.last_points())):
            left = throughput.eta({**progress, "phase": "training"}, step_seconds, now) or 0.0
            least = left / MEASURED
            if "evaluation_seconds" in progress or not progress.get("evaluations_left"):
                return Span(least, left * MEASURED + ENDING_SECONDS)
        if phase in ("saving", "done"):
            return Span(0.0, ENDING_SECONDS)
        found = predicted(run)
    except UNREADABLE:
        return Span(unknown=f"the files of {run.id} cannot be read")
    if found is None:
        return Span(unknown=f"the time of {run.id} is not predicted")
    if passed > found.high:
        return Span(unknown=f"{run.id} takes longer than predicted")
    return Span(max(least, found.low - passed), max(least, found.high - passed))


def predicted(run: Run) -> Span | None:
    """The predicted time of a run: at least what remains after its newest checkpoint, at most the whole run, since it
    may start from scratch; None without a prediction."""
    found = _prediction(run)
    if not found.steps:
        return None
    left = 1 - min(1.0, max(run.checkpoints(), default=0) / found.steps)
    return Span(found.low * left, found.high)


@dataclass(frozen=True)
class Prediction:
    """What estimate.json has: the predicted seconds and steps of the run (0: not predicted), and its time limit in
    seconds (0: none)."""

    low: float = 0.0
    high: float = 0.0
    steps: int = 0
    limit: float = 0.0


def _prediction(run: Run) -> Prediction:
    try:
        return _read_prediction(run.path, (run.path / ESTIMATE).stat().st_mtime_ns)
    except UNREADABLE:
        return Prediction()


@lru_cache(maxsize=1024)
def _read_prediction(path: Path, changed_ns: int) -> Prediction:
    """The prediction, which is read once: lists of waiting runs are polled."""
    del changed_ns  # a key of the cache
    estimate = Run(path).estimate()
    limit, whole = float(estimate.get("time_limit") or 0.0), (estimate.get("time") or {}).get("run")
    if not whole:
        return Prediction(limit=limit)
    return Prediction(float(whole["low_seconds"]), float(whole["high_seconds"]), int(whole["steps"]), limit)


def waiting(now: float | None = None) -> dict[str, Times]:
    """The times of the waiting runs of this user, by the run's folder. `now`: Unix seconds, by default the time."""
    now = time.time() if now is None else now
    order = queue.entries()
    names = {name for entry in order for name in entry.devices}
    devices = Devices({name: _busy(name, now) for name in names})
    found: dict[str, Times] = {}
    for entry in order:
        run = Run(Path(entry.run))
        before = _predecessor(entry, found, now)
        free = devices.start(entry.devices)
        start = latest([free, *([before] if before else [])])
        if entry.held:
            start = Span(unknown="it is on hold")
        elif not start.unknown and start.high <= 0:  # no run in this queue is in its way
            start = Span(unknown="another program is using its devices")
        found[entry.run] = Times(start, start.then(remaining(run, now)))
        is_passed = before and (before.unknown or before.high > free.high)  # the runs behind it start before it
        if not entry.held and not is_passed:
            devices.take(entry.devices, found[entry.run].end)
    return found


def _busy(device: str, now: float) -> list[Span]:
    """When each slot of a device is free."""
    return [remaining(Run(holder), now) if holder else Span() for holder in queue.holders(device)]


def _predecessor(entry: queue.Entry, found: Mapping[str, Times], now: float) -> Span | None:
    """When the run that must end first ends; None if there is no such run, or if it has ended."""
    if not entry.after or not processes.is_locked(Path(entry.after)):
        return None
    return found[entry.after].end if entry.after in found else remaining(Run(Path(entry.after)), now)


def all_runs_text(devices: Sequence[Iterable[str]], spans: Sequence[Span]) -> str:
    """How long runs with these devices and times take together, a sentence. `unknown` of a span names the run."""
    if unknown := next((span.unknown for span in spans if span.unknown), ""):
        return f"How long the runs take is not known: {unknown}."
    if len(spans) == 1:
        return f"The run takes {spans[0].text()}."
    if not all(map(list, devices)):
        low, high = min(span.low for span in spans), max(span.high for span in spans)
        return f"Each run takes {Span(low, high).text()}; how many run at the same time is up to the cluster."
    plan, ends, at_once = Devices(), [], 0
    for names, span in zip(devices, spans, strict=True):
        begin = plan.start(names)
        at_once += begin.high == 0
        ends.append(begin.then(span))
        plan.take(names, ends[-1])
    how = "one after the other" if at_once == 1 else f"{at_once} at a time"
    return f"The {len(spans)} runs take {latest(ends).text()}, {how}."


def sweep_text(root: Path, sweep: str, now: float | None = None) -> str:
    """When the living runs of a sweep will be done, as a sentence; '' if none is alive."""
    now = time.time() if now is None else now
    alive = [run for run, _ in sweeps.members(root, sweep) if run.state in ALIVE]
    if not alive:
        return ""
    times = waiting(now)
    end = latest(times[str(run.path)].end if str(run.path) in times else remaining(run, now) for run in alive)
    if end.unknown:
        return f"When the sweep ends is not known: {end.unknown}."
    which = "last run" if len(alive) == 1 else f"remaining {len(alive)} runs"
    return f"The {which} of the sweep will end {end.when()}."
