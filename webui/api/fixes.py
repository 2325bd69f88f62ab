"""Fixes and values as the page shows them."""

from __future__ import annotations

from typing import Any

from backend.config import RunSpec
from backend.config.options import Option, by_name, edit, find, get, masked_value, text
from backend.config.sources import KEY, SOURCES
from backend.rules import Fix

ENV = "launch.env"


def fix_json(fix: Fix, spec: RunSpec) -> dict[str, Any]:
    """A fix with its patch in form values, limited to what it changes in `spec`."""
    known = by_name()
    changed = {name: value for name, value in fix.patch.items() if get(spec, name) != value}
    of_datasets = SOURCES in changed or any(KEY.fullmatch(name) for name in changed)
    diff = [
        {
            "name": name,
            "label": _option(name).label,
            "from": _display(name, get(spec, name)),
            "to": _display(name, value),
        }
        for name, value in changed.items()
    ]
    patch = {name: text(known[name], value) for name, value in changed.items() if name in known}
    if of_datasets:  # the form has one value for all of them
        patch[SOURCES] = text(known[SOURCES], get(edit(spec, fix.patch), SOURCES))
    return {"label": fix.label, "safe": fix.safe, "cost": fix.cost, "peak": fix.peak, "patch": patch, "diff": diff}


def _option(name: str) -> Option:
    """The option with this key, which may be that of a dataset."""
    option = find(name)
    assert option is not None
    return option


def _display(name: str, value: Any) -> Any:
    """A value as the page shows it: a choice by its label, a list as text."""
    option = _option(name)
    value = masked_value(value)
    return dict(option.choices).get(value, value) if option.choices else text(option, value)
