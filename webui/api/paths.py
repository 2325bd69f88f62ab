"""The endpoint that completes paths: what is in the folder that was typed so far."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from backend.data.compression import data_suffix
from backend.data.reading import SUFFIXES

MAX_ENTRIES = 200_000  # of a folder that are read, which takes a second
MAX_SHOWN = 100
# A file system that does not respond keeps a thread each; the others must stay for other requests.
LOOKING = threading.BoundedSemaphore(4)

# Which files a field is completed with, besides folders.
FILES: Mapping[str, Callable[[str], bool]] = {
    "folder": lambda name: False,
    "data": lambda name: data_suffix(Path(name)) in SUFFIXES,
    "file": lambda name: True,
}


def complete(text: str, kind: Literal["folder", "data", "file"]) -> dict[str, Any]:
    """The entries of a folder whose names begin with what follows the last slash of `text`: folders first, which end
    with a slash. `more`: how many are not shown. A folder that does not exist or cannot be read has no entries.

    Relative paths are those of the server's working directory, as everywhere. Whoever is logged in may start programs
    as the user of the server, so nothing that this user can read is secret here.
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
    """The name of an entry that is suggested, '' of another one. Hidden ones are suggested after a dot."""
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
