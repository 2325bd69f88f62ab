"""Values as Python code, in programs that users copy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def literal(value: Any) -> str:
    """A value of JSON as a Python literal on one line, with double quotes."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{literal(key)}: {literal(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(literal, value)) + "]"
    return repr(value)


def arguments(values: Mapping[str, Any]) -> str:
    """Keyword arguments of a call."""
    return ", ".join(f"{name}={literal(value)}" for name, value in values.items())
