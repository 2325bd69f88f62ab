"""Sweeps: runs that differ in a few options, and early stopping of the worse ones.

A sweep is nothing but queued runs whose folders have a sweep.json with the same id. Successive halving needs no
coordinator: at certain steps (rungs) each run compares its own validation loss with those that the other runs had at
the same step, and asks itself to stop if it is not among the best. That is the stopping variant of ASHA (Li et al.
2020, arXiv:1810.05934).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from backend import wording
from backend.runs import SWEEP, json_values, request_stop, validation
from backend.runs.folder import Run, RunError


@dataclass(frozen=True)
class Member:
    """A run's part in a sweep. `varied`: option key -> value. `first_rung`: the step of the first comparison, 0 for
    none; the next ones are at `factor` times the step before, and one in `factor` runs continues."""

    sweep: str
    varied: dict[str, Any]
    first_rung: int = 0
    factor: int = 3

    def to_json(self) -> str:
        """The text of sweep.json."""
        return json.dumps(asdict(self), indent=1) + "\n"

    def is_rung(self, step: int) -> bool:
        """Whether runs are compared at this step."""
        rung = self.first_rung
        while 0 < rung < step:
            rung *= self.factor
        return 0 < rung == step


def member(folder: Path) -> Member | None:
    """The part of this run in a sweep; None if it belongs to none."""
    try:
        found = Member(**json_values.read(folder / SWEEP))
    except (OSError, ValueError, TypeError):
        return None
    return found if isinstance(found.sweep, str) and isinstance(found.varied, dict) else None


def label(patch: dict[str, Any]) -> str:
    """The changes as a short name: `learning_rate=1e-4 r=8`."""
    short = ((name.rpartition(".")[2], value) for name, value in patch.items())
    return " ".join(f"{name}={_short(name, value)}" for name, value in short)


def _short(name: str, value: Any) -> str:
    if isinstance(value, float):
        return wording.learning_rate(value) if name == "learning_rate" else f"{value:g}"
    return "+".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def members(root: Path, sweep: str) -> Iterator[tuple[Run, Member]]:
    """The runs of a sweep, oldest first."""
    for path in sorted(root.glob(f"[!.]*/{SWEEP}")):
        found = member(path.parent)
        if found and found.sweep == sweep:
            yield Run(path.parent), found


def stop_if_behind(folder: Path, step: int) -> str:
    """At a rung: ask the run to save a checkpoint and stop unless its validation loss is among the best. Returns the
    reason, '' if the run continues."""
    own = member(folder)
    if own is None or not own.is_rung(step):
        return ""
    found = [validation.losses(run.path).get(step) for run, _ in members(folder.parent, own.sweep)]
    losses = sorted(loss for loss in found if loss is not None and math.isfinite(loss))
    loss = validation.losses(folder).get(step, math.nan)
    goes_on = len(losses) // own.factor
    if len(losses) < own.factor or loss <= losses[goes_on - 1]:
        return ""
    place = 1 + sum(other < loss for other in losses) if math.isfinite(loss) else len(losses)
    ranked = f"Its validation loss at step {step} ranks number {place} among {len(losses)} runs"
    reason = f"{ranked}; only the best {goes_on} continue."
    request_stop(folder, f"save\n{reason}\n")
    return reason


def rows(root: Path, sweep: str) -> list[dict[str, Any]]:
    """The runs of a sweep, the lowest validation loss first, then those without one. Raises RunError."""
    found = []
    for run, part in members(root, sweep):
        summary, lowest = run.summary(), validation.lowest(run.path)
        kept = {key: summary[key] for key in ("id", "state", "step", "loss", "sentence")}
        found.append({**kept, "varied": part.varied, "eval_loss": lowest[0] if lowest else None})
    if not found:
        raise RunError(f"There is no sweep named {sweep!r}.")
    return ranked(found, "eval_loss", is_lower_better=True)


def ranked(found: list[dict[str, Any]], key: str, is_lower_better: bool) -> list[dict[str, Any]]:
    """Rows of a sweep, the best value of `key` first, then those without one."""
    sign = 1 if is_lower_better else -1
    return sorted(found, key=lambda row: (row[key] is None, sign * (row[key] or 0), row["id"]))
