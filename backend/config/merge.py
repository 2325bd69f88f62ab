"""Tables within tables, as configuration files are: laid over each other, and compared.

Floor 0. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Table = Mapping[str, Any]
AUTO = "auto"  # the trainer fills it in


def parse(text: str) -> dict[str, Any]:
    """A table from JSON text; an empty text is an empty table. Raises ValueError."""
    try:
        found = json.loads(text) if text.strip() else {}
    except json.JSONDecodeError as error:
        raise ValueError(f"is no JSON: line {error.lineno}, column {error.colno}: {error.msg}") from None
    if not isinstance(found, dict):
        raise ValueError('must be a JSON object: {"key": value}')
    return found


def over(base: Table, upper: Table) -> dict[str, Any]:
    """`base` with every value of `upper` in its place."""
    found = dict(base)
    for key, value in upper.items():
        below = found.get(key)
        both = isinstance(value, Mapping) and isinstance(below, Mapping)
        found[key] = over(below, value) if both else value  # type: ignore[arg-type]
    return found


def beyond(theirs: Table, ours: Table) -> dict[str, Any]:
    """What `theirs` says and `ours` does not. Where ours is "auto" a number of theirs counts as said."""
    found: dict[str, Any] = {}
    for key, value in theirs.items():
        if isinstance(value, Mapping) and isinstance(ours.get(key), Mapping):
            if inner := beyond(value, ours[key]):
                found[key] = inner
        elif key not in ours or (ours[key] != value and ours[key] != AUTO):
            found[key] = value
    return found


def conflicts(theirs: Table, ours: Table) -> dict[str, Any]:
    """What both say, and differently; an "auto" of ours is no value."""
    found: dict[str, Any] = {}
    for key, value in theirs.items():
        mine = ours.get(key, value)
        if isinstance(value, Mapping) and isinstance(mine, Mapping):
            if inner := conflicts(value, mine):
                found[key] = inner
        elif mine not in (value, AUTO):
            found[key] = value
    return found


def paths(table: Table, before: str = "") -> list[str]:
    """Dotted paths of all leaves."""
    found = []
    for key, value in table.items():
        inner = paths(value, f"{before}{key}.") if isinstance(value, Mapping) and value else [f"{before}{key}"]
        found += inner
    return found
