"""Stop requests: withdraws the one of an earlier start, but never one that nobody has read.

The request is one file, which page, command line, cluster and trainer replace at any time, so it is checked only after
it was moved aside.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from backend.runs import STOP

Version = tuple[int, int, int]


def version(folder: Path) -> Version | None:
    """Which request is in the run's folder; None without one."""
    return _version(folder / STOP)


def _version(path: Path) -> Version | None:
    try:
        file = path.lstat()
    except OSError:
        return None
    return file.st_ino, file.st_size, file.st_mtime_ns


def withdraw(folder: Path, earlier: Version | None) -> None:
    """Delete the request if it still is the `earlier` one."""
    aside = folder / f".{STOP}.{os.getpid()}"
    if earlier is None:
        return
    try:
        (folder / STOP).rename(aside)
    except FileNotFoundError:
        return
    if _version(aside) != earlier:
        with contextlib.suppress(FileExistsError):  # a still newer request exists, which stays
            (folder / STOP).hardlink_to(aside)
    aside.unlink()
