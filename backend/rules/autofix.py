"""From a spec that cannot run to one that can, by safe fixes alone: what is learned stays the same.

Floor 4. Imports: options, rules. The same fixes that a person clicks, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from backend.config import RunSpec
from backend.config.options import edit
from backend.rules import Case, Finding, examine

MOST = 40  # fixes; every one leads to a spec that was not there before, and few kinds of them are left by then


@dataclass(frozen=True)
class AutofixResult:
    """Where safe fixes led: the spec, the labels of those that were applied, and the errors that are left."""

    spec: RunSpec
    applied: tuple[str, ...]
    left: tuple[Finding, ...]


def autofix(spec: RunSpec, case_of: Callable[[RunSpec], Case]) -> AutofixResult:
    """Apply safe fixes until no error is left, or none leads to a spec with fewer errors. `case_of` looks at a spec:
    files may be others after a fix. Never revisits a spec, so it ends; never ends with more errors than it began."""
    now = best = AutofixResult(spec, (), _errors(case_of(spec)))
    seen = [spec]
    while now.left and len(now.applied) < MOST:
        step = _step(now, seen, case_of)
        if step is None:
            break
        now = step
        if len(now.left) < len(best.left):
            best = now
    return best


def _step(now: AutofixResult, seen: list[RunSpec], case_of: Callable[[RunSpec], Case]) -> AutofixResult | None:
    """The first fix of the first error that leaves fewer errors; without one the first that leads anywhere new."""
    first = None
    for fix in (fix for finding in now.left for fix in finding.fixes if fix.safe):
        spec = edit(now.spec, fix.patch)
        if spec in seen:
            continue
        seen.append(spec)
        found = AutofixResult(spec, (*now.applied, fix.label), _errors(case_of(spec)))
        if len(found.left) < len(now.left):
            return found
        first = first or found
    return first


def _errors(case: Case) -> tuple[Finding, ...]:
    return tuple(finding for finding in examine(case) if finding.level == "error")
