"""Runs specs without the preflight rules, so that the library itself fails or continues."""

from __future__ import annotations

from pathlib import Path

from fork_server import ForkServer, rank_count
from training_runs import without_checks, write_plan

from backend.config import RunSpec
from backend.launch.plan import plan
from backend.machine import Machine


def run(folder: Path, spec: RunSpec, fork_server: ForkServer) -> tuple[int, str]:
    """(exit code, log) of `spec`, planned into the new `folder`."""
    plan_ = without_checks(plan(spec, Machine()))
    code = fork_server.run(write_plan(plan_, folder), rank_count(spec), env=plan_.env, seconds=300)
    return code, (folder / "log.txt").read_text()
