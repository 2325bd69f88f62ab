"""Rehearsal: a spec with two steps and everything that a run does, to find in a minute what would fail in hours.

Imports config, preflight, runs. A rehearsal is nothing but runs in a scratch folder: of `rehearsal_spec`, with a crash
after the checkpoint of the first step, and of a command that loads the saved model (backend/runs/rehearsals.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from backend.config import RunSpec
from backend.config.options import edit, effective
from backend.inspect import predecessor
from backend.preflight import Report, preflight
from backend.runs import REHEARSAL, Plan
from backend.runs.folder import RunError
from backend.runs.rehearsals import Rehearsal

MAX_GENERATIONS, MAX_NEW_TOKENS = 2, 16
MAX_ACCUMULATION = 2  # gradients of an earlier batch take memory too; more batches take only time


def rehearsal_spec(spec: RunSpec) -> RunSpec:
    """`spec` as it is rehearsed, on this node: two steps, with an evaluation and a checkpoint after each if the spec
    has them. What decides memory and code paths stays as it is."""
    spec = effective(spec)
    patch: dict[str, Any] = {
        "train.duration": "steps",
        "train.max_steps": 2,
        "train.gradient_accumulation_steps": min(spec.train.gradient_accumulation_steps, MAX_ACCUMULATION),
        "train.max_nonfinite_steps": 1,
        "train.half_lr_retries": 0,
        "save.resume_from": "latest",
        "logging.steps": 1,
        "logging.report_to": "none",
        "eval.num_generations": min(spec.eval.num_generations, MAX_GENERATIONS),
        "eval.max_new_tokens": min(spec.eval.max_new_tokens, MAX_NEW_TOKENS),
    }
    if spec.save.strategy != "no":
        patch |= {"save.strategy": "steps", "save.steps": 1}
    if spec.eval.strategy != "no":
        patch |= {"eval.strategy": "steps", "eval.steps": 1}
    if spec.train.warmup_steps >= 1:
        patch["train.warmup_steps"] = 0.0
    if spec.launch.rendezvous != "standalone":
        patch["launch.rendezvous"] = "standalone"
    return effective(edit(spec, patch))


def differences(spec: RunSpec) -> list[str]:
    """What a rehearsal of `spec` leaves out, as sentences."""
    notes = []
    if spec.launch.rendezvous != "standalone":
        notes.append("Only the processes of this node were started, without the rendezvous of several nodes.")
    if spec.save.strategy == "no" or spec.save.only_model:
        notes.append("The spec saves no checkpoint to resume from, so the crash and the resume were left out.")
    if not spec.save.final_model:
        notes.append("The spec saves no final model, so none was loaded.")
    if spec.save.resume_from == "path":
        notes.append("The rehearsal started at step 0 instead of save.resume_path.")
    return notes


def rehearse(root: Path, report: Report, base: Path) -> tuple[Report, Rehearsal | None]:
    """Start a rehearsal of a checked spec in the scratch folder of the runs folder `root`. Returns the report of the
    spec with two steps, and None if that has errors. Raises RunError."""
    if earlier := predecessor(report.spec, base, None):
        raise RunError(f"Not rehearsed: {earlier.id} saves the model and has not ended.")
    small = preflight(rehearsal_spec(report.spec), report.machine, base)
    if not small.can_run:
        return small, None
    plan = replace(small.plan, env={**small.plan.env, REHEARSAL: "1"})
    load = _load_plan(plan, report) if small.spec.save.final_model else None
    notes = differences(report.spec)
    # CUDA cannot be used in a process that was forked after another one asked it anything, as libraries do on import.
    warm = small.run.device == "cpu" and hasattr(os, "pidfd_open")
    rehearsal = Rehearsal.create(root, small.title, plan, load, small.about, small.expected, notes, warm)
    rehearsal.start()
    return small, rehearsal


def _load_plan(plan: Plan, report: Report) -> Plan:
    """The command that loads the saved model, with the environment and the devices of the run. The folder of the
    training is next to its own."""
    environment: Mapping[str, str] = {key: value for key, value in plan.env.items() if key != REHEARSAL}
    argv = (report.machine.python, "-m", "backend.train.load_model")
    return Plan(argv, env=environment, defaults=plan.defaults, devices=plan.devices)
