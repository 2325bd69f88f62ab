"""The preflight rules, in the trainer: the same ones as on the page, on the machine that the run is on."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from backend.config import RunSpec
from backend.inspect import inspect_inputs
from backend.inspect.worker import SETTING as WORKER_SETTING
from backend.machine import probe
from backend.rules import Case, examine
from backend.runs import resume_point
from backend.train.run_log import TrainError


def check_rules(spec: RunSpec, folder: Path) -> None:
    """Raise TrainError for the first error that the preflight rules find on this node, which need not be the machine
    that planned the run. Rules about the moment before launch are left out."""
    # No worker process to read an unknown architecture: this process is about to load the model itself.
    facts = inspect_inputs(spec, folder, {**os.environ, WORKER_SETTING: "off"})
    # No lengths estimated from characters: this process is about to count the tokens.
    facts = replace(facts, token_lengths=(), trained_lengths=(), min_prompt_tokens=0)
    if facts.adapter_problem and resume_point.find(folder).checkpoint:
        facts = replace(facts, adapter_problem="")  # the adapter is loaded at step 0 only, which checks it again
    found = examine(Case(spec, probe(folder), facts), at_start=False)
    later = () if spec.data.streaming else ("DAT010",)  # check_positions checks the real lengths
    errors = [finding for finding in found if finding.level == "error" and finding.code not in later]
    if errors:
        first = errors[0]
        safe = [fix for fix in first.fixes if fix.safe]  # the page offers the others, with what they cost
        fix = f" Fix: {safe[0].label}." if safe else ""
        more = f" ({len(errors) - 1} more: {', '.join(e.title for e in errors[1:])}.)" if len(errors) > 1 else ""
        raise TrainError(f"{', '.join(first.fields)}: {first.title}. {first.message}{fix}{more} [{first.code}]")
