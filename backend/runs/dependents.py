"""Runs that begin with the model or a checkpoint of another run, so that they need its folder."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from backend.runs import SPEC
from backend.runs.folder import Run, runs


def dependents(root: Path, ids: Collection[str]) -> list[Run]:
    """The other runs under `root` whose options name a file in the folder of one of these runs, newest first."""
    return [run for run in runs(root) if run.id not in ids and _names_one(run, ids)]


def _names_one(run: Run, ids: Collection[str]) -> bool:
    with suppress(OSError):  # a run that cannot be read needs nothing
        text = (run.path / SPEC).read_text(encoding="utf-8", errors="replace")
        return any(f"/{id}/" in text for id in ids)
    return False
