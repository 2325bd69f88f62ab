"""JSON in the files of a run, with text that can be shown.

JSON can escape half of a UTF-16 pair ("\\ud800"). Python accepts such a lone surrogate, but UTF-8, terminals, fonts and
strict JSON writers do not: one in a run's name would hide the whole list of runs.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, TypeGuard

from backend.runs import files

SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read(path: Path, errors: str = "strict") -> Any:
    """The value in a regular file. Raises OSError, ValueError."""
    return parse(files.read_text(path, errors))


def read_object(path: Path) -> dict[str, Any]:
    """The object in a regular file; empty if it cannot be read, or is another value."""
    try:
        found = read(path)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def parse(text: str) -> Any:
    """The value of a JSON text. Raises ValueError."""
    return replace_surrogates(json.loads(text), text)


def is_number(value: Any) -> TypeGuard[float]:
    """Whether `value` is a finite number: JSON written by Python may have NaN and Infinity."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def replace_surrogates(value: Any, text: str) -> Any:
    """The `value` of the JSON `text` with U+FFFD for lone surrogates."""
    return as_unicode(value) if SURROGATE.search(text) else value


def as_unicode(value: Any) -> Any:
    """A value with U+FFFD for lone surrogates in its strings and keys."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {as_unicode(name): as_unicode(part) for name, part in value.items()}
    return [as_unicode(part) for part in value] if isinstance(value, list | tuple) else value
