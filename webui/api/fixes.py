"""Fixes and values as the page shows them."""

from __future__ import annotations

from typing import Any

from backend.config import RunSpec
from backend.config.options import by_name, get, masked_value, text
from backend.rules import Fix

ENV = "launch.env"


def fix_json(fix: Fix, spec: RunSpec) -> dict[str, Any]:
    """A fix with its patch in form values, limited to what it changes in `spec`."""
    known = by_name()
    changed = {name: value for name, value in fix.patch.items() if get(spec, name) != value}
    diff = [
        {
            "name": name,
            "label": known[name].label,
            "from": _display(name, get(spec, name)),
            "to": _display(name, value),
        }
        for name, value in changed.items()
    ]
    patch = {name: text(known[name], value) for name, value in changed.items()}
    return {"label": fix.label, "safe": fix.safe, "cost": fix.cost, "peak": fix.peak, "patch": patch, "diff": diff}


def _display(name: str, value: Any) -> Any:
    """A value as the page shows it: a choice by its label, a list as text."""
    option = by_name()[name]
    value = masked_value(value)
    return dict(option.choices).get(value, value) if option.choices else text(option, value)
