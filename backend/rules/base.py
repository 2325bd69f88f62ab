"""Rule: a function with a code, a reason, a source, fixes, and an example that fails and one that passes.

`@error(...)`, `@warning(...)` and `@advice(...)` add a function of a Case to RULES. The function's docstring is the
reason, its name with dashes is the rule's slug. It returns None if the rule does not apply, otherwise the message
(sentences with the values of this case) or a Violation, which also has fixes computed for this case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from operator import attrgetter
from typing import Any, Literal

from backend import registry
from backend.config import RunSpec
from backend.config.options import SpecError, by_name, edit, effective, get, with_defaults
from backend.inspect import InputFacts
from backend.launch import clusters
from backend.machine import Gpu, Machine
from backend.memory import Estimate, estimate
from backend.modelspec import ModelShape
from backend.resolve import ResolvedRun, resolve, selected_gpus
from backend.timing import TimeEstimate, time_of
from backend.wording import counted, names

Level = Literal["error", "warning", "advice"]
CHANGES_BATCH = ("launch.", "parallel.", "train.")  # their options may change the number of data-parallel ranks
SHORT_COST = 40  # characters; another cost fits only after a shorter text
Patch = Mapping[str, Any]


@dataclass(frozen=True)
class Fix:
    """A patch of the spec that the user applies with one click. `safe`: it does not change the training result; `cost`:
    what it costs, in a few words; `peak`: for a fix that saves memory, the estimated bytes on each device after it."""

    label: str
    patch: Patch
    safe: bool = True
    cost: str = ""
    peak: int = 0

    @property
    def effect(self) -> str:
        """What the fix changes in addition to the options, unless it is safe."""
        if self.safe:
            return ""
        if set(self.patch) <= {"eval.num_generations"}:
            return "changes what the run evaluates"
        if set(self.patch) == {"launch.place"}:
            return "changes where the run starts"
        only_saved = all(name.startswith("save.") and not name.startswith("save.resume") for name in self.patch)
        return "changes what the run saves" if only_saved else "changes the training result"

    def for_spec(self, spec: RunSpec) -> Fix:
        """The fix for `spec`, whose hidden options may have values from an earlier choice: only what it changes."""
        patch = with_defaults(spec, self.patch)
        return replace(self, patch={name: value for name, value in patch.items() if get(spec, name) != value} or patch)


def label_of(option: str) -> str:
    """The label of an option inside a sentence: "max steps", "LoRA rank"."""
    label = by_name()[option].label
    return label[0].lower() + label[1:] if label.split()[0][1:].islower() else label


def set_to(option: str, value: object) -> str:
    """The label of a fix that sets an option: "Set evaluation interval to 7"."""
    return f"Set {label_of(option)} to {value}"


@dataclass(frozen=True)
class Finding:
    """A rule that applies to a spec. `message` has the values of this case, `reason` the mechanism."""

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
    """The input of a rule: a spec, a machine, the inspected input files, and what follows from them."""

    spec: RunSpec
    machine: Machine
    facts: InputFacts

    @cached_property
    def run(self) -> ResolvedRun:
        """The run that spec, machine and facts resolve to."""
        return resolve(self.spec, self.machine, self.facts)

    @property
    def versions(self) -> Mapping[str, str]:
        """The versions of the packages that the trainer imports; {} if they are not known. LLaMA-Factory has packages
        of its own, of which LLF001 looks for the most common ones."""
        return self.machine.versions if self.spec.launch.trainer == "footplate" else {}

    @property
    def strategy(self) -> registry.Strategy:
        """The registry row of the strategy."""
        return registry.STRATEGIES[self.spec.parallel.strategy]

    @property
    def optimizer(self) -> registry.Optimizer:
        """The registry row of the optimizer."""
        return registry.OPTIMIZERS[self.spec.train.optim]

    @cached_property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs of the machine that the run uses."""
        return selected_gpus(self.run, self.machine)

    @property
    def cores(self) -> int:
        """The CPU cores that the run has on each node."""
        return clusters.cores(self.spec, self.run, self.machine)

    @property
    def shape(self) -> ModelShape | None:
        """The model's shape, if known."""
        return self.facts.shape

    @property
    def model_types(self) -> set[str]:
        """The model_type of config.json, and of its language model if that is a part of it."""
        return {self.facts.model_type, self.shape.model_type if self.shape else ""} - {""}

    @cached_property
    def estimate(self) -> Estimate:
        """The memory of this spec."""
        return estimate(self.spec, self.run, self.machine, self.facts)

    @cached_property
    def time(self) -> TimeEstimate:
        """The time of this spec."""
        return time_of(self.spec, self.run, self.machine, self.facts)

    def estimated(self, spec: RunSpec) -> Estimate:
        """The memory of a changed spec."""
        return estimate(spec, self.resolved(spec), self.machine, self.facts)

    def resolved(self, spec: RunSpec) -> ResolvedRun:
        """The run that a changed spec resolves to."""
        return resolve(spec, self.machine, self.facts)

    @cached_property
    def other_errors(self) -> Sequence[Rule]:
        """The rules, sorted by code, that report an error which is not about memory."""
        return [rule for rule in _other_error_rules() if rule.check(self) is not None]

    def takes(self, patch: Patch) -> bool:
        """Whether a patch changes the spec and is valid."""
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

    def working_first(self, fixes: Sequence[Fix]) -> tuple[Fix, ...]:
        """These fixes; those that lead to another error or to a run that does not fit come last, with this as their
        cost."""
        before, decides_fit = {rule.code for rule in self.other_errors}, len(fixes) > 1 and self.estimate.fits
        working, others = [], []
        for fix in fixes:
            after = replace(self, spec=effective(self.with_patch(fix.patch)))
            if added := [rule.title for rule in after.other_errors if rule.code not in before]:
                others.append(replace(fix, cost=f"leads to another error: {'; '.join(added)}"))
            elif decides_fit and after.estimate.fits is False:
                others.append(replace(fix, cost="does not fit"))
            else:
                working.append(fix)
        return (*working, *others)

    def keep_batch(self, fix: Fix) -> Fix:
        """A safe fix that keeps the global batch size: with fewer gradient accumulation steps, or else a smaller batch
        on each device, where it leads to more data-parallel ranks. If neither is possible, it is not safe."""
        if (fix.cost and not fix.safe) or not any(name.startswith(CHANGES_BATCH) for name in fix.patch):
            return fix
        spec, before = effective(self.with_patch(fix.patch)), self.run.global_batch_size
        after = self.resolved(spec).global_batch_size
        if after == before:
            return fix
        size, steps = spec.train.per_device_train_batch_size, spec.train.gradient_accumulation_steps
        each, rest = divmod(size * steps * before, after)  # examples of a step on each rank
        fewer = next((n for n in range(1, steps + 1) if each % n == 0 and each // n <= size), 0)
        least = min(2, size)  # KTO needs two, on all ranks together as many as before; AOT sorts those of one rank
        if self.spec.train.stage == "dpo" and self.spec.compares_examples:
            least = size
        if not fix.safe or rest or not fewer or each // fewer < least:
            batch = f"global batch size {after:,} instead of {before:,}"
            cost = f"{fix.cost}; {batch}" if fix.cost and len(fix.cost) < SHORT_COST else batch
            return replace(fix, safe=False, cost=cost)
        changed = [f"a batch size of {each // fewer:,} per device"] if each // fewer != size else []
        changed += [counted(fewer, "gradient accumulation step")] if fewer != steps else []
        same = {"train.per_device_train_batch_size": each // fewer, "train.gradient_accumulation_steps": fewer}
        return replace(fix, label=f"{fix.label}, with {names(changed)}", patch={**fix.patch, **same})


@dataclass(frozen=True)
class Violation:
    """What a rule returns if it has fixes computed for this case, or fields, a title or a manual fix different from the
    rule's."""

    message: str
    fixes: tuple[Fix, ...] = ()
    fields: tuple[str, ...] = ()
    title: str = ""
    manual_fix: str = ""


@dataclass(frozen=True)
class Example:
    """A patch of the default spec, on a machine, with inspected facts; None uses the defaults of examples.py."""

    patch: Patch = field(default_factory=dict)
    machine: Machine | None = None
    facts: InputFacts | None = None


Check = Callable[[Case], "str | Violation | None"]


@dataclass(frozen=True)
class Rule:
    """A preflight rule. `manual_fix`: what to do outside Footplate; `proof`: "launch" if a test launches `fails_on`
    and checks that it fails, "gpu" if that takes a GPU; `at_start`: whether it is checked only right before the launch
    (ports, free disk, busy devices)."""

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

    @property
    def family(self) -> str:
        """The letters of its code, a key of FAMILIES."""
        return self.code.rstrip("0123456789")

    @property
    def proof_text(self) -> str:
        """Which test launches the failing example; '' if none does."""
        return {
            "launch": "a test launches the failing example and checks that it fails",
            "gpu": "a test on a GPU launches the failing example",
        }.get(self.proof, "")

    def finding(self, case: Case) -> Finding | None:
        """The finding about `case`, or None. Fixes that change nothing are left out; fixes after which the run would
        not start, because of another error or of its memory, come last."""
        result = self.check(case)
        if result is None:
            return None
        violation = result if isinstance(result, Violation) else Violation(result)
        offered = [(fix, case.keep_batch(fix)) for fix in (*violation.fixes, *self.fixes) if case.takes(fix.patch)]
        offered.sort(key=lambda pair: pair[0].safe and not pair[1].safe)  # what is no longer safe comes last
        fixes = case.working_first([fix for _, fix in offered])
        message = f"{violation.message} {violation.manual_fix or self.manual_fix}".rstrip()
        fields = violation.fields or self.fields
        title = violation.title or self.title
        return Finding(self.code, self.slug, self.level, title, message, self.reason, fields, fixes, self.source)


RULES: list[Rule] = []


@cache  # all rules are there when the first case is checked
def _other_error_rules() -> Sequence[Rule]:
    """The rules about errors that are not about memory, sorted by code."""
    rules = (rule for rule in RULES if rule.level == "error" and not rule.code.startswith("MEM"))
    return sorted(rules, key=attrgetter("code"))


def rule(
    level: Level,
    code: str,
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
    """Add a rule to RULES. The function's docstring becomes the reason, its name the slug."""

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


error, warning, advice = partial(rule, "error"), partial(rule, "warning"), partial(rule, "advice")


def reasons(found: Iterable[tuple[str, str]]) -> str:
    """Keys with what is wrong with each, as a sentence: 'key: reason; other_key: other reason.'"""
    return "; ".join(f"{name}: {why}" for name, why in found) + "."
