"""Start a sweep: the runs of its combinations of values. All of them are checked before the first one is queued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from backend.config import RunSpec
from backend.config.options import Problem, SpecError, edit
from backend.inspect import predecessor
from backend.preflight import Report
from backend.runs import SWEEP, sweeps
from backend.runs.folder import Run
from backend.tasks import sweep

LIMIT = 50  # runs of a sweep, unless the user raises it


@dataclass(frozen=True)
class SweepPlan:
    """What each run of a sweep changes in `spec`. `halving` is the factor of successive halving, 0 without it."""

    spec: RunSpec
    patches: tuple[dict[str, Any], ...]
    halving: int = 0

    def specs(self) -> list[RunSpec]:
        """The spec of each run."""
        return [edit(self.spec, patch) for patch in self.patches]

    def labels(self) -> list[str]:
        """What each run changes, as a short name."""
        return [sweeps.label(patch) for patch in self.patches]


def plan(
    spec: RunSpec, varied: Sequence[sweep.Values], samples: int = 0, seeds: int = 1, limit: int = LIMIT,
    halving: int = 0,
) -> SweepPlan:  # fmt: skip
    """The runs of a sweep: a grid, or that many random `samples`, times `seeds`. Raises SpecError."""
    if halving and halving < 2:
        message = "successive halving needs a factor of at least 2: one in that many runs continues"
        raise SpecError([Problem("", message)])
    if halving and spec.eval.strategy != "steps":
        message = (
            "must be steps for early stopping (successive halving), which compares validation losses at the same step"
        )
        raise SpecError([Problem("eval.strategy", message)])
    return SweepPlan(spec, tuple(sweep.patches(spec, varied, samples, seeds, limit)), halving)


def start(root: Path, planned: SweepPlan, reports: Sequence[Report], base: Path) -> tuple[str, list[Run]]:
    """Queue the runs, in the runs folder `root`, of reports that can all run. Returns the id of the sweep, and its
    runs. Raises RunError."""
    identity = f"{datetime.now():%Y-%m-%d_%H%M%S}"
    first_rung = planned.spec.eval.steps if planned.halving else 0  # the first evaluation
    started = []
    for patch, report in zip(planned.patches, reports, strict=True):
        part = sweeps.Member(identity, patch, first_rung, planned.halving or sweeps.Member.factor)
        started.append(_create(root, report, part))
        started[-1].start(after=predecessor(report.spec, base, None))
    return identity, started


def _create(root: Path, report: Report, part: sweeps.Member) -> Run:
    files = {**report.plan.files, SWEEP: part.to_json()}
    title = f"{report.title} {sweeps.label(part.varied)}".strip()
    return Run.create(root, title, replace(report.plan, files=files), datetime.now(), report.about, report.expected)
