"""Which run folders are safe to use: those of this user, without symbolic links in place of the files that are read.

Imports backend.runs. On Resume, the commands of plan.json run as the user who presses the button. In a runs folder that
several users can write to, a run of another user could be a trap.
"""

from __future__ import annotations

import os
import stat
import tempfile
from functools import lru_cache
from pathlib import Path

from backend.runs import CHECKPOINTS, MODEL, PLAN, RANK_LOGS

MAY_BE_LINKS = (CHECKPOINTS, MODEL, RANK_LOGS)  # moved to another disk by the user; never served or run
MAX_ENTRIES = 10_000


def problem(folder: Path) -> str:
    """Why the run in `folder` must not be used, as a sentence; '' if it may be."""
    try:
        status, plan = os.lstat(folder), os.lstat(folder / PLAN)
        if not stat.S_ISDIR(status.st_mode) or not stat.S_ISREG(plan.st_mode):
            return f"{folder.name} is a symbolic link, or its {PLAN} is not a regular file."
        own = own_uid(folder.parent)
        if status.st_uid != own or plan.st_uid != own:
            return f"The run {folder.name} belongs to another user, who decides what it would execute."
        with os.scandir(folder) as entries:
            for _, entry in zip(range(MAX_ENTRIES), entries, strict=False):
                if entry.is_symlink() and entry.name not in MAY_BE_LINKS:
                    return f"{entry.name} in the run folder {folder.name} is a symbolic link: remove it."
    except OSError as error:
        return f"The run {folder.name} cannot be read: {error.strerror}."
    return ""


@lru_cache(maxsize=64)
def own_uid(root: Path) -> int:
    """The owner of files that this process creates in `root`: some network file systems and containers map users."""
    try:
        with tempfile.TemporaryFile(dir=root) as probe:
            return os.fstat(probe.fileno()).st_uid
    except OSError:
        return os.getuid()
