"""The processes that append the output of a run to its log."""

from __future__ import annotations

import os
from pathlib import Path

from backend.runs import LOG
from backend.runs.folder import Run


def log_writers(run: Run) -> list[int]:
    """Processes whose standard output is the log."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "fd/1") == str(run.path / LOG):
                found.append(int(process.name))
        except OSError:
            continue
    return found
