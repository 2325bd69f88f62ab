"""What a glob pattern matches, by reading a bounded number of folder entries.

Python's glob reads for minutes if a pattern such as /usr/** is typed into a field.
"""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import os
from collections.abc import Iterator, Sequence

MAX_ENTRIES = 100_000


class TooManyEntries(ValueError):
    """The pattern matches among more than MAX_ENTRIES folder entries. The message completes "PATTERN: "."""


def matches(pattern: str) -> list[str]:
    """Same as glob.glob(pattern, recursive=True), but `**` does not enter linked folders, and a part that is the name
    of an existing file or folder, such as [old], stands for it. Raises TooManyEntries."""
    root = "/" if pattern.startswith("/") else "."
    parts = [part for part in pattern.split("/") if part not in ("", ".")]
    return [path.removeprefix("./") for path in _Search().match(root, parts)] if parts else []


def is_pattern(path: str) -> bool:
    """Whether a path that does not exist is a pattern: its existing folders may have any names."""
    name, rest = os.path.dirname(path), os.path.basename(path)
    while name not in ("", "/") and not os.path.lexists(name):
        name, rest = os.path.dirname(name), os.path.join(os.path.basename(name), rest)
    return glob.has_magic(rest)


class _Search:
    """One search, which counts the entries that it reads."""

    def __init__(self) -> None:
        self._count = 0

    def match(self, folder: str, parts: Sequence[str]) -> Iterator[str]:
        """The paths in `folder` that match the rest of the pattern."""
        first, rest = parts[0], parts[1:]
        exists = os.path.lexists(path := os.path.join(folder, first))
        if first == "**":
            yield from self._recursive(folder, parts)
        elif glob.has_magic(first) and not exists:
            for entry in self._entries(folder, hidden=first.startswith(".")):
                if fnmatch.fnmatch(entry.name, first):
                    yield from self._rest(entry.path, rest)
        elif exists:
            yield from self._rest(path, rest)

    def _rest(self, path: str, rest: Sequence[str]) -> Iterator[str]:
        if not rest:
            yield path
        elif os.path.isdir(path):
            yield from self.match(path, rest)

    def _recursive(self, folder: str, parts: Sequence[str]) -> Iterator[str]:
        if parts[1:]:
            yield from self.match(folder, parts[1:])
        for entry in self._entries(folder):
            if not parts[1:]:
                yield entry.path
            if entry.is_dir(follow_symlinks=False):
                yield from self._recursive(entry.path, parts)

    def _entries(self, folder: str, hidden: bool = False) -> Iterator[os.DirEntry[str]]:
        with contextlib.suppress(PermissionError, FileNotFoundError, NotADirectoryError), os.scandir(folder) as found:
            for entry in found:
                self._count += 1
                if self._count > MAX_ENTRIES:
                    raise TooManyEntries(
                        f"would search more than {MAX_ENTRIES:,} files; name a folder closer to the data"
                    )
                if hidden or not entry.name.startswith("."):
                    yield entry
