"""Unsaved form values, one file per draft, so that they survive a reload, a second tab and a restart of the server.

Imports: runs. Values are stored as the form sent them, also if they do not form a valid RunSpec yet.
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
MAX_DRAFTS = 200
MAX_BYTES = 256 * 1024


class DraftError(ValueError):
    """A draft that cannot be stored, with the reason as a sentence."""


class Drafts:
    """The drafts in a folder, which is created with the first one. Beyond the maximum, the oldest are deleted."""

    def __init__(self, folder: Path, max_drafts: int = MAX_DRAFTS) -> None:
        self.folder = folder
        self.max_drafts = max_drafts
        self._lock = threading.Lock()  # requests run in several threads

    def save(self, name: str, values: Mapping[str, Any]) -> None:
        """Store `values` under `name`. Raises DraftError for an invalid name or size, OSError from the disk."""
        path = self._path(name)
        text = orjson.dumps(values).decode()
        if len(text) > MAX_BYTES:
            raise DraftError(
                f"The form contains more than {MAX_BYTES // 1024} KiB of text: move long texts into files."
            )
        with self._lock:
            new = not path.exists()
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_text(path, text, mode=0o600)
            if new:
                self._delete_oldest()

    def load(self, name: str) -> dict[str, Any] | None:
        """The values stored under `name`, or None. Raises DraftError for an invalid name."""
        with suppress(OSError, orjson.JSONDecodeError):
            values = orjson.loads(self._path(name).read_bytes())
            if isinstance(values, dict):
                return values
        return None

    def _path(self, name: str) -> Path:
        if not ID.fullmatch(name):
            raise DraftError("A draft's ID is 1 to 64 letters, digits, - and _.")
        return self.folder / f"{name}.json"

    def _delete_oldest(self) -> None:
        drafts = sorted(self.folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        for path in drafts[: max(0, len(drafts) - self.max_drafts)]:
            path.unlink(missing_ok=True)
