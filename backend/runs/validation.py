"""The validation loss of a run: which of its evaluations is shown for the whole run.

What a run reports is the loss of the model that it saved, which need not be the last one (save.load_best_model_at_end):
`eval_loss` of result.json belongs to the weights after `model_step`. A run without a result has the loss of its latest
evaluation. Comparisons of curves show the lowest loss of each run, and say so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backend.runs import METRICS
from backend.runs.metrics import last_value, points_with


def loss(folder: Path, result: Mapping[str, Any]) -> float | None:
    """The loss of the model that the run saved, or of the latest evaluation if there is no result yet. None if not
    known."""
    found = result.get("eval_loss")
    found = last_value(folder / METRICS, "eval_loss") if found is None else found
    is_number = isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found)
    return found if is_number else None


def model(result: Mapping[str, Any]) -> str:
    """Which model the `eval_loss` of a result belongs to; '' without one."""
    if result.get("eval_loss") is None:
        return ""
    step, last = result.get("model_step"), result.get("steps")
    if step is None:  # an earlier version: it reported the last evaluation
        return "of the last evaluation"
    what = "of the saved model" if result.get("model") else "of the model at the end"
    return what if step == last else f"{what}, the best one: step {step:,}"


def router_note(values: Mapping[str, Any]) -> str:
    """What the training loss of a mixture of experts includes, from progress.json or result.json; '' for others."""
    weight = values.get("router_loss_weight")
    if not weight:
        return ""
    which = f"the router's auxiliary loss, times router_aux_loss_coef ({weight:g})"
    return f"The training loss includes {which}; the validation loss does not."


def losses(folder: Path) -> dict[int, float]:
    """Step -> validation loss of a run."""
    return {int(p["step"]): float(p["eval_loss"]) for p in points_with(folder / METRICS, "eval_loss")}


def lowest(folder: Path) -> tuple[float, int] | None:
    """The lowest validation loss of a run, and its first step; None if it was not evaluated."""
    return min(((value, step) for step, value in losses(folder).items()), default=None)
