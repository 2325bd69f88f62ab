"""Throughput of a run and its remaining time, as numbers and as text.

`progress` is the content of progress.json; times are Unix seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from backend.wording import counted

STALL_SECONDS = 60.0  # without a step: then the status says so, if steps are usually faster
FIRST_STEPS_STALL = 600.0  # the same before the usual time of a step is known
PREPARING = "preparing data"
EVEN_PHASES = (PREPARING, "evaluating")  # whose parts take about equally long
LEFT_AFTER = 3.0  # seconds of such a phase, after which its speed is known
# Phases whose duration may be unknown: the status then has the elapsed time.
TIMED_PHASES = (
    "generating before", "evaluating", "generating during", "checkpoint", "saving", "generating after",
)  # fmt: skip


def tokens_per_second(result: Mapping[str, Any], points: Sequence[Mapping[str, Any]]) -> float | None:
    """The speed of the training steps of the last start, without evaluations and saving, from the result; else that of
    the last logged steps."""
    speeds = (result, *reversed(points))
    found = (speed for each in speeds if isinstance(speed := each.get("tokens_per_second"), int | float) and speed)
    return next(found, None)


def duration(seconds: float) -> str:
    """A duration with at most two units: 42 s, 3 min 5 s, 2 h 10 min, 3 d 4 h."""
    whole = max(0, round(seconds))
    for size, unit, small, part in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // small
            return f"{whole // size} {unit}" + (f" {rest} {part}" if rest else "")
    return f"{whole} s"


def running_sentence(summary: dict[str, Any], progress: dict[str, Any], step_seconds: float | None, now: float) -> str:
    """The status of a running run; `step_seconds` is the usual time of a step."""
    step, most, left, phase = summary["step"], summary["max_steps"], summary["eta_seconds"], progress.get("phase")
    if phase == "done":
        return "Running: training is complete, and its processes are ending."
    if phase not in (None, "training") or step is None:
        text = phase_sentence(progress, now)
        return f"Running: {text[:1].lower()}{text[1:]}"
    where = f"step {step} of {most}" if most else f"step {step}"
    if is_stalled(progress, step_seconds, now):
        idle = duration(now - progress["time"])
        none = f"no step for {idle}" if step != most else f"nothing was reported for {idle}"
        return f"Running: {where}, but {none}. The end of the log may say why."
    if left is None or round(left) < 1:
        return f"Running: {where}."
    about = f"{round(left)} s" if left < 60 else f"{round(left / 60)} min" if left < 7200 else duration(left)
    unknown = progress.get("evaluations_left") and "evaluation_seconds" not in progress
    return f"Running: {where}. Training: about {about} left{', without evaluations' if unknown else ''}."


def phase_sentence(progress: dict[str, Any], now: float) -> str:
    """What a run does between steps, and how much of it is done: 'Evaluating after step 8 (3 of 16 batches).'"""
    text = str(progress.get("text") or progress.get("phase") or "the first step").rstrip(".")
    return f"{text[:1].upper()}{text[1:]}{_phase_progress(progress, now)}."


def _phase_progress(progress: dict[str, Any], now: float) -> str:
    """How much of a phase is done, and its elapsed time: ' (3 of 16 examples, 42 s so far)'."""
    parts = []
    if progress.get("total"):
        unit, of, whose = progress.get("unit", "").partition(" of ")  # "token of rank 0"
        total = counted(progress["total"], unit) if unit else f"{progress['total']:,}"
        parts.append(f"{progress.get('done', 0):,} of {total}{of}{whose}")
    elapsed, done, total = now - progress.get("since", now), progress.get("done", 0), progress.get("total", 0)
    if progress.get("phase") in EVEN_PHASES and 0 < done < total and elapsed >= LEFT_AFTER:
        parts.append(time_left(elapsed, done / total, 0))
    elif progress.get("phase") in TIMED_PHASES and elapsed >= 1:
        parts.append(f"{duration(elapsed)} so far")
    return f" ({', '.join(parts)})" if parts else ""


def time_left(seconds: float, part: float, before: float) -> str:
    """How long the rest of some work takes, as in 'about 3 min 5 s left'. In the last `seconds`, the completed part of
    the work grew from `before` to `part`."""
    return f"about {duration(seconds * (1 - part) / (part - before))} left"


def is_stalled(progress: dict[str, Any], step_seconds: float | None, now: float) -> bool:
    """Whether nothing was reported for much longer than a step usually takes."""
    longest = FIRST_STEPS_STALL if step_seconds is None else max(STALL_SECONDS, 10 * step_seconds)
    return now - float(progress.get("time", now)) > longest


def seconds_per_step(progress: dict[str, Any], points: list[dict[str, Any]]) -> float | None:
    """Seconds per step as the trainer measured them, without evaluations and checkpoints. Otherwise from the latest
    points; without two points, from all steps since the start."""
    if progress.get("step_seconds"):
        return float(progress["step_seconds"])
    timed = [(p["step"], p["time"]) for p in points if "loss" in p and "time" in p]
    if len(timed) > 1 and timed[-1][0] > timed[0][0]:
        return float((timed[-1][1] - timed[0][1]) / (timed[-1][0] - timed[0][0]))
    step, first, began = progress.get("step"), progress.get("first_step"), progress.get("first_step_time")
    if not step or not first or not began or "time" not in progress or step <= first:
        return None
    return float((progress["time"] - began) / (step - first))


def eta(progress: dict[str, Any], step_seconds: float | None, now: float) -> float | None:
    """Estimated seconds of the remaining training steps and, once one was measured, of the remaining evaluations with
    what they generate; without checkpoints and the generation after training. None in other phases than training."""
    step, most = progress.get("step"), progress.get("max_steps")
    if step_seconds is None or step is None or not most or progress.get("phase", "training") != "training":
        return None
    in_step = min(max(0.0, now - progress.get("time", now)), step_seconds)  # seconds of the current step
    evaluations = progress.get("evaluations_left", 0) * progress.get("evaluation_seconds", 0.0)
    return max(0.0, float((most - step) * step_seconds - in_step + evaluations))
