"""Scratch folders: a detached process that starts runs in its folder one after the other, writes an outcome and
deletes the runs. Rehearsals and tunings are such folders.

Their state is computed from files: the process holds the lock of the folder, and OUTCOME has the final status. What a
killed process leaves behind is deleted before the next folder is created.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from backend.runs import LOCK, LOG, SERVE_TOKEN, STOP, processes, replace_text, webhook
from backend.runs.folder import ALIVE, PACKAGES, RunError, StopTimeouts, runs
from backend.runs.supervisor import detach

OUTCOME = "outcome.json"  # the final status
SCRATCH = "scratch"  # files of the runs, deleted with them
POLL_SECONDS, STOP_SECONDS = 0.1, 60.0
TIMEOUTS = StopTimeouts(discard=5.0, before_training=0.5)  # there is nothing to keep


def new_folder(parent: Path, kept: int) -> Path:
    """The path of a new scratch folder in `parent`; old ones are deleted."""
    delete_old(parent, kept)
    return parent.absolute() / f"{datetime.now():%Y%m%d%H%M%S%f}"


def delete_old(parent: Path, kept: int) -> None:
    """Delete what killed processes left behind, and all but the newest `kept` of the folders that have ended."""
    ended = []
    for path in sorted(parent.glob("*")):
        if processes.is_locked(path):
            continue
        if (path / OUTCOME).exists() and not runs(path):
            ended.append(path)
        elif time.time() - path.stat().st_mtime > STOP_SECONDS or (path / LOG).exists() or (path / LOCK).exists():
            discard_runs(path)
            shutil.rmtree(path, ignore_errors=True)
    for path in ended[:-kept]:
        shutil.rmtree(path, ignore_errors=True)


def discard_runs(folder: Path) -> None:
    """Stop and delete the runs in `folder`."""
    for run in runs(folder):
        with contextlib.suppress(RunError):
            run.stop(save=False)
        deadline = time.monotonic() + STOP_SECONDS
        while run.state in ALIVE and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        with contextlib.suppress(RunError):
            run.delete()
    shutil.rmtree(folder / SCRATCH, ignore_errors=True)


def start(module: str, folder: Path, what: str) -> None:
    """Start `python -m module folder`, which detaches itself; `what` begins the message of the RunError that is raised
    if it does not start."""
    command = [sys.executable, "-m", module, str(folder)]
    try:
        subprocess.run(command, cwd=PACKAGES, stdin=subprocess.DEVNULL, start_new_session=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise RunError(f"{what} did not start: {error}.") from error


def request_stop(folder: Path) -> None:
    """Request that the process of `folder` stops."""
    with contextlib.suppress(OSError):
        replace_text(folder / STOP, "discard")


def run_detached(folder: Path, drive: Callable[[], None]) -> int:
    """Acquire the lock of `folder` and fork: the parent returns its exit code, the child calls `drive` and ends."""
    if processes.acquire_lock(folder) is None:  # held until this process ends
        return 1
    if os.fork():
        return 0
    detach(folder)
    for name in (webhook.WEBHOOK, SERVE_TOKEN):  # nobody waits for the end of its runs, and they serve nothing
        os.environ.pop(name, None)
    drive()
    os._exit(0)
