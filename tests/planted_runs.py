"""Run folders with files of the test's choice, written without starting a process."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from backend.runs import SPEC, Plan
from backend.runs.folder import Run

CREATED = datetime(2026, 11, 23)


def write_files(folder: Path, contents: Mapping[str, Any]) -> None:
    """Write files: a text as it is, a list as a line of JSON for each value, and other values as JSON."""
    for name, content in contents.items():
        if isinstance(content, list):
            content = "".join(json.dumps(value) + "\n" for value in content)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def ended(end: str = "stopped") -> dict[str, Any]:
    """The state of a run that has just ended."""
    return {"started": time.time() - 99, "ended": time.time(), "end": end, "exit_code": 0, "files_before": {}}


def plant_run(
    root: Path,
    name: str = "run",
    contents: Mapping[str, Any] = {},
    spec: str = "{}\n",
    created: datetime = CREATED,
    about: Mapping[str, Any] | None = None,
) -> Run:
    """A run with files (see `write_files`), as it looks after its end."""
    run = Run.create(root, name, Plan(("true",), files={SPEC: spec}), created, about)
    write_files(run.path, contents)
    return run
