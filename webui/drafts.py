"""Unsaved edits, one file a draft, so that they survive reload, a second tab and the server's restart.

Floor 6. Imports: backend.runs. Values are kept as the form sent them, also those that are no RunSpec yet.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from backend.runs import replace_text

ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
MOST = 200
MOST_BYTES = 256 * 1024


class DraftError(ValueError):
    """A draft that cannot be kept, with the reason as a sentence."""


class Drafts:
    """The drafts in a folder, which is made when the first one is saved; the oldest make room."""

    def __init__(self, folder: Path, most: int = MOST) -> None:
        self.folder = folder
        self.most = most
        self._lock = threading.Lock()  # requests come in several threads

    def save(self, name: str, values: Mapping[str, Any]) -> None:
        """Keep `values` under `name`. Raises DraftError for a name or a size that is none, OSError from the disk."""
        path = self._path(name)
        text = orjson.dumps(values).decode()
        if len(text) > MOST_BYTES:
            raise DraftError(f"The form holds more than {MOST_BYTES // 1024} kB: put long texts into files.")
        with self._lock:
            new = not path.exists()
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_text(path, text)
            if new:
                self._make_room()

    def load(self, name: str) -> dict[str, Any] | None:
        """The values under `name`, or None. Raises DraftError for a name that is none."""
        with suppress(OSError, orjson.JSONDecodeError):
            values = orjson.loads(self._path(name).read_bytes())
            if isinstance(values, dict):
                return values
        return None

    def _path(self, name: str) -> Path:
        if not ID.fullmatch(name):
            raise DraftError("A draft's id is up to 64 letters, digits, - and _.")
        return self.folder / f"{name}.json"

    def _make_room(self) -> None:
        found = sorted(self.folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        for path in found[: max(0, len(found) - self.most)]:
            path.unlink(missing_ok=True)
