"""Which files of a run the last start has written, and not an earlier one.

Each start records which versions of the files are there before it: a supervisor in state.json, run.sh in the lock file.
Their times would not tell after the clock was set back. A version is size and time, so that it is the same in a copy
that keeps times (cp -p, rsync -a). The folder of a launch, below `ranks`, is recognized by its name: torchrun creates a
new one for each launch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backend.runs import LOCK, RANK_LOGS, SHELL, WRITTEN
from backend.runs.lock_file import LockFile

BEFORE = "files_before"  # in state.json


def file_versions(folder: Path) -> dict[str, list[int]]:
    """Which version of each file that the trainer writes is in `folder`, and the folders of earlier launches."""
    found = {}
    for name in WRITTEN:
        with contextlib.suppress(OSError):
            file = (folder / name).stat()
            found[name] = [file.st_size, file.st_mtime_ns]
    return found | {f"{RANK_LOGS}/{path.name}": [0, 0] for path in (folder / RANK_LOGS).glob("*")}


def start_state(state: Mapping[str, Any], lock: LockFile) -> dict[str, Any]:
    """What was recorded before the last start: `state`, the content of state.json, unless run.sh has started it."""
    if lock.starter != SHELL:
        return dict(state)
    return {} if lock.files_before is None else {BEFORE: lock.files_before}


def is_fresh(folder: Path, name: str, state: Mapping[str, Any]) -> bool:
    """Whether the file, or the folder of a launch, is not what was there before the last start. `state`: what
    `start_state` returns. If it has no versions, as with a run.sh of an earlier Footplate, the time of the file is
    compared with that of the lock."""
    with contextlib.suppress(OSError):
        file = (folder / name).stat()
        if BEFORE not in state:
            return file.st_mtime_ns >= (folder / LOCK).stat().st_mtime_ns
        before = state[BEFORE].get(name)
        if before is None or name.startswith(f"{RANK_LOGS}/"):
            return before is None
        return bool([file.st_size, file.st_mtime_ns] != before[-2:])
    return False
