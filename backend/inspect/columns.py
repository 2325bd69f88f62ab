"""The columns of the data files, with what they are used for and the first values, and the options that change their
uses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backend import registry
from backend.config import RunSpec
from backend.data import DataFileError, Example, expand, printable, read_examples
from backend.data.columns import patch, read_by_name, uses, uses_of_columns
from backend.data.compression import data_suffix, is_compressed

MAX_COLUMNS = 100
MAX_SHOWN = 200  # characters of a value
ROWS = 3
MAX_JSON = 64 * 2**20  # bytes of a .json file, which is parsed as a whole


def describe_columns(spec: RunSpec, base: Path) -> dict[str, Any]:
    """ "columns", each with "name", "use" ('' for none), "fixed" (it is used for what its name says), "required" (no
    example is complete without it) and "values" (texts of the first ROWS rows of the first file); "more", the number of
    columns after the first MAX_COLUMNS; "uses": use -> label. No columns if the data files cannot be read."""
    formats = _formats(spec)
    rows = _first_rows(spec, base)
    first = rows[0] if rows else {}
    used = uses_of_columns(first, spec.data, formats)
    fixed = read_by_name(first, spec.data, formats)
    columns = [
        {
            "name": printable(name[:MAX_SHOWN]),
            "use": used.get(name, ""),
            "fixed": name in fixed and name not in used,
            "required": used.get(name, "system") != "system",
            "values": [_text(row.get(name)) for row in rows],
        }
        for name in list(first)[:MAX_COLUMNS]
    ]
    return {"columns": columns, "more": max(0, len(first) - MAX_COLUMNS), "uses": uses_of(spec)}


def use_column(spec: RunSpec, base: Path, column: str, use: str) -> Mapping[str, Any]:
    """The options with which `column` is used for `use`, a key of "uses", '' for nothing; {} without such a column."""
    first = next(iter(_first_rows(spec, base)), {})
    if not column or column not in first or use not in ("", *uses_of(spec)):
        return {}
    return patch(first, spec.data, _formats(spec), column, use)


def uses_of(spec: RunSpec) -> dict[str, str]:
    """The uses that columns can have in the training stage: use -> its label."""
    return uses(_formats(spec))


def _formats(spec: RunSpec) -> tuple[str, ...]:
    return registry.STAGES[spec.train.stage].formats


def _first_rows(spec: RunSpec, base: Path) -> list[Example]:
    if spec.data.source != "files":
        return []
    try:
        path = expand(spec.data.files, base)[0]
        if data_suffix(path) == ".json" and (is_compressed(path) or path.stat().st_size > MAX_JSON):
            return []
        return [row for _, row in read_examples(path, limit=ROWS, in_server=True)]
    except (DataFileError, OSError, IndexError):
        return []


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return printable(text[:MAX_SHOWN])
