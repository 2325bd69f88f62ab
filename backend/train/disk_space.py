"""Writing to a disk that is full, read-only or reports errors: a run waits until it can write, or says why it cannot.

Metrics and progress wait in RunLog; here is what training must not continue without: checkpoints, the trained model and
the result.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from backend.runs import WAITS_FOR_DISK
from backend.train import checkpoints
from backend.train.context import TrainContext
from backend.train.device import ProcessGroup
from backend.train.run_log import RunLog, Stopped, TrainError

POLL_SECONDS = 1.0
RETRY_SECONDS = 300.0  # writing is retried at least this often: free space does not show quotas and compression
IO_SECONDS = 300.0  # for an error of a device or of a network file system, which may be gone after a moment
PROBE_BYTES = 4096
FEW_INODES, MIN_FREE_BYTES = 64, 2**20  # a disk that takes no file although it has room for data has no inodes
NO_INODES = "too few inodes are free to create its files"
FULL = (errno.ENOSPC, errno.EDQUOT)
FAULTY = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO)
DISK_ERRORS = (*FULL, errno.EROFS, *FAULTY)
ADVICE = "The disk or the network file system of the run's folder reports an error: check it (dmesg has its messages)"
# safetensors 0.8 and torch's distributed checkpoints have the number of the error in the text of their own exceptions.
NUMBER = re.compile(r"\(os error (\d+)\)|\[Errno (\d+)\]")
MESSAGES = {os.strerror(number): number for number in DISK_ERRORS}
# torch 2.13 names no cause where a zip file cannot be written.
WITHOUT_CAUSE = re.compile(r"PytorchStreamWriter failed[^.\n]*|unexpected pos \d+ vs \d+")


@dataclass(frozen=True)
class Room:
    """What has to be free on the disk: bytes, and inodes for `files`."""

    bytes: int = 0
    files: int = 0


def save_checkpoint(context: TrainContext, folder: Path, write: Callable[[], None]) -> None:
    """Call `write`, which saves a checkpoint into `folder`, once there is room for one as large as the last one. If it
    fails for lack of room, a single process tries again. Several ranks cannot, because some of them may wait for each
    other inside `write`: TrainError."""
    need = Room(*checkpoints.last_size(context.folder))

    def attempt() -> None:
        try:
            write()
        except Exception as error:
            if not (problem := disk_error(error, folder)):
                raise
            checkpoints.delete(folder)
            if context.group.world == 1:
                raise problem from error
            raise TrainError(
                f"{folder.name} could not be saved and was deleted: {problem.strerror}. "
                f"{ADVICE if problem.errno in FAULTY else 'Free some disk space'}, then resume from the last complete "
                "checkpoint."
            ) from error

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


def retry(run_log: RunLog, what: str, write: Callable[[], object], need: Room = Room()) -> None:
    """Call `write` once `need` is free, and again until the disk has room for all of it. Raises Stopped if the user
    stops without saving, and TrainError."""
    wait = _Wait(run_log, what)
    while True:
        wait.until_writable(need, RETRY_SECONDS)
        try:
            write()
            return
        except Exception as error:
            if not (problem := disk_error(error, run_log.folder)):
                raise
        wait.pause(problem)
        if problem.errno in FULL and not _problem(run_log.folder, Room()):  # the disk has room, but too little
            disk = os.statvfs(run_log.folder)
            if problem.strerror == NO_INODES:
                need = replace(need, files=max(need.files, disk.f_favail + 1))
            else:
                need = replace(need, bytes=max(need.bytes, disk.f_bavail * disk.f_frsize + PROBE_BYTES))


def disk_error(error: BaseException, folder: Path) -> OSError | None:
    """What is wrong with the disk if it has not taken what was written into `folder`; None for any other error. It has
    to be called before anything is deleted: where the error has no cause, writing a file shows it."""
    link: BaseException | None = error
    while link:
        if (number := _number(link)) in DISK_ERRORS:
            return _disk_problem(number, folder)
        link = link.__cause__ or link.__context__
    if found := WITHOUT_CAUSE.search(str(error)):
        problem = _problem(folder, Room())
        return problem if problem and problem.errno in DISK_ERRORS else OSError(errno.EIO, f"PyTorch says: {found[0]}")
    return None


def _disk_problem(number: int, folder: Path) -> OSError:
    """The error with this number; where no inodes are free, it says so."""
    with contextlib.suppress(OSError):
        disk = os.statvfs(folder)
        has_few_inodes = disk.f_files and disk.f_favail < FEW_INODES  # some file systems do not count them
        if number == errno.ENOSPC and has_few_inodes and disk.f_bavail * disk.f_frsize >= MIN_FREE_BYTES:
            return OSError(number, NO_INODES)
    return OSError(number, os.strerror(number))


def _number(error: BaseException) -> int:
    """The errno of an error; 0 if it has none."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    text = str(error)
    if found := NUMBER.search(text):
        return int(found[1] or found[2])
    return next((number for message, number in MESSAGES.items() if message in text), 0)


class _Wait:
    """Waits for the disk, with one line in the log for each kind of problem."""

    def __init__(self, run_log: RunLog, what: str) -> None:
        self.run_log, self.what = run_log, what
        self._told: set[int | None] = set()
        self._io_deadline = 0.0

    def until_writable(self, need: Room, seconds: float = float("inf")) -> None:
        """Wait until `need` is free, or for at most `seconds`. Raises TrainError."""
        deadline = time.monotonic() + seconds
        while (problem := _problem(self.run_log.folder, need)) and time.monotonic() < deadline:
            self.pause(problem)

    def pause(self, problem: OSError) -> None:
        """Say once what the run waits for. Raises Stopped if the user stops without saving, and TrainError if a disk
        has reported errors for too long, or if the run's folder does not exist: its supervisor has ended then, so
        nothing would end a rank that waits."""
        if problem.errno == errno.ENOENT:
            raise TrainError(f"{self.what} cannot be saved: the run's folder was deleted while the run used it.")
        text = f"{self.what} cannot be saved ({problem.strerror}): "
        if problem.errno in FAULTY:
            text += f"trying again for {IO_SECONDS / 60:g} minutes. {ADVICE}."
            self._io_deadline = self._io_deadline or time.monotonic() + IO_SECONDS
            if time.monotonic() > self._io_deadline:
                raise TrainError(
                    f"{self.what} could not be saved: {problem.strerror}. {ADVICE}, then resume from the last complete "
                    "checkpoint."
                )
        else:
            text += "waiting until there is room on the disk of the run's folder."
        if problem.errno not in self._told:
            self.run_log.info(text)
        self._told.add(problem.errno)
        self.run_log.progress(WAITS_FOR_DISK, text)
        if self.run_log.stop_requested() == 1:
            raise Stopped
        time.sleep(POLL_SECONDS)


def _problem(folder: Path, need: Room) -> OSError | None:
    """Why as much as `need` cannot be written into the folder; None if it probably can."""
    probe = folder / f".room.{os.getpid()}"
    try:
        try:
            probe.write_bytes(bytes(PROBE_BYTES))
        finally:
            probe.unlink(missing_ok=True)
        disk = os.statvfs(folder)
    except OSError as error:
        return _disk_problem(error.errno or 0, folder)
    free = disk.f_bavail * disk.f_frsize
    if free < need.bytes:
        return OSError(errno.ENOSPC, f"{free / 1e6:,.1f} MB are free, {need.bytes / 1e6:,.1f} MB are needed")
    if disk.f_files and disk.f_favail < need.files:
        return OSError(errno.ENOSPC, f"{disk.f_favail} inodes are free, {need.files} are needed")
    return None
