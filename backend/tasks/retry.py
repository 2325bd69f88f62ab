"""A new run that continues one that diverged, ended with a loss far above its first ones, or stopped after a spike.

It starts from before the problem, with half the learning rate, or with a usual one if half is still too high.

The user starts it, or the supervisor does so `train.half_lr_retries` times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from backend import presets
from backend.config import RunSpec
from backend.config.options import edit
from backend.preflight import Report
from backend.registry import lower_learning_rate
from backend.runs import METRICS, SPEC, events, failure, files, health, metrics
from backend.runs.folder import Run, RunError
from backend.runs.resume_point import complete, has_optimizer_state, step_of

FACTOR = 0.5  # times the learning rate
Check = Callable[[RunSpec], Report]


def applies(run: Run) -> bool:
    """Whether the run diverged, its loss rose until its end, or it stopped after a spike."""
    why = run.failure()
    return bool(why and why["kind"] == failure.DIVERGED) or _last_spike(run) is not None


def changes(run: Run, spec: RunSpec) -> Mapping[str, Any]:
    """The options with which a new run continues `run`, which has `spec`. Raises RunError if it neither diverged nor
    stopped after a spike, or has no checkpoint from before that."""
    if not applies(run):
        problem = "neither diverged nor stopped after a spike, and its loss did not rise"
        advice = "Start a new run with its options" if run.state == "done" else "Resume it, or start a new run"
        raise RunError(f"{run.id} {problem}. {advice}.")
    last = _last_usual_step(run, spec.logging.steps)
    # A checkpoint of save.only_model, or of Stop where the optimizer state cannot be restored, has the weights only.
    found = [str(folder) for folder in complete(run.path) if has_optimizer_state(folder)]
    if spec.save.resume_from == "path":  # set by an earlier retry that failed before its first checkpoint
        found.insert(0, spec.save.resume_path)
    usable = [path for path in found if last is None or step_of(Path(path)) < last]
    if not usable:
        raise RunError(f"{run.id} has no checkpoint from before the problem to continue from.")
    return {
        "train.learning_rate": lower_rate(spec, FACTOR),
        "save.resume_from": "path",
        "save.resume_path": usable[-1],
    }


def _last_usual_step(run: Run, interval: int) -> int | None:
    """The last step whose logged loss, the mean of an interval, was usual; None if no step has a logged loss. The loss
    of a step is that of the weights before it, so the step itself may have damaged them."""
    spike = _last_spike(run)
    if spike is None:  # the loss may have exploded long before it was NaN
        points = metrics.points_with(run.path / METRICS, "loss")
        return health.before_rise((int(point["step"]), float(point["loss"])) for point in points)
    # A spike is reported with the second value in a row, a rise with the fifth.
    values = health.LAST_LOSSES if spike["kind"] == health.RISE else 2
    return int(spike["step"] - values * interval)


def lower_rate(spec: RunSpec, factor: float) -> float:
    """A lower learning rate for a run with `spec`, which diverged."""
    train = spec.train
    return lower_learning_rate(train.stage, spec.method.kind, train.optim, train.learning_rate, factor)


def _last_spike(run: Run) -> dict[str, Any] | None:
    """The alert for which the run stopped itself, or the rise of the loss with which it ended."""
    state = run.state
    if state not in ("stopped", "done"):
        return None
    found = [event for event in events.alerts(run.path) if event["kind"] in health.SPIKES]
    if state == "done":
        return next((event for event in found if event["kind"] == health.RISE), None)
    return found[-1] if found and found[-1]["text"] == run.stop_reason() else None


def start(run: Run, check: Check, automatic: bool = False) -> Run:
    """Start the run that continues `run`, next to it. `automatic`: only if its spec allows another one. Raises
    RunError, SpecError."""
    spec = presets.load(files.read_text(run.path / SPEC))
    left = spec.train.half_lr_retries
    if automatic and not left:
        raise RunError("train.half_lr_retries: no retry is left.")
    report = check(edit(spec, {**changes(run, spec), "train.half_lr_retries": max(0, left - 1)}))
    if not report.can_run:
        raise RunError(f"Not started. {report.verdict}.")
    new = Run.create(run.path.parent, report.title, report.plan, datetime.now(), report.about, report.expected)
    new.start()
    return new
