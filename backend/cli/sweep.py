"""The command sweep: start runs that differ in a few options, and show how they compare."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from backend.cli.commands import print_json, print_warnings, read_spec, refuse, wait_for_preflight
from backend.cli.evaluate import change_text, value_text
from backend.machine import probe
from backend.runs import sweeps
from backend.tasks import start_sweep, sweep
from backend.tasks.measured_time import MeasuredStarts
from backend.tasks.sweep_scores import LOSS, Ranked, Ranking


def start(arguments: argparse.Namespace) -> int:
    """Queue a run for each combination of values. Nothing is started if one of them cannot run."""
    varied = [sweep.parse(text) for text in arguments.vary]
    limits = arguments.random, arguments.seeds, arguments.limit, arguments.halving
    planned = start_sweep.plan(read_spec(arguments), varied, *limits)
    machine, starts = probe(Path.cwd()), MeasuredStarts(Path(arguments.runs))
    reports = [starts.applied(wait_for_preflight(spec, machine)) for spec in planned.specs()]
    for label, report in zip(planned.labels(), reports, strict=True):
        if not report.can_run:
            if not arguments.json:
                print(f"Nothing was started. The checks report errors for {label}:")
            return refuse(report, arguments.json, label)
    print_warnings(*reports)
    identity, started = start_sweep.start(Path(arguments.runs), planned, reports, Path.cwd())
    if arguments.json:
        print_json({"sweep": identity, "runs": [run.id for run in started]})
    else:
        queued = "1 run was queued" if len(started) == 1 else f"{len(started)} runs were queued"
        print(f"{queued}. Compare them: footplate list --sweep {identity}")
        print(start_sweep.time_text(planned, reports))
        if planned.note:
            print(planned.note)
    return 0


def print_rows(found: Ranked) -> None:
    """One line per run, the best one first."""
    by = found.by
    ranked = "" if by.key == LOSS else f"  {by.label.lower():>{len(by.label)}}"
    width = max(len(sweeps.label(row["varied"])) for row in found.rows)
    print(f"{'options':{width}}  {'state':8}  {'step':>6}  {'loss':>9}  {'best validation loss':>20}{ranked}  run")
    for row in found.rows:
        numbers = ["-" if row[key] is None else f"{row[key]:.4g}" for key in ("step", "loss", "eval_loss")]
        step, loss, best = numbers
        label, shown = sweeps.label(row["varied"]), f"  {_value(row, by):>{len(by.label)}}" if ranked else ""
        print(f"{label:{width}}  {row['state']:8}  {step:>6}  {loss:>9}  {best:>20}{shown}  {row['id']}")
        if row["interval"]:
            print(f"{'':{width}}  {change_text(row['interval'], row['interval']['is_share'], 'its base model')}")
    if found.sentence and (ranked or not found.is_comparable):
        print(found.sentence)


def _value(row: dict[str, Any], by: Ranking) -> str:
    value = row[by.key]
    return "-" if value is None else value_text(value, by.is_share)
