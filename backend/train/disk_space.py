"""Writing to a disk that is full or read-only: a run waits until it can write.

Imports checkpoints, context, device, run_log. Metrics and progress wait in RunLog; here is what training must not
continue without: checkpoints, the trained model and the result.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from backend.train import checkpoints
from backend.train.context import TrainContext
from backend.train.device import ProcessGroup
from backend.train.run_log import RunLog, Stopped, TrainError

POLL_SECONDS = 1.0
RETRY_SECONDS = 300.0  # then writing is tried again, since the free space does not show quotas and compression
PROBE_BYTES = 4096
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
# What torch 2.13 (zip files) and safetensors 0.8 raise instead of an OSError.
MESSAGES = re.compile(
    r"(?i)No space left on device|quota exceeded|Read-only file system|PytorchStreamWriter failed|unexpected pos"
)


def save_checkpoint(context: TrainContext, folder: Path, write: Callable[[], None]) -> None:
    """Call `write`, which saves a checkpoint into `folder`, once there is room for one as large as the last one. If it
    fails for lack of room, a single process tries again. Several ranks cannot, because some of them may wait for each
    other inside `write`: TrainError."""
    need = checkpoints.last_size(context.folder)

    def attempt() -> None:
        try:
            write()
        except Exception as error:
            if problem := disk_error(error):
                checkpoints.delete(folder)
                if context.group.world > 1:
                    raise TrainError(
                        f"{folder.name} could not be saved and was deleted: {problem}. Free some disk space, then "
                        "resume from the last complete checkpoint."
                    ) from error
            raise

    if context.group.world > 1:
        on_rank_0(context.group, lambda: _Wait(context.run_log, folder.name).until_writable(need))
        attempt()
    else:
        retry(context.run_log, folder.name, attempt, need)


def on_rank_0(group: ProcessGroup, work: Callable[[], object]) -> None:
    """Call `work` on rank 0, while the others wait as long as it takes; Stopped and TrainError are raised on all ranks.
    A collective call."""
    ended: Exception | None = None
    if group.rank == 0:
        try:
            work()
        except (Stopped, TrainError) as error:
            ended = error
    if ended := group.share(ended):
        raise ended


def retry(run_log: RunLog, what: str, write: Callable[[], object], need: int = 0) -> None:
    """Call `write` until the disk has room for it, first once `need` bytes are free. Raises Stopped if the user stops
    without saving."""
    wait = _Wait(run_log, what)
    while True:
        wait.until_writable(need, RETRY_SECONDS)
        try:
            write()
            return
        except Exception as error:
            problem = disk_error(error)
            if not problem:
                raise
        wait.pause(problem)
        if not _problem(run_log.folder, 0):  # otherwise the file system is read-only, or has no room for anything
            need = max(need, shutil.disk_usage(run_log.folder).free + PROBE_BYTES)


def disk_error(error: BaseException) -> str:
    """What is wrong if the disk is full or read-only; '' for any other error."""
    error = error.__cause__ or error
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return os.strerror(error.errno)
    found = MESSAGES.search(str(error))
    return found[0] if found else ""


class _Wait:
    """Waits for the disk, with one line in the log."""

    def __init__(self, run_log: RunLog, what: str) -> None:
        self.run_log, self.what, self._told = run_log, what, False

    def until_writable(self, need: int, seconds: float = float("inf")) -> None:
        """Wait until `need` bytes can be written, or for at most `seconds`."""
        deadline = time.monotonic() + seconds
        while (problem := _problem(self.run_log.folder, need)) and time.monotonic() < deadline:
            self.pause(problem)

    def pause(self, problem: str) -> None:
        """Say once what the run waits for. Raises Stopped if the user stops without saving."""
        text = f"{self.what} cannot be saved ({problem}): waiting until there is room on the disk of the run's folder."
        if not self._told:
            self.run_log.info(text)
        self._told = True
        self.run_log.progress("waiting for disk space", text)
        if self.run_log.stop_requested() == 1:
            raise Stopped
        time.sleep(POLL_SECONDS)


def _problem(folder: Path, need: int) -> str:
    """Why `need` bytes cannot be written into the folder; '' if they probably can."""
    probe = folder / f".room.{os.getpid()}"
    try:
        try:
            probe.write_bytes(bytes(PROBE_BYTES))
        finally:
            probe.unlink(missing_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return error.strerror or str(error)
    if free < need:
        return f"{free / 1e6:,.1f} MB are free, {need / 1e6:,.1f} MB are needed"
    return ""
