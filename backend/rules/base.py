"""What a rule is: a function with a code, a reason, a source, fixes, and examples that prove it.

Imports everything below rules. `@rule(...)` adds a function of a Case to RULES; the function's docstring is the reason,
its name with dashes is the rule's slug. It returns None if the rule does not apply, else the message (a sentence with
the values of this case), or a Violation with fixes made for this case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from backend import registry
from backend.config import RunSpec
from backend.config.options import SpecError, edit, effective, get
from backend.inspect import InputFacts
from backend.machine import Gpu, Machine
from backend.memory import Estimate, estimate
from backend.modelspec import ModelShape
from backend.resolve import ResolvedRun, resolve, selected_gpus

Level = Literal["error", "warning", "advice"]
Patch = Mapping[str, Any]


@dataclass(frozen=True)
class Fix:
    """One click: a patch of the spec. `safe`: the training result stays the same; `cost`: what else is given up, in a
    few words; `peak`: bytes on each device afterwards, where the fix is about memory."""

    label: str
    patch: Patch
    safe: bool = True
    cost: str = ""
    peak: int = 0


@dataclass(frozen=True)
class Finding:
    """A rule that applies to a spec. `message` has the values of this case, `reason` says why it matters."""

    code: str
    slug: str
    level: Level
    title: str
    message: str
    reason: str
    fields: tuple[str, ...]
    fixes: tuple[Fix, ...]
    source: str


@dataclass(frozen=True)
class Case:
    """What rules look at: a spec on a machine, what inspection found, and what follows from them."""

    spec: RunSpec
    machine: Machine
    facts: InputFacts

    @cached_property
    def run(self) -> ResolvedRun:
        """What follows from spec, machine and facts."""
        return resolve(self.spec, self.machine, self.facts)

    @property
    def strategy(self) -> registry.Strategy:
        """The registry row of the strategy."""
        return registry.STRATEGIES[self.spec.parallel.strategy]

    @cached_property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs of the machine that the run uses."""
        return selected_gpus(self.run, self.machine)

    @property
    def shape(self) -> ModelShape | None:
        """The model's shape, if known."""
        return self.facts.shape

    @cached_property
    def estimate(self) -> Estimate:
        """The memory of this spec."""
        return self.estimated(self.spec)

    def estimated(self, spec: RunSpec) -> Estimate:
        """The memory of a changed spec."""
        facts = self.facts
        rows = facts.training_rows(spec.data)
        return estimate(spec, self.machine, facts.shape, facts.unknown, facts.longest, rows)

    def resolved(self, spec: RunSpec) -> ResolvedRun:
        """What follows from a changed spec."""
        return resolve(spec, self.machine, self.facts)

    def takes(self, patch: Patch) -> bool:
        """Whether a patch changes the spec and stays within the limits of the options."""
        if all(get(self.spec, name) == value for name, value in patch.items()):
            return False
        try:
            edit(self.spec, patch)
        except SpecError:
            return False
        return True

    def with_patch(self, patch: Patch) -> RunSpec:
        """The spec with a patch applied."""
        return edit(self.spec, patch)


@dataclass(frozen=True)
class Violation:
    """What a rule returns along with fixes made for this case, or with other fields than the rule's own."""

    message: str
    fixes: tuple[Fix, ...] = ()
    fields: tuple[str, ...] = ()


@dataclass(frozen=True)
class Example:
    """A patch of the default spec, on a machine, with inspected facts; None uses the defaults of examples.py."""

    patch: Patch = field(default_factory=dict)
    machine: Machine | None = None
    facts: InputFacts | None = None


Check = Callable[[Case], "str | Violation | None"]


@dataclass(frozen=True)
class Rule:
    """One preflight rule. `manual_fix` says what to do where no option of Footplate is a fix; `at_start`: it is about
    the moment before launch (ports, free disk, busy devices) and is not repeated by the trainer."""

    code: str
    slug: str
    level: Level
    fields: tuple[str, ...]
    title: str
    reason: str
    source: str
    fixes: tuple[Fix, ...]
    manual_fix: str
    fails_on: Example
    passes_on: Example
    proof: Literal["", "launch", "gpu"]
    at_start: bool
    check: Check

    def finding(self, case: Case) -> Finding | None:
        """The finding of `case`, or None. Fixes that change nothing are left out; what would not fit comes last."""
        answer = self.check(case)
        if answer is None:
            return None
        violation = answer if isinstance(answer, Violation) else Violation(answer)
        fixes = tuple(f for f in (*violation.fixes, *self.fixes) if case.takes(f.patch))
        if len(fixes) > 1 and case.estimate.fits:
            large = [fix for fix in fixes if case.estimated(effective(case.with_patch(fix.patch))).fits is False]
            rest = tuple(fix for fix in fixes if fix not in large)
            fixes = (*rest, *(replace(fix, cost="does not fit") for fix in large))
        message = f"{violation.message} {self.manual_fix}" if self.manual_fix else violation.message
        fields = violation.fields or self.fields
        return Finding(self.code, self.slug, self.level, self.title, message, self.reason, fields, fixes, self.source)


RULES: list[Rule] = []


def rule(
    code: str,
    level: Level,
    *,
    fields: tuple[str, ...],
    title: str,
    source: str,
    fails_on: Example,
    passes_on: Example,
    fixes: tuple[Fix, ...] = (),
    manual_fix: str = "",
    proof: Literal["", "launch", "gpu"] = "",
    at_start: bool = False,
) -> Callable[[Check], Check]:
    """Add a rule; the function's docstring is the reason that people read, its name the slug."""

    def add(check: Check) -> Check:
        reason, slug = " ".join((check.__doc__ or "").split()), check.__name__.replace("_", "-")
        RULES.append(
            Rule(
                code, slug, level, fields, title, reason, source, fixes, manual_fix, fails_on, passes_on, proof,
                at_start, check,
            )
        )  # fmt: skip
        return check

    return add


def names(items: object) -> str:
    """Things in a row: 'a, b and c'."""
    words = [str(item) for item in items] if isinstance(items, list | tuple | set | frozenset) else [str(items)]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else "nothing"


def reasons(found: Iterable[tuple[str, str]]) -> str:
    """What is wrong with each of some things, in a sentence: 'this: why; that: why.'"""
    return "; ".join(f"{name}: {why}" for name, why in found) + "."


def counted(number: int, thing: str) -> str:
    """A number of things: '1 step', '60,000 steps', '2 processes'."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}{'es' if thing.endswith('s') else 's'}"


def amount(count: float) -> str:
    """Bytes in the units of the memory bar: 3.2 GiB."""
    for size, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1024:.0f} KiB"
