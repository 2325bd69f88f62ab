"""The command sweep: start runs that differ in a few options, and show how they compare.

Imports everything below the command line.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from backend import sweep
from backend.cli.commands import print_findings, print_json, read_spec, wait_for_preflight
from backend.config import RunSpec
from backend.config.options import Problem, SpecError, edit
from backend.inspect import predecessor
from backend.machine import probe
from backend.preflight import Report
from backend.runs import SWEEP, sweeps
from backend.runs.folder import Run


def start(arguments: argparse.Namespace) -> int:
    """Queue a run for each combination of values. Nothing is started if one of them cannot run."""
    spec = read_spec(arguments)
    varied = [sweep.parse(text) for text in arguments.vary]
    patches = sweep.patches(spec, varied, arguments.random, arguments.seeds, arguments.limit)
    first_rung = _first_rung(spec, arguments.halving)
    machine = probe(Path.cwd())
    reports = [wait_for_preflight(edit(spec, patch), machine) for patch in patches]
    for patch, report in zip(patches, reports, strict=True):
        if not report.can_run:
            print(f"Nothing was started. The checks report errors for {sweep.label(patch)}:")
            print_findings(report)
            return 1
    identity = f"{datetime.now():%Y-%m-%d_%H%M%S}"
    started = []
    for patch, report in zip(patches, reports, strict=True):
        part = sweeps.Member(identity, patch, first_rung, arguments.halving or sweeps.Member.factor)
        started.append(_create(Path(arguments.runs), report, part))
        started[-1].start(after=predecessor(report.spec, Path.cwd(), None))
    if arguments.json:
        print_json({"sweep": identity, "runs": [run.id for run in started]})
    else:
        print(f"{len(started)} runs were queued. Compare them: footplate list --sweep {identity}")
    return 0


def _first_rung(spec: RunSpec, factor: int) -> int:
    """The step of the first comparison: the first evaluation. 0 without early stopping. Raises SpecError."""
    if not factor:
        return 0
    if factor < 2:
        raise SpecError([Problem("", "--halving must be at least 2: one in that many runs continues")])
    if spec.eval.strategy != "steps":
        message = "must be steps for --halving, which compares validation losses at the same step"
        raise SpecError([Problem("eval.strategy", message)])
    return spec.eval.steps


def _create(root: Path, report: Report, part: sweeps.Member) -> Run:
    plan = replace(report.plan, files={**report.plan.files, SWEEP: part.to_json()})
    title = f"{report.title} {sweep.label(part.varied)}".strip()
    return Run.create(root, title, plan, datetime.now(), report.about, report.expected)


def print_rows(found: list[dict[str, Any]]) -> None:
    """One line per run, the best one first."""
    width = max(len(sweep.label(row["varied"])) for row in found)
    print(f"{'options':{width}}  {'state':8}  {'step':>6}  {'loss':>9}  {'best validation loss':>20}  run")
    for row in found:
        numbers = ["-" if row[key] is None else f"{row[key]:.4g}" for key in ("step", "loss", "eval_loss")]
        step, loss, best = numbers
        label = sweep.label(row["varied"])
        print(f"{label:{width}}  {row['state']:8}  {step:>6}  {loss:>9}  {best:>20}  {row['id']}")
