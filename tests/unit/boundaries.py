"""Boundaries of rules: the last value that passes and the first that fails, and what the fixes of the failing case
set."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from specs import rule_finding

from backend.inspect import InputFacts
from backend.machine import Machine
from backend.rules import Finding
from backend.rules.examples import DEMO, LAPTOP

Patch = Mapping[str, Any]
NO_FIX: Patch = {}


@dataclass(frozen=True)
class Setup:
    """A patch of the default spec, on a machine, with inspected facts."""

    patch: Patch = field(default_factory=dict)
    machine: Machine = LAPTOP
    facts: InputFacts = DEMO

    def finding(self, code: str) -> Finding | None:
        """What the rule says of it."""
        return rule_finding(code, self.patch, self.machine, self.facts)


@dataclass(frozen=True)
class Boundary:
    """`passes` and `fails` are as near to each other as the values allow. `fixes`: the patches of all fixes of the
    failing case; `words`: part of its message."""

    code: str
    passes: Setup
    fails: Setup
    fixes: tuple[Patch, ...] | None = None
    words: str = ""

    def __str__(self) -> str:
        """The name of its test."""
        return f"{self.code}-{dict(self.fails.patch)}"[:80]

    def check(self) -> None:
        """Assert that the rule passes and fails, and what its finding says."""
        assert self.passes.finding(self.code) is None
        found = self.fails.finding(self.code)
        assert found is not None
        assert self.words in found.message
        if self.fixes is not None:
            assert [dict(fix.patch) for fix in found.fixes] == [dict(patch) for patch in self.fixes]
        for fix in found.fixes:
            if match := re.fullmatch(r"Set \S.* to ([-+.e\d]+)", fix.label):
                assert float(match[1]) in [pytest.approx(value, rel=0.05) for value in fix.patch.values()]


def boundary(
    code: str, base: Patch, passes: Patch, fails: Patch, *fixes: Patch, words: str = "", **where: Any
) -> Boundary:
    """A boundary in the options alone, on one machine with one set of facts. NO_FIX: there is no fix."""
    passing, failing = (Setup({**base, **more}, **where) for more in (passes, fails))
    return Boundary(code, passing, failing, _expected(fixes), words)


def facts_boundary(
    code: str, patch: Patch, passes: InputFacts, fails: InputFacts, *fixes: Patch, words: str = "", **where: Any
) -> Boundary:
    """A boundary in what inspection finds."""
    passing, failing = (Setup(patch, facts=facts, **where) for facts in (passes, fails))
    return Boundary(code, passing, failing, _expected(fixes), words)


def machine_boundary(code: str, patch: Patch, passes: Machine, fails: Machine, facts: InputFacts = DEMO) -> Boundary:
    """A boundary in the machine."""
    return Boundary(code, Setup(patch, passes, facts), Setup(patch, fails, facts))


def _expected(fixes: tuple[Patch, ...]) -> tuple[Patch, ...] | None:
    return () if fixes == (NO_FIX,) else fixes or None
