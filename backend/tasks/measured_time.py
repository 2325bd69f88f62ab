"""The predicted time of a run next to the measured one, on its page and for the next similar run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from backend.preflight import Report
from backend.runs.folder import Run
from backend.runs.throughput import duration
from backend.tasks.earlier_runs import EarlierRuns
from backend.timing.whole_run import PRECOMPUTATION, START_SECONDS
from backend.wording import counted, figure

MIN_STEPS = 3  # after the first one, which is slower
MUCH_CPU = 0.6  # share of its threads that a process on CPUs keeps busy if nothing disturbs it
MUCH_WAITING = 0.2  # share of a step that waits for batches
MAX_STARTS = 5  # the newest ones
OTHER_TOKENS = 0.15  # relative difference from the predicted tokens of a step that is reported


@dataclass(frozen=True)
class TimeMeasurement:
    """Predicted and measured seconds of an optimizer step, without evaluations and checkpoints, tokens per second and
    seconds of the whole run (None: not known). `factor`: the range of the prediction; `causes`: sentences about what
    was measured to be different from what was predicted; `was_busy`: other programs used the CPU;
    `not_included`: what the predicted time of the run does not include."""

    run: str
    name: str
    predicted: float
    measured: float
    factor: float
    tokens: tuple[float, float | None]
    seconds: tuple[float | None, float | None]
    causes: tuple[str, ...] = ()
    was_busy: bool = False
    not_included: tuple[str, ...] = ()

    @property
    def ratio(self) -> float:
        """The measured time of a step as a multiple of the predicted one."""
        return self.measured / self.predicted

    @property
    def is_outside(self) -> bool:
        """Whether the measured time is outside the predicted range."""
        return not 1 / self.factor <= self.ratio <= self.factor

    @property
    def rows(self) -> list[tuple[str, str, str]]:
        """(what, predicted, measured) as texts, "not known" for what is not."""
        low, high = figure(self.predicted / self.factor), figure(self.predicted * self.factor)
        return [
            ("Mean time per step", f"{figure(self.predicted)} s ({low} s to {high} s)", f"{figure(self.measured)} s"),
            ("Tokens per second", f"{self.tokens[0]:,.0f}", _text(self.tokens[1], lambda value: f"{value:,.0f}")),
            ("Whole run", _text(self.seconds[0], duration), _text(self.seconds[1], duration)),
        ]

    @property
    def sentence(self) -> str:
        """Whether the measured time is in the predicted range; if it is not, what is known about the cause."""
        if not self.is_outside:
            return f"The measured time per step is in the predicted range.{self._missing}"
        share = f"{self.ratio:.2f} times" if self.ratio >= 1 else f"{self.ratio:.0%} of"
        causes = self.causes or ("The cause is not known: the parts of a step are not measured.",)
        first = f"Steps took {share} the predicted time, which is outside the predicted range."
        return " ".join((first, *causes)) + self._missing

    @property
    def _missing(self) -> str:
        if not self.not_included:
            return ""
        return f" The predicted time of the whole run does not include: {', '.join(self.not_included)}."

    def as_json(self) -> dict[str, Any]:
        """The texts that the page shows."""
        return {"ratio": self.ratio, "is_outside": self.is_outside, "rows": self.rows, "sentence": self.sentence}

    def for_next(self, report: Report) -> dict[str, Any]:
        """What this run says about the similar one of `report`: the run, its name, the ratio, and the sentences."""
        sentence = f"In the last similar run ({self.name}), steps took {self.ratio:.2f} times as long as predicted."
        found = report.time.run
        if found:
            scaled = duration(found.seconds + (self.ratio - 1) * found.step_seconds)
            sentence += f" With the same factor, this run takes about {scaled}."
        else:
            scaled = figure(report.time.step_seconds * self.ratio)
            sentence += f" With the same factor, a step of this run takes about {scaled} s."
        return {"run": self.run, "name": self.name, "ratio": self.ratio, "sentence": sentence}


def _text(value: float | None, show: Callable[[float], str]) -> str:
    return "not known" if value is None else show(value)


def measure_time(run: Run) -> TimeMeasurement | None:
    """The measured time of a run next to its prediction; None without a prediction, or before a few steps were
    measured."""
    time, progress = run.estimate().get("time") or {}, run.progress()
    predicted, measured = time.get("step_seconds"), progress.get("step_seconds")
    steps = progress.get("step", 0) - progress.get("first_step", 0)
    if time.get("unknown") or not predicted or not measured or steps < MIN_STEPS:
        return None
    points, result = run.last_points(), run.result()
    summary, whole = run.summary(), time.get("run") or {}
    is_whole = summary["state"] == "done" and summary["started"] and not summary["earlier_seconds"]
    elapsed = summary["ended"] - summary["started"] if is_whole else None
    tokens, contended = _tokens_of_step(result, points), _contention(run) if measured > predicted else []
    return TimeMeasurement(
        run.id, run.name, predicted, measured, time["factor"],
        (time["tokens_per_second"], tokens and tokens / measured), (whole.get("seconds"), elapsed),
        (*contended, *_causes(time, measured, tokens, points)), bool(time.get("busy") or contended),
        tuple(whole.get("not_included", ())),
    )  # fmt: skip


def _contention(run: Run) -> list[str]:
    """A sentence if processes on CPUs got far fewer cores than they have threads; [] if they did not."""
    ranks, threads = run.monitor().get("ranks", ()), int(run.plan().env.get("OMP_NUM_THREADS") or 0)
    cores = [rank["cores"] for rank in ranks if rank.get("device") == "cpu" and isinstance(rank.get("cores"), float)]
    if not cores or min(cores) >= MUCH_CPU * threads:
        return []
    return [
        f"A process with {counted(threads, 'thread')} got only {figure(min(cores))} CPU cores: other programs used the "
        "CPU, or the process was waiting."
    ]


def _tokens_of_step(result: Mapping[str, Any], points: list[dict[str, Any]]) -> float | None:
    """The tokens of a step, on average over the run so far; None if they were not counted."""
    found = {"step": result.get("steps"), "tokens": result.get("tokens")}
    for point in (found, *reversed(points)):
        if point.get("step") and point.get("tokens"):
            return float(point["tokens"] / point["step"])
    return None


def _causes(time: Mapping[str, Any], measured: float, tokens: float | None, points: list[dict[str, Any]]) -> list[str]:
    """What is known to differ from what was predicted, a sentence each."""
    found = []
    if (busy := time.get("busy")) and measured > time["step_seconds"]:
        cores = counted(busy["cores"], "core")
        found.append(f"When the run was checked, other programs used about {busy['used']:.1f} of {cores}.")
    waits = [point["data_wait"] for point in points if isinstance(point.get("data_wait"), int | float)]
    waited = sum(waits) / len(waits) if waits else 0  # shares of the time of the steps
    if waited > MUCH_WAITING:
        found.append(
            f"Steps waited for the data loader {waited:.0%} of the time, which the prediction does not include."
        )
    expected = time["tokens_per_second"] * time["step_seconds"]
    if tokens and abs(tokens / expected - 1) > OTHER_TOKENS:
        found.append(f"A step trained on {tokens:,.0f} tokens instead of the predicted {expected:,.0f}.")
    return found


class MeasuredTimes(EarlierRuns[TimeMeasurement]):
    """The measured times in a folder of runs. Runs on a busy CPU do not count: they say little about the next one."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, "compared_time", _measure_calm)

    def latest(self, report: Report) -> TimeMeasurement | None:
        """The newest measurement of a run with the same machine, model, method, strategy, dtype and sizes."""
        return None if report.time.unknown else self.newest(report.compared_time)


