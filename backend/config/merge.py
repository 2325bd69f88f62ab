"""Merging and comparing nested tables, such as configuration files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backend.config.json_text import JsonError, load_json

Table = Mapping[str, Any]
MAX_DEPTH = 32  # every function that reads a table calls itself for each level
AUTO = "auto"  # the Trainer fills in the value


def parse(text: str) -> dict[str, Any]:
    """A table from JSON text; an empty text gives an empty table. Raises ValueError."""
    try:
        found = load_json(text) if text.strip() else {}
    except JsonError as error:
        raise ValueError(f"is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError('must be a JSON object: {"key": value}')
    if _is_deeper(found, MAX_DEPTH):
        raise ValueError(f"is nested in more than {MAX_DEPTH} levels")
    return found


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects are nested in more levels than this."""
    if not isinstance(value, dict | list):
        return False
    parts = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(part, levels - 1) for part in parts)


def override(base: Table, extra: Table) -> dict[str, Any]:
    """`base` with the values of `extra`, which replace values of the same dotted key."""
    found = dict(base)
    for key, value in extra.items():
        below = found.get(key)
        both = isinstance(value, Mapping) and isinstance(below, Mapping)
        found[key] = override(below, value) if both else value  # type: ignore[arg-type]
    return found


def additions(theirs: Table, ours: Table) -> dict[str, Any]:
    """The values of `theirs` that are missing or different in `ours`. Where `ours` has "auto", any value counts as the
    same."""
    found: dict[str, Any] = {}
    for key, value in theirs.items():
        if isinstance(value, Mapping) and isinstance(ours.get(key), Mapping):
            if inner := additions(value, ours[key]):
                found[key] = inner
        elif key not in ours or (ours[key] != value and ours[key] != AUTO):
            found[key] = value
    return found


def conflicts(theirs: Table, ours: Table) -> dict[str, Any]:
    """The values of `theirs` that are different in `ours`; "auto" in `ours` is not a value."""
    found: dict[str, Any] = {}
    for key, value in theirs.items():
        mine = ours.get(key, value)
        if isinstance(value, Mapping) and isinstance(mine, Mapping):
            if inner := conflicts(value, mine):
                found[key] = inner
        elif mine not in (value, AUTO):
            found[key] = value
    return found


def paths(table: Table, prefix: str = "") -> list[str]:
    """Dotted paths of all leaves."""
    found = []
    for key, value in table.items():
        inner = paths(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else [f"{prefix}{key}"]
        found += inner
    return found
