"""What a user notes about a run: another name, tags, notes, star, archive.

They are one small file in the run's folder, written by page and command line under a lock.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from backend.runs import ANNOTATIONS, json_values, replace_text

TAG = re.compile(r"[\w+./][\w+./-]*")  # no spaces, quotes or colons, so that `tag:NAME` finds it
MAX_TAG, MAX_TAGS, MAX_NOTES, MAX_NAME = 40, 20, 4000, 80


class AnnotationError(Exception):
    """A tag or note that is not accepted; the message is for users."""


@dataclass(frozen=True)
class Annotations:
    """Tags are sorted. An archived run is hidden in lists unless a search has `archived:yes`. `name` replaces the name
    that the run was started with; the folder keeps its own."""

    tags: tuple[str, ...] = ()
    notes: str = ""
    starred: bool = False
    archived: bool = False
    name: str = ""

    def as_json(self) -> dict[str, Any]:
        """The annotations in the form of annotations.json and of the list of runs; the name only if there is one."""
        found = {**asdict(self), "tags": list(self.tags)}
        return found if self.name else {key: value for key, value in found.items() if key != "name"}


def read(folder: Path) -> Annotations:
    """The annotations of a run; none if the file is missing or damaged, since no run must be lost because of them."""
    try:
        found = json_values.read(folder / ANNOTATIONS)
        tags = tuple(sorted({tag for tag in found.get("tags", ()) if isinstance(tag, str) and _is_tag(tag)}))
        notes, starred, archived = (found.get(key) for key in ("notes", "starred", "archived"))
        name = found.get("name") if _is_name(found.get("name")) else ""
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return Annotations()
    notes = notes if isinstance(notes, str) else ""
    return Annotations(tags[:MAX_TAGS], notes, starred is True, archived is True, name)


def change(
    folder: Path, add_tags: Iterable[str] = (), remove_tags: Iterable[str] = (), *,
    notes: str | None = None, starred: bool | None = None, archived: bool | None = None, name: str | None = None,
) -> Annotations:  # fmt: skip
    """Change what is given and return the result; the name '' is the one that the run was started with. Raises
    AnnotationError, OSError."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two changes at once must not lose one
        old = read(folder)
        tags = tuple(sorted({*old.tags, *map(checked_tag, add_tags)} - set(remove_tags)))
        if len(tags) > MAX_TAGS:
            raise AnnotationError(f"A run has at most {MAX_TAGS} tags.")
        if notes is not None and len(notes) > MAX_NOTES:
            raise AnnotationError(f"Notes have at most {MAX_NOTES:,} characters.")
        if name and not _is_name(name):
            raise AnnotationError(f"The name of a run is one line of at most {MAX_NAME} characters.")
        new = Annotations(
            tags,
            old.notes if notes is None else notes,
            old.starred if starred is None else starred,
            old.archived if archived is None else archived,
            old.name if name is None else name,
        )
        if new != old:
            replace_text(folder / ANNOTATIONS, json.dumps(new.as_json()), mode=0o600)
        return new
    finally:
        os.close(lock)


def checked_tag(tag: str) -> str:
    """`tag`, if it is one. Raises AnnotationError."""
    if not _is_tag(tag):
        allowed = f"at most {MAX_TAG} letters, digits and _ + . / -, and does not start with -"
        raise AnnotationError(f"{tag[:MAX_TAG]!r} is not a tag: a tag has {allowed}.")
    return tag


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and 0 < len(name) <= MAX_NAME and name.isprintable() and name == name.strip()


def _is_tag(tag: str) -> bool:
    return len(tag) <= MAX_TAG and TAG.fullmatch(tag) is not None
