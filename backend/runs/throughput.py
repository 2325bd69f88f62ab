"""How fast a run goes, and how long it still takes, in numbers and in words.

Floor 0. Standard library only; imports nothing of ours. `progress` is progress.json; times are unix seconds.
"""

from __future__ import annotations

from typing import Any

QUIET = 60.0  # seconds without a step that are worth a word, if steps are quicker


def duration(seconds: float) -> str:
    """In words, two parts at most: 42 s, 3 min 5 s, 2 h 10 min, 3 d 4 h."""
    whole = max(0, round(seconds))
    for size, unit, small, part in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // small
            return f"{whole // size} {unit}" + (f" {rest} {part}" if rest else "")
    return f"{whole} s"


def running(summary: dict[str, Any], progress: dict[str, Any], usual: float | None, now: float) -> str:
    """The sentence of a run that runs; `usual` is seconds a step."""
    step, most, left = summary["step"], summary["max_steps"], summary["eta_seconds"]
    if progress.get("phase", "training") != "training" or step is None:
        text = str(progress.get("text") or progress.get("phase") or "the first step").rstrip(".")
        return f"Running: {text[:1].lower()}{text[1:]}."
    where = f"step {step} of {most}" if most else f"step {step}"
    quiet = now - progress.get("time", now)
    if quiet > max(QUIET, 10 * (usual or 0)):
        return f"Running: {where}, but no step for {duration(quiet)}. The end of the log may say what it waits for."
    if left is None:
        return f"Running: {where}."
    about = f"{max(1, round(left))} s" if left < 60 else f"{round(left / 60)} min" if left < 7200 else duration(left)
    return f"Running: {where}, about {about} left."


def seconds_a_step(progress: dict[str, Any], points: list[dict[str, Any]]) -> float | None:
    """Seconds a step, by the latest points; before there are two, by all steps of this start."""
    timed = [(p["step"], p["time"]) for p in points if "loss" in p and "time" in p]
    if len(timed) > 1 and timed[-1][0] > timed[0][0]:
        return float((timed[-1][1] - timed[0][1]) / (timed[-1][0] - timed[0][0]))
    step, first, began = progress.get("step"), progress.get("first_step"), progress.get("first_step_time")
    if not step or not first or not began or "time" not in progress or step <= first:
        return None
    return float((progress["time"] - began) / (step - first))


def eta(progress: dict[str, Any], usual: float | None, now: float) -> float | None:
    """Seconds to the last step."""
    step, most = progress.get("step"), progress.get("max_steps")
    if usual is None or step is None or not most:
        return None
    return max(0.0, float((most - step) * usual - max(0.0, now - progress.get("time", now))))
