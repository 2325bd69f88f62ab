"""Jobs of a run that has trained: merging its adapter, chatting with its model.

A job is a run of its own in the folder `jobs` of the run: detached from page and server, with a lock, a log, progress,
a state, a place in the queue if it needs devices, and the same way to stop it. Renaming the run moves its jobs along;
deleting the run deletes them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from backend.runs import JOBS, Plan
from backend.runs.folder import PACKAGES, Run, RunError, runs

STOP_SECONDS = 5.0  # there is nothing to save


def create(
    run: Run, kind: str, module: str, files: Mapping[str, str], env: Mapping[str, str], devices: Mapping[str, str]
) -> Run:
    """A new job of `run`: `python -m MODULE .` in the job's folder, which has `files`. Raises RunError."""
    argv = (sys.executable, "-m", module, ".")
    plan = Plan(argv, {"PYTHONPATH": str(PACKAGES), **env}, files, devices=devices, stop_timeout=STOP_SECONDS)
    return Run.create(run.path / JOBS, kind, plan, datetime.now(), {"kind": kind})


def find_all(run: Run, kind: str) -> list[Run]:
    """The jobs of this kind, the newest first."""
    return [job for job in runs(run.path / JOBS) if job.about().get("kind") == kind]


def find(run: Run, id: str) -> Run:
    """The job with this id. Raises RunError."""
    for job in runs(run.path / JOBS, id):
        if job.id == id:
            return job
    raise RunError("This job no longer exists.")


def as_json(job: Run) -> dict[str, Any]:
    """For the page: id, state, a sentence about it, the completed fraction, result and failure."""
    summary = job.summary()
    shown = {key: summary[key] for key in ("id", "state", "sentence", "fraction", "created")}
    return {**shown, "result": job.result(), "failure": job.failure(), "text": job.progress().get("text", "")}
