"""Points that metrics.jsonl lacks although a checkpoint knows them: its log_history has every logged loss.

They are missing if the run was resumed while its checkpoints were away, or if the file was deleted. A resumed run
writes them again, and repeats the points after them, which would otherwise be hidden.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from backend.runs import METRICS
from backend.runs.metrics import logged_steps, read_points
from backend.train.callbacks import LOGGED, dataset_losses, preference_metrics
from backend.train.checkpoints import step_of

STATE = "trainer_state.json"


def find(run: Path, checkpoint: Path, own: bool = True) -> list[dict[str, Any]]:
    """The points from the first one that is missing until the step of the checkpoint; empty if none is. `own`: the
    first steps of the checkpoint belong to this run, too, and not to the one that it continues (save.resume_path)."""
    try:
        history = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))["log_history"]
        entries = [entry for entry in history if {"loss", "eval_loss"} & entry.keys()]
        kept = set(logged_steps(run / METRICS))
        begin = 0 if own else min(kept, default=math.inf)
        missing = [entry for entry in entries if entry["step"] >= begin and entry["step"] not in kept]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return []  # resuming itself reports what is wrong with the checkpoint
    if not missing:
        return []
    first, last = min(entry["step"] for entry in missing), step_of(checkpoint)
    later = [point for point in read_points(run / METRICS) if first <= point["step"] <= last]
    return sorted([*map(_point, missing), *later], key=lambda point: point["step"])


def _point(entry: dict[str, Any]) -> dict[str, Any]:
    """A point as the ProgressCallback writes it, without what was measured."""
    logged = {key: entry[key] for key in LOGGED if key in entry}
    return {"step": entry["step"], **logged, **dataset_losses(entry), **preference_metrics(entry)}
