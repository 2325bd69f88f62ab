"""Launches without the preflight rules, so that it is the library that fails, or continues."""

from __future__ import annotations

from pathlib import Path

from host import Host, ranks
from trainings import lay, without_checks

from backend.config import RunSpec
from backend.launch.plan import plan
from backend.machine import Machine
from backend.paths import HOME

EXTENSIONS = HOME / ".cache/torch_extensions"


def run(folder: Path, spec: RunSpec, host: Host) -> tuple[int, str]:
    """(exit code, log) of `spec`, planned into the new `folder`."""
    made = without_checks(plan(spec, Machine()))
    code = host.run(lay(made, folder), ranks(spec), env=made.env, seconds=300)
    # A rank that is ended while it builds or loads a DeepSpeed operator leaves a lock for which others would wait.
    for lock in EXTENSIONS.rglob("lock"):
        lock.unlink()
    return code, (folder / "log.txt").read_text()
