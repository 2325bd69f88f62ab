"""What a rule is: a function with a code, a reason, a source, fixes, and examples that prove it.

Floor 3. Imports: below. `@rule(...)` adds a function of a Case to RULES. It returns None where all is well, else the
message (a sentence with the numbers of this case), or a Hit that brings fixes made for this case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from backend import registry, resolve
from backend.config import RunSpec
from backend.config.options import SpecError, edit, effective, get
from backend.inspect import Glance
from backend.machine import Machine
from backend.memory import Estimate, estimate
from backend.modelspec import ModelShape

Level = Literal["error", "warning", "advice"]
Patch = Mapping[str, Any]


@dataclass(frozen=True)
class Fix:
    """One click: a patch over the spec. `safe` says that what is learned stays the same, `cost` in a few words what
    else is given up, and `peak` the bytes on each device after it, where it is about them."""

    label: str
    patch: Patch
    safe: bool = True
    cost: str = ""
    peak: int = 0


@dataclass(frozen=True)
class Finding:
    """A rule that holds for a spec, in the words of this case."""

    code: str
    level: Level
    title: str
    message: str
    fields: tuple[str, ...]
    fixes: tuple[Fix, ...]
    source: str


@dataclass(frozen=True)
class Case:
    """What rules judge: a spec on a machine, what its files showed, and the memory it takes."""

    spec: RunSpec
    machine: Machine
    glance: Glance

    @cached_property
    def device(self) -> str:
        """The device family of the run."""
        return resolve.device(self.spec, self.machine)

    @cached_property
    def processes(self) -> int:
        """Processes of the run on a node."""
        return resolve.processes(self.spec)

    @property
    def strategy(self) -> registry.Strategy:
        """The row of the strategy."""
        return registry.STRATEGIES[self.spec.parallel.strategy]

    @cached_property
    def learners(self) -> int:
        """Processes, or groups of them, with rows of their own."""
        return resolve.learners(self.spec)

    @cached_property
    def nodes(self) -> int:
        """Machines that train together."""
        return resolve.nodes(self.spec)

    @cached_property
    def world(self) -> int:
        """Processes of all nodes together."""
        return resolve.world(self.spec)

    @cached_property
    def precision(self) -> str:
        """bf16, fp16 or fp32."""
        return resolve.precision(self.spec, self.machine)

    @property
    def gpu(self) -> bool:
        """Whether it runs on devices with ids."""
        return self.device in ("cuda", "npu", "xpu")

    @property
    def shape(self) -> ModelShape | None:
        """The model's shape, if known."""
        return self.glance.shape

    @cached_property
    def rows(self) -> int | None:
        """Rows to train on, if known."""
        return self.glance.training_rows(self.spec.data)

    @cached_property
    def held(self) -> int | None:
        """Rows to validate on, if known."""
        return self.glance.validation_rows(self.spec.data)

    @cached_property
    def steps(self) -> int | None:
        """Optimizer steps of the run, if known."""
        return resolve.steps(self.spec, self.rows)

    @cached_property
    def estimate(self) -> Estimate:
        """The memory of this spec."""
        return self.estimated(self.spec)

    def estimated(self, spec: RunSpec) -> Estimate:
        """The memory of a changed spec."""
        glance = self.glance
        rows = glance.training_rows(spec.data)
        return estimate(spec, self.machine, glance.shape, glance.unknown, glance.longest, rows)

    def takes(self, patch: Patch) -> bool:
        """Whether a patch changes the spec and stays within the options' limits."""
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
class Hit:
    """A rule's answer with fixes made for this case, or other fields than the rule's own."""

    message: str
    fixes: tuple[Fix, ...] = ()
    fields: tuple[str, ...] = ()


@dataclass(frozen=True)
class Example:
    """A patch over the default spec, on a machine, with a glance; None takes the ordinary ones of examples.py."""

    patch: Patch = field(default_factory=dict)
    machine: Machine | None = None
    glance: Glance | None = None


Judge = Callable[[Case], "str | Hit | None"]


@dataclass(frozen=True)
class Rule:
    """One entry of the catalogue. `remedy` is the way out where no option of Footplate is one."""

    code: str
    level: Level
    fields: tuple[str, ...]
    title: str
    why: str
    source: str
    fixes: tuple[Fix, ...]
    remedy: str
    bad: Example
    good: Example
    proof: Literal["", "launch", "gpu"]
    judge: Judge

    def finding(self, case: Case) -> Finding | None:
        """The finding of `case`, or None. Fixes that change nothing are left out; what would not fit comes last."""
        answer = self.judge(case)
        if answer is None:
            return None
        hit = answer if isinstance(answer, Hit) else Hit(answer)
        fixes = tuple(f for f in (*hit.fixes, *self.fixes) if case.takes(f.patch))
        if len(fixes) > 1 and case.estimate.fits:
            large = [fix for fix in fixes if case.estimated(effective(case.with_patch(fix.patch))).fits is False]
            rest = tuple(fix for fix in fixes if fix not in large)
            fixes = (*rest, *(replace(fix, cost="does not fit") for fix in large))
        message = f"{hit.message} {self.remedy}" if self.remedy else hit.message
        return Finding(self.code, self.level, self.title, message, hit.fields or self.fields, fixes, self.source)


RULES: list[Rule] = []


def rule(
    code: str,
    level: Level,
    *,
    fields: tuple[str, ...],
    title: str,
    source: str,
    bad: Example,
    good: Example,
    fixes: tuple[Fix, ...] = (),
    remedy: str = "",
    proof: Literal["", "launch", "gpu"] = "",
) -> Callable[[Judge], Judge]:
    """Add a rule to the catalogue; its docstring is the reason that people read."""

    def add(judge: Judge) -> Judge:
        why = " ".join((judge.__doc__ or "").split())
        RULES.append(Rule(code, level, fields, title, why, source, fixes, remedy, bad, good, proof, judge))
        return judge

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
