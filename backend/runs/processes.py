"""Which processes belong to a run: the lock that says it is alive, and the sweep that leaves none behind.

Floor 0. Standard library only; imports backend.runs. A process is known by its pid AND its start time, for pids are
used again. torchrun starts every rank in a session of its own, so a process group does not hold a run together; the
environment cookie does, and so does the family tree below the supervisor (a program that rewrites its own
environment, as setproctitle does, loses the cookie).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from backend.runs import LOCK, RUN_MARKER

PROC = Path("/proc")
TICK = 0.05  # seconds between looks


@dataclass(frozen=True)
class Process:
    """`started` is in clock ticks since the machine's start."""

    pid: int
    started: int


def take(folder: Path, seconds: float = 1.0) -> int | None:
    """The lock's descriptor, or None if another holds it. Waits out a reader that is probing. Raises OSError."""
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    until = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() >= until:
                os.close(lock)
                return None
        time.sleep(TICK / 2)


def held(folder: Path) -> bool:
    """Whether the run is alive. A shared lock for an instant: two who probe at once do not see each other."""
    try:
        lock = os.open(folder / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def carriers(folder: Path, tree: int = 0) -> set[Process]:
    """Living processes with the run's cookie, or below the process `tree`; never the one that asks."""
    wanted = f"{RUN_MARKER}={folder}".encode()
    table, found = {}, set()
    for entry in PROC.iterdir() if PROC.is_dir() else ():
        if not entry.name.isdigit() or (status := _status(int(entry.name))) is None:
            continue
        pid = int(entry.name)
        table[pid] = status
        with contextlib.suppress(OSError):  # another user's, or gone
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.add(pid)
    if tree:
        found |= {pid for pid in table if _descends(pid, tree, table)}
    return {Process(pid, table[pid][1]) for pid in found - {os.getpid()}}


def sweep(folder: Path, tree: int = 0, gentle: float = 2.0, hard: float = 8.0) -> tuple[int, ...]:
    """End every process of the run: SIGTERM, and after `gentle` seconds SIGKILL. Returns pids that would not die."""
    left: set[Process] = set()
    for number, seconds in ((signal.SIGTERM, gentle), (signal.SIGKILL, hard)):
        until, told = time.monotonic() + seconds, set[Process]()
        while left := carriers(folder, tree):
            for process in left - told:
                _signal(process, number)
            told |= left
            if time.monotonic() >= until:
                break
            time.sleep(TICK)
    return tuple(sorted(process.pid for process in left))


def _signal(process: Process, number: signal.Signals) -> None:
    status = _status(process.pid)
    if status and status[1] == process.started:
        with contextlib.suppress(OSError):
            os.kill(process.pid, number)


def _status(pid: int) -> tuple[int, int] | None:
    """Parent's pid and start time; None for a process that is gone, or dead and not yet collected."""
    try:
        # The name, in parentheses, may hold spaces and parentheses itself. See proc_pid_stat(5).
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
