"""A small disk that tests can fill: a tmpfs, which only root may mount; elsewhere these tests are skipped."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import privileges


@contextmanager
def mounted(place: Path, options: str = "size=64m") -> Iterator[Path]:
    """A tmpfs at `place`."""
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], check=False).returncode:
        privileges.refuse("mounting a tmpfs is not permitted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


@contextmanager
def movable(place: Path) -> Iterator[Path]:
    """A tmpfs in the folder `place`, at `place / "first"`, which `mount --move` can move below `place`: not out of a
    mount that the system shares with others, so `place` is a private mount of its own."""
    if subprocess.run(["mount", "--bind", place, place], check=False).returncode:
        privileges.refuse("mounting is not permitted here")
    try:
        subprocess.run(["mount", "--make-private", place], check=True)
        (place / "first").mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m,mode=755", "tmpfs", place / "first"], check=True)
        yield place / "first"
    finally:
        subprocess.run(["umount", "--lazy", "--recursive", place], check=True)


def use_inodes(disk: Path, leave: int = 0) -> Path:
    """Create files until only `leave` more can be created; their folder."""
    folder = disk / "many-files"
    folder.mkdir()
    count = 0
    for _ in range(3):  # a file that a process of the run replaces needs another inode for a moment
        with suppress(OSError):
            while True:
                (folder / str(count)).touch()
                count += 1
        time.sleep(0.1)
    for number in range(leave):
        (folder / str(number)).unlink()
    return folder


def fill(disk: Path, leave: int = 0) -> Path:
    """Fill the disk but for `leave` bytes."""
    path = disk / "filler"
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(2**16)) == 2**16:
            pass
    with path.open("r+b") as file:
        file.truncate(max(0, file.seek(0, 2) - leave))
    return path
