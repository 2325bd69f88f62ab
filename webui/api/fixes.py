"""Fixes and values as the page shows them."""

from __future__ import annotations

from typing import Any

from backend.config import RunSpec
from backend.config.options import Option, find, get, masked_value, text
from backend.config.sources import KEY
from backend.rules import Fix

ENV = "launch.env"


def fix_json(fix: Fix, spec: RunSpec) -> dict[str, Any]:
    """A fix, with its patch as form values, limited to the options that it changes in `spec`."""
    changed = {name: value for name, value in fix.patch.items() if get(spec, name) != value}
    diff = [
        {
            "name": name,
            "label": _label(name),
            "from": _display(name, get(spec, name)),
            "to": _display(name, value),
        }
        for name, value in changed.items()
    ]
    patch = {name: text(_option(name), value) for name, value in changed.items()}
    shown = {name: getattr(fix, name) for name in ("label", "safe", "effect", "cost", "peak")}
    return {**shown, "patch": patch, "diff": diff}


def _option(name: str) -> Option:
    """The option with this key, which may be an option of a dataset."""
    option = find(name)
    assert option is not None
    return option


def _label(name: str) -> str:
    """Same as `label` in form.js."""
    match = KEY.fullmatch(name)
    return f"{_option(name).label} of dataset {int(match[1]) + 1}" if match else _option(name).label


def _display(name: str, value: Any) -> Any:
    """A value as the page shows it: a choice by its label, a list as text."""
    option = _option(name)
    value = masked_value(value)
    return dict(option.choices).get(value, value) if option.choices else text(option, value)
