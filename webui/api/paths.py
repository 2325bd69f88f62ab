"""The endpoint that completes paths with the entries of the folder that was typed so far."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from backend.data.compression import data_suffix
from backend.data.reading import SUFFIXES

MAX_ENTRIES = 200_000  # entries of a folder that are read; takes a second
MAX_SHOWN = 100
# If a file system does not respond, each request for it blocks a thread; the others must stay free.
LOOKING = threading.BoundedSemaphore(4)

# The files that are suggested for a field, besides folders.
FILES: Mapping[str, Callable[[str], bool]] = {
    "folder": lambda name: False,
    "data": lambda name: data_suffix(Path(name)) in SUFFIXES,
    "file": lambda name: True,
}


def complete(text: str, kind: Literal["folder", "data", "file"]) -> dict[str, Any]:
    """The entries of a folder whose names begin with what follows the last slash of `text`: folders first, which end
    with a slash. `more`: how many entries are not shown. A folder that does not exist or cannot be read has no entries.

    Paths are relative to the server's working directory, as everywhere. Anyone who is logged in may start programs as
    the user of the server, so nothing that this user can read is secret here.
    """
    typed, _, beginning = text.rpartition("/")
    folder = os.path.expanduser(f"{typed}/" if "/" in text else "./")
    if not LOOKING.acquire(blocking=False):
        return {"entries": [], "more": 0}
    try:
        with os.scandir(folder) as entries:
            found = [each for entry in islice(entries, MAX_ENTRIES) if (each := _name(entry, beginning, kind))]
    except (OSError, ValueError):  # ValueError: a null character
        return {"entries": [], "more": 0}
    finally:
        LOOKING.release()
    found.sort(key=lambda name: (not name.endswith("/"), name.casefold()))
    start = f"{typed}/" if "/" in text else ""
    return {"entries": [start + name for name in found[:MAX_SHOWN]], "more": max(0, len(found) - MAX_SHOWN)}


def _name(entry: os.DirEntry[str], beginning: str, kind: str) -> str:
    """The suggestion for an entry, '' for none. Hidden entries are suggested only after a dot."""
    name = entry.name
    if not name.casefold().startswith(beginning.casefold()) or (name[0] == "." and not beginning):
        return ""
    try:
        is_folder = entry.is_dir()
    except OSError:
        return ""
    if "\n" in name or not name.isprintable():
        return ""  # a field has one path per line
    return f"{name}/" if is_folder else name if FILES[kind](name) else ""
