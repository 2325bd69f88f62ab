"""Unsaved form values, one file per draft, so that they survive a reload, a second tab and a restart of the server.

Values are stored as the form sent them, also if they do not form a valid RunSpec yet. Next to each draft are its
earlier versions of the last hour, at most one per minute, so that a user can go back to them.
"""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from backend.runs import replace_text

ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
MAX_DRAFTS = 200
MAX_BYTES = 256 * 1024
VERSION_SECONDS = 60  # between two versions of a draft
VERSIONS_FOR_SECONDS = 3600
MAX_VERSIONS = 30  # offered at most, from all drafts


class DraftError(ValueError):
    """A draft that cannot be stored, with the reason as a sentence."""


class Drafts:
    """The drafts in a folder, which is created with the first one. Beyond the maximum, the oldest are deleted."""

    def __init__(self, folder: Path, max_drafts: int = MAX_DRAFTS) -> None:
        self.folder = folder
        self.max_drafts = max_drafts
        self._lock = threading.Lock()  # requests run in several threads
        self._last_edits: dict[str, tuple[str, int]] = {}

    def save(self, name: str, values: Mapping[str, Any], page: str = "", edit: int = 0) -> None:
        """Store `values` under `name`. `edit` counts the edits of one load of the page: requests can arrive in a
        different order than they were sent, and the last edit is kept. Raises DraftError for an invalid name or size,
        OSError from the disk."""
        path = self._path(name)
        text = orjson.dumps(values).decode()
        if len(text) > MAX_BYTES:
            raise DraftError(
                f"The form contains more than {MAX_BYTES // 1024} KiB of text: move long texts into files."
            )
        with self._lock:
            last_page, last_edit = self._last_edits.get(name, ("", 0))
            if page and page == last_page and edit < last_edit:
                return
            new = not path.exists()
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not new:
                self._keep_version(path, text)
            replace_text(path, text, mode=0o600)
            self._last_edits[name] = (page, edit)
            if new:
                self._delete_oldest()

    def load(self, name: str) -> dict[str, Any] | None:
        """The values stored under `name`, or None. Raises DraftError for an invalid name."""
        with suppress(OSError):
            return _parse(self._path(name).read_bytes())
        return None

    def versions(self) -> list[tuple[float, dict[str, Any]]]:
        """(Unix time of its last edit, values) of the drafts of the last hour and their earlier versions, the newest
        first. Equal values are listed once."""
        found: dict[bytes, float] = {}
        for path in self.folder.glob("*.json"):
            with suppress(OSError):
                edited, text = path.stat().st_mtime, path.read_bytes()
                if edited >= time.time() - VERSIONS_FOR_SECONDS:
                    found[text] = max(edited, found.get(text, 0.0))
        newest = sorted(((edited, text) for text, edited in found.items()), reverse=True)[:MAX_VERSIONS]
        parsed = [(edited, _parse(text)) for edited, text in newest]
        return [(edited, values) for edited, values in parsed if values is not None]

    def _keep_version(self, path: Path, text: str) -> None:
        """Keep the draft's values before `text` replaces them, unless a version of the last minute is kept already."""
        versions = sorted(self.folder.glob(f"{path.stem}.*.json"))
        edited = path.stat().st_mtime_ns
        newest = int(versions[-1].name.split(".")[1]) if versions else 0
        if time.time_ns() - newest < VERSION_SECONDS * 10**9 or path.read_text(encoding="utf-8") == text:
            return
        shutil.copy2(path, path.with_suffix(f".{edited}.json"))  # keeps the time of the last edit
        oldest = time.time() - VERSIONS_FOR_SECONDS
        kept = sorted(self.folder.glob("*.*.json"), key=lambda version: version.stat().st_mtime_ns)
        for position, version in enumerate(reversed(kept)):
            if position >= self.max_drafts or version.stat().st_mtime < oldest:
                version.unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        if not ID.fullmatch(name):
            raise DraftError("A draft's ID is 1 to 64 letters, digits, - and _.")
        return self.folder / f"{name}.json"

    def _delete_oldest(self) -> None:
        drafts = [path for path in self.folder.glob("*.json") if ID.fullmatch(path.stem)]
        drafts.sort(key=lambda path: path.stat().st_mtime_ns)
        for path in drafts[: max(0, len(drafts) - self.max_drafts)]:
            path.unlink(missing_ok=True)


def _parse(text: bytes) -> dict[str, Any] | None:
    with suppress(orjson.JSONDecodeError):
        values = orjson.loads(text)
        return values if isinstance(values, dict) else None
    return None