class MeasuredStarts(EarlierRuns[float]):
    """The measured starts in a folder of runs: seconds from the start to the first step, without loading the weights,
    of runs with the same machine, data, trainer, strategy, number of devices and use of torch.compile."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, "compared_start", measure_start)

    def applied(self, report: Report) -> Report:
        """`report` with the median of the last measured starts in place of the assumed one."""
        if report.time.run is None or not (found := self.several(report.compared_start, MAX_STARTS)):
            return report
        whole = report.time.run.with_start(statistics.median(found), len(found))
        return replace(report, time=replace(report.time, run=whole))


def measure_start(run: Run) -> float | None:
    """Seconds from the start of a run that is done to its first step, without that step and the predicted time of
    loading the weights; None if they were not recorded, or if log-probs were precomputed in them."""
    progress, whole, summary = run.progress(), (run.estimate().get("time") or {}).get("run"), run.summary()
    first, step = progress.get("first_step_time"), progress.get("step_seconds")
    if summary["state"] != "done" or not whole or not first or not step or not summary["started"]:
        return None
    loading = whole["items"][0]["seconds"] - whole.get("start_seconds", START_SECONDS)
    if any(item.get("label") == PRECOMPUTATION for item in whole["items"]):
        return None
    return max(1.0, float(first - summary["started"] - step - loading))


def _measure_calm(run: Run) -> TimeMeasurement | None:
    found = measure_time(run) if run.state == "done" else None
    return None if found and found.was_busy else found
