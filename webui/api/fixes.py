"""Fixes and values as the page shows them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from backend.config import RunSpec
from backend.config.options import by_name, get, masked_value, text, with_defaults
from backend.rules import Fix

ENV = "launch.env"


def finding_fixes(fixes: Iterable[Fix], spec: RunSpec) -> list[dict[str, Any]]:
    """The fixes of a finding about `spec`, whose hidden options may have values from an earlier choice."""
    return [fix_json(replace(fix, patch=with_defaults(spec, fix.patch)), spec) for fix in fixes]


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
