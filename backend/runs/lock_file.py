"""The text of a run's lock file: who holds it, the id of the start, and where the run was then.

A supervisor writes three lines, run.sh also the versions of the files before it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from backend.runs import LOCK, files

VERSION = re.compile(r"(\d+) (\d+)\.(\d{9}) (.+)")  # size, modification time, name, as `stat` of run.sh prints them


@dataclass(frozen=True)
class LockFile:
    """`starter`: SUPERVISOR or SHELL, '' for a run that was never started, or without its lock file; `start`: the id of
    the last start; `place`: the folder of the run at its start, which marks its processes; `files_before`: name -> size
    and modification time of the files that were there before, None if they were not recorded."""

    starter: str = ""
    start: str = ""
    place: str = ""
    files_before: dict[str, list[int]] | None = None


def read(folder: Path) -> LockFile:
    """The lock file of the run in `folder`; its values are empty if it cannot be read."""
    try:
        return parse(files.read_text(folder / LOCK, errors="replace"))
    except OSError:
        return LockFile()


def parse(text: str) -> LockFile:
    """The values in the text of a lock file."""
    lines = text.splitlines()
    starter, start, place = (*lines[:3], "", "", "")[:3]
    found = [match for line in lines[4:] if (match := VERSION.fullmatch(line))]
    before = {match[4]: [int(match[1]), int(match[2] + match[3])] for match in found} if len(lines) > 3 else None
    return LockFile(starter.strip(), start, place, before)
