"""Runs of earlier versions whose weights may be partly those of the base model.

transformers holds the weights of some architectures in another layout than their checkpoints
(registry.CONVERTED_WEIGHTS). Earlier versions loaded a checkpoint of full or freeze fine-tuning with one process or DDP
by the names of the model, as the Trainer of transformers 5.23 does: what is converted, such as the experts of a
mixture, kept the values of the base model. Runs of this version record that all weights were loaded: ALL_WEIGHTS in the
points of metrics.jsonl that mark a resume, and `model_step` in result.json.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from backend.registry import CONVERTED_WEIGHTS, METHODS
from backend.runs import CHECKPOINTS, LLAMAFACTORY, METRICS, MODEL, SPEC, files, validation
from backend.runs.folder import Run
from backend.runs.metrics import first_point, resumes

ALL_WEIGHTS = "all_weights"  # in the point of metrics.jsonl that marks a resume
FULL_WEIGHTS = tuple(METHODS[name].label for name in ("full", "freeze"))
BEST_AT_END = re.compile(r"\bload_best_model_at_end[\"']?\s*:\s*(true|yes|on)\b", re.IGNORECASE)
FROM_PATH = re.compile(r"\bresume_from[\"']?\s*:\s*[\"']?path\b")


def warning(run: Run) -> str:
    """Why weights of the run may be lost, and what to do; '' for other runs."""
    if run.about().get("method") not in FULL_WEIGHTS or (run.path / LLAMAFACTORY).exists():
        return ""
    if not _has_trainer_checkpoints(run):
        return ""
    kind = _model_type(run.path)
    if kind not in CONVERTED_WEIGHTS:
        return ""
    reason = _resumed(run) or _loaded_best_model(run)
    if not reason:
        return ""
    how, remedy = reason
    return (
        f"Some weights of this run may be those of the base model: it {how} with an earlier version of Footplate, "
        f"which did not load the weights that transformers converts for {kind}, such as those of experts. {remedy}"
    )


def _has_trainer_checkpoints(run: Run) -> bool:
    """Whether the Trainer wrote the checkpoints: DeepSpeed and FSDP have their own formats, with the model's names."""
    resolved = run.resolved()
    strategy = str(resolved.get("strategy"))
    return strategy in ("single", "ddp") or (strategy.startswith("fsdp") and resolved.get("world_size") == 1)


def _model_type(folder: Path) -> str:
    """The model type in a config.json that the run has saved; '' if it saved none."""
    for path in (folder / MODEL, *sorted((folder / CHECKPOINTS).glob("checkpoint-*"))):
        try:
            return str(json.loads(files.read_text(path / "config.json"))["model_type"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return ""


def _resumed(run: Run) -> tuple[str, str] | None:
    """A resume that lost weights, if the run continued from it, and what to do."""
    lost: list[int] = []
    if FROM_PATH.search(_text(run.path / SPEC)) and "event" not in first_point(run.path / METRICS):
        lost = [0]  # earlier versions did not mark that a new run resumed from a checkpoint of another one
    for point in resumes(run.path / METRICS):
        step = int(point["step"])
        lost = [earlier for earlier in lost if earlier < step]  # this run continues from before the loss
        if step and not point.get(ALL_WEIGHTS):
            lost.append(step)
    if not lost:
        return None
    if not lost[0]:
        return "was resumed from a checkpoint of another run", "Start it again."
    return f"was resumed after step {lost[0]:,}", f"Start it again, from checkpoint-{lost[0]} if that still exists."


def _loaded_best_model(run: Run) -> tuple[str, str] | None:
    """A best model that was loaded after other steps, and what to do."""
    result, lowest = run.result(), validation.lowest(run.path)
    if not lowest or not result.get("steps") or "model_step" in result or lowest[1] == result["steps"]:
        return None
    if not BEST_AT_END.search(_text(run.path / SPEC)):
        return None
    return (
        "loaded its best model at the end",
        f"Use checkpoint-{lowest[1]} instead of the saved model if that checkpoint still exists, or train again.",
    )


def _text(path: Path) -> str:
    try:
        return files.read_text(path)
    except (OSError, ValueError):
        return ""
