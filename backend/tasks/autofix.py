"""Autofix: applies safe fixes, which do not change the training result, until a spec has no errors left.

These are the fixes that the user could click one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from backend.config import RunSpec
from backend.config.options import edit
from backend.rules import Case, Finding, examine

MAX_FIXES = 40  # a bound only: each fix leads to a new spec, and few errors need more than one


@dataclass(frozen=True)
class AutofixResult:
    """The spec after the fixes, the labels of the applied fixes, and the errors that remain."""

    spec: RunSpec
    applied: tuple[str, ...]
    remaining: tuple[Finding, ...]


def autofix(spec: RunSpec, case_of: Callable[[RunSpec], Case], only_safe: bool = True) -> AutofixResult:
    """Apply fixes, `only_safe` ones or all, until no error remains, or no fix leads to a new spec. Returns the spec
    with the fewest errors, never more than `spec` has. `case_of` inspects a spec: a fix may change which files it
    names."""
    current = best = AutofixResult(spec, (), _errors(case_of(spec)))
    seen = [spec]
    while current.remaining and len(current.applied) < MAX_FIXES:
        step = _step(current, seen, case_of, only_safe)
        if step is None:
            break
        current = step
        if len(current.remaining) < len(best.remaining):
            best = current
    return best


def _step(
    current: AutofixResult, seen: list[RunSpec], case_of: Callable[[RunSpec], Case], only_safe: bool
) -> AutofixResult | None:
    """The first fix that leaves fewer errors; without one, the first that leads to a new spec."""
    first = None
    for fix in (fix for finding in current.remaining for fix in finding.fixes if fix.safe or not only_safe):
        spec = edit(current.spec, fix.for_spec(current.spec).patch)
        if spec in seen:
            continue
        seen.append(spec)
        result = AutofixResult(spec, (*current.applied, fix.label), _errors(case_of(spec)))
        if len(result.remaining) < len(current.remaining):
            return result
        first = first or result
    return first


def _errors(case: Case) -> tuple[Finding, ...]:
    return tuple(finding for finding in examine(case) if finding.level == "error")
