"""The lock that marks a run as alive, and the processes of a run: finding and terminating them.

A process is identified by its pid AND its start time, because pids are reused. torchrun starts every rank in its own
session, so a process group does not contain all of a run. The run marker in the environment does, also after the run's
folder was renamed, and the process tree below the supervisor covers programs that overwrite their environment
(setproctitle).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from backend.runs import LOCK, RUN_MARKER, files, lock_file

PROC = Path("/proc")
PR_SET_PDEATHSIG = 1  # see prctl(2)
POLL_SECONDS = 0.05
SIGKILL_SECONDS = 8.0  # how long killed processes may take to end


@dataclass(frozen=True)
class Process:
    """A process; `started` is in clock ticks since boot."""

    pid: int
    started: int


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Linux sends this process the signal when its parent ends, however that ends."""
    with contextlib.suppress(AttributeError):  # macOS has no prctl
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def acquire_lock(folder: Path, seconds: float = 1.0) -> int | None:
    """The file descriptor of the lock, or None if another process holds it for `seconds`. Raises OSError."""
    lock = files.open_regular(folder / LOCK, os.O_RDWR | os.O_CREAT)
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(lock)
                return None
        time.sleep(POLL_SECONDS / 2)


def release(lock: int) -> None:
    """Let go of a lock. Closing the file alone would keep the lock while another process has the descriptor too, such
    as the one that forked this process and has not ended yet."""
    fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


def is_locked(folder: Path) -> bool:
    """Whether the run is alive. Takes a shared lock for an instant, so that two readers do not block each other."""
    try:
        lock = files.open_regular(folder / LOCK)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def run_processes(folder: Path, tree: int = 0, spare: int = 0) -> set[Process]:
    """Living processes with the run marker, or below the process `tree`, except the calling process and `spare`."""
    places = (str(folder.resolve()), lock_file.read(folder).place)
    marker, earlier = (f"{RUN_MARKER}={place}".encode() for place in places)
    table, found = {}, set()
    for entry in PROC.iterdir() if PROC.is_dir() else ():
        if not entry.name.isdigit() or (status := _status(int(entry.name))) is None:
            continue
        pid = int(entry.name)
        table[pid] = status
        with contextlib.suppress(OSError):  # the process belongs to another user, or has ended
            variables = (entry / "environ").read_bytes().split(b"\0")
            if marker in variables or (earlier in variables and works_in(pid, folder)):
                found.add(pid)
    if tree:
        found |= {pid for pid in table if _descends(pid, tree, table)}
    return {Process(pid, table[pid][1]) for pid in found - {os.getpid(), spare}}


def terminate(folder: Path, tree: int = 0, sigterm_seconds: float = 2.0, spare: int = 0) -> tuple[int, ...]:
    """End every process of the run but `spare`: SIGTERM, then SIGKILL. Returns the pids that are still alive."""
    left: set[Process] = set()
    for number, seconds in ((signal.SIGTERM, sigterm_seconds), (signal.SIGKILL, SIGKILL_SECONDS)):
        deadline, signaled = time.monotonic() + seconds, set[Process]()
        while left := run_processes(folder, tree, spare):
            for process in left - signaled:
                send(process, number)
            signaled |= left
            if time.monotonic() >= deadline:
                break
            time.sleep(POLL_SECONDS)
    return tuple(sorted(process.pid for process in left))


def started(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 if it does not exist."""
    status = _status(pid)
    return status[1] if status else 0


def condition(pid: int) -> str:
    """The state letter of proc_pid_stat(5), such as T for stopped by a signal; '' if there is no such process."""
    try:
        return (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def works_in(pid: int, folder: Path) -> bool:
    """Whether the working directory of a process is `folder`, whatever its name was when the process started."""
    try:
        return os.path.samefile(PROC / str(pid) / "cwd", folder)
    except OSError:
        return False


def send(process: Process, number: signal.Signals) -> None:
    """Signal this process, unless it has ended."""
    status = _status(process.pid)
    if status and status[1] == process.started:
        with contextlib.suppress(OSError):
            os.kill(process.pid, number)


def _status(pid: int) -> tuple[int, int] | None:
    """The parent's pid and the start time; None for a process that ended, or is a zombie."""
    try:
        # The name, in parentheses, may contain spaces and parentheses. See proc_pid_stat(5).
        fields = (PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in b"ZX" else (int(fields[1]), int(fields[19]))


def _descends(pid: int, ancestor: int, table: dict[int, tuple[int, int]]) -> bool:
    while pid in table:
        pid = table[pid][0]
        if pid == ancestor:
            return True
    return False
