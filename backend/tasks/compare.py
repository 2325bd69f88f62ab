"""Comparison of all parallel strategies for one spec and machine: memory, communication, errors, and a recommendation.

Nothing is launched: every strategy is checked and estimated as a spec of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

from backend import registry
from backend.config.options import effective
from backend.engines import engine_of
from backend.memory import Fit, MemoryContext
from backend.memory.communication import host_bytes, network_bytes
from backend.rules import RULES, Case
from backend.rules.base import Rule, names
from backend.rules.memory_remedies import (
    available_gpus,
    may_fit,
    offloads,
    processes_patch,
    recommended_strategies,
    smaller_batches,
    strategy_patch,
)
from backend.wording import data_size

SIMILAR = 1.05  # strategies are compared by their predicted speed if they communicate as much up to this factor
HOST_TRAFFIC_WEIGHT = 4  # a byte between device and host costs as much as this many bytes between devices
# How nodes find each other says nothing about a strategy.
ADDRESSES = {"launch.master_addr", "launch.master_port", "launch.node_rank"}


@dataclass(frozen=True)
class Variant:
    """A spec with a strategy: its name, the patch that selects it, and the case of the changed spec. `unrelated` are
    the codes of errors that every strategy has, so that they say nothing about this one."""

    name: str
    patch: Mapping[str, Any]
    case: Case
    is_current: bool = False  # the strategy of the spec
    unrelated: frozenset[str] = frozenset()

    @cached_property
    def device_bytes(self) -> int | None:
        """The estimated peak on each device; None if it is not known."""
        estimate = self.case.estimate
        return None if estimate.unknown and not estimate.lower_bound else estimate.device_bytes

    @property
    def capacity_bytes(self) -> int:
        """The free memory of each device."""
        return self.case.estimate.capacity_bytes

    @property
    def host_bytes(self) -> int:
        """The estimated peak in the host RAM of a node."""
        return self.case.estimate.host_bytes

    @cached_property
    def sent_bytes(self) -> int:
        """Bytes that each device sends to other devices in an optimizer step."""
        return sum(network_bytes(self._context).values()) if self._context else 0

    @cached_property
    def host_traffic_bytes(self) -> int:
        """Bytes between each device and host RAM in an optimizer step."""
        return host_bytes(self._context) if self._context else 0

    @cached_property
    def tokens_per_second(self) -> float | None:
        """The predicted speed; None if the variant cannot run, or if no time is predicted."""
        return None if self.error or self.case.time.unknown else self.case.time.tokens_per_second

    @property
    def error(self) -> str:
        """The title of the first error that is neither about memory nor unrelated; '' without one."""
        rules = (rule for rule in self.case.other_errors if not set(rule.fields) <= ADDRESSES)
        return next((rule.title for rule in rules if rule.code not in self.unrelated), "")

    @property
    def host_fit(self) -> Fit:
        """Whether the run fits into host RAM."""
        return self.case.estimate.host_fit(self.case.machine.ram_free_bytes)

    @property
    def verdict(self) -> str:
        """Why the variant cannot run, or whether it fits."""
        if self.error:
            return f"Cannot run: {self.error}"
        where = " in host RAM" if self.host_fit == self.fit != self.case.estimate.fit else ""
        return f"{self.fit.text}{where}"

    @property
    def fit(self) -> Fit:
        """Whether the run fits into the memory of its devices and into host RAM."""
        return self.case.estimate.fit_on_node(self.case.machine.ram_free_bytes)

    @property
    def fits(self) -> bool | None:
        """Whether the estimates themselves are within device memory and host RAM; None if that is not known."""
        return None if self.fit == Fit.UNKNOWN else self.fit in (Fit.YES, Fit.UNCERTAIN)

    @property
    def runs(self) -> bool:
        """Whether the variant fits and has no error."""
        return bool(self.fits) and not self.error

    @cached_property
    def drawbacks(self) -> frozenset[str]:
        """The titles of the warnings and advice about the parallelization."""
        return frozenset(rule.title for rule in _strategy_rules() if rule.check(self.case) is not None)

    @property
    def cost(self) -> int:
        """The weighted communication of an optimizer step."""
        return self.sent_bytes + HOST_TRAFFIC_WEIGHT * self.host_traffic_bytes

    @cached_property
    def _context(self) -> MemoryContext | None:
        case = self.case
        if case.shape is None:
            return None
        return MemoryContext(case.spec, case.run, case.machine, case.shape, case.facts.longest_used)


def variants(case: Case) -> list[Variant]:
    """Every strategy that is recommended, and the strategy of the spec. Hidden options of the spec count where a
    strategy shows them, such as the number of nodes."""
    found = _distinct(case)
    codes = [frozenset(rule.code for rule in variant.case.other_errors) for variant in found]
    return [replace(variant, unrelated=frozenset.intersection(*codes)) for variant in found]


def _distinct(case: Case) -> list[Variant]:
    """The same as `variants`, but with `unrelated` empty, since no rule is checked yet."""
    current = effective(case.spec)
    found: list[Variant] = []
    for name, patch in _lines(case):
        spec = effective(case.with_patch(patch))
        if all(spec != other.case.spec for other in found):
            found.append(Variant(name, patch, Case(spec, case.machine, case.facts), spec == current))
    if not any(variant.is_current for variant in found):
        found.append(Variant(f"{case.strategy.label}, as set", {}, replace(case, spec=current), True))
    return found


def other_strategies(case: Case, known: list[Variant]) -> list[Variant]:
    """The strategies that `variants` leaves out, because another one does the same, and better. `known` are the
    variants of the case."""
    rest = [strategy for strategy in registry.STRATEGIES if not engine_of(strategy).is_recommended]
    patches = [(registry.STRATEGIES[name].label, strategy_patch(case, name)) for name in rest]
    found = [(name, patch, effective(case.with_patch(patch))) for name, patch in patches]
    unrelated, current = known[0].unrelated, effective(case.spec)
    return [
        Variant(name, patch, Case(spec, case.machine, case.facts), unrelated=unrelated)
        for name, patch, spec in found
        if spec != current
    ]


def _lines(case: Case) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, patch) of each strategy, and of the other ways to divide its devices. The patches keep the global batch
    size where it is divisible."""
    for strategy, label, settings in recommended_strategies(case):
        per_node = processes_patch(case, strategy).get("launch.nproc_per_node", 1)
        divisions = engine_of(strategy).divisions(case.spec, per_node, case.run.nnodes)
        for suffix, sizes in divisions[:1] if offloads(settings) else divisions:
            yield f"{label}{suffix}", strategy_patch(case, strategy, {**settings, **sizes})


@cache
def _strategy_rules() -> list[Rule]:
    """The rules whose warning or advice is about the parallelization, not about memory."""
    rules = (rule for rule in RULES if rule.level != "error" and not rule.code.startswith("MEM"))
    return [rule for rule in rules if any(field.startswith("parallel.") for field in rule.fields)]


def recommend(case: Case, known: list[Variant] | None = None) -> tuple[Variant, str] | None:
    """The variant that runs, uses every device and communicates least, with the reason; None if none runs, or memory is
    not known. One that certainly fits comes before one that may not, and one that no rule advises against before one
    with a drawback. `known` are the variants of the case, if they are computed already."""
    if case.shape is None or case.shape.activations_unknown or case.spec.other_backend:
        return None
    several = len(available_gpus(case)) > 1 and case.run.device == case.machine.device
    known = known or variants(case)
    candidates = {v.name for v in known if may_fit(v.case)}
    if not candidates:
        return None
    found_so_far: list[tuple[tuple[bool, int], Variant, str]] = []
    for extra_patch, description in _smaller_settings(case):
        found = _changed(case, extra_patch, known[0].unrelated) if extra_patch else known
        found = [v for v in found if not several or v.case.run.world_size > 1]
        found.sort(key=lambda v: v.cost)
        running = [v for v in found if v.name in candidates and v.runs]
        if not running:
            continue
        everywhere = frozenset.intersection(*(v.drawbacks for v in found if not v.error))
        doubts = [(v.fit != Fit.YES, len(v.drawbacks - everywhere)) for v in running]
        best = _fastest([v for v, doubt in zip(running, doubts, strict=True) if doubt == min(doubts)])
        found_so_far.append((min(doubts), best, _reason(best, found, everywhere, description, several)))
        if min(doubts) == (False, 0):
            break
    if not found_so_far:
        return None
    _, best, reason = min(found_so_far, key=lambda entry: entry[0])  # on a tie, the first one
    return best, reason


def _fastest(found: list[Variant]) -> Variant:
    """Of the variants that communicate about as little as the first one, the one that is predicted to be the fastest;
    the first one, unless another one is clearly faster."""
    first, *others = found
    similar = [v for v in others if v.cost <= SIMILAR * first.cost and v.tokens_per_second]
    fastest = max(similar, key=lambda v: v.tokens_per_second or 0.0, default=first)
    slow = first.tokens_per_second
    return fastest if slow and (fastest.tokens_per_second or 0.0) > SIMILAR * slow else first


def _reason(best: Variant, found: list[Variant], everywhere: frozenset[str], description: str, several: bool) -> str:
    """Why `best` is recommended, and not one of the variants `found` that communicate less. `everywhere` are the
    drawbacks that all have."""
    cheaper = [v for v in found if v.cost <= best.cost and v.name != best.name and not v.error]
    too_large = ", ".join(v.name for v in cheaper if v.fit != Fit.YES)
    worse = [v for v in cheaper if v.fit == Fit.YES and v.cost < best.cost and v.drawbacks - everywhere]
    similar = [
        v for v in cheaper
        if v.tokens_per_second and v.fit == Fit.YES and v.cost < best.cost <= SIMILAR * v.cost and v not in worse
    ]  # fmt: skip
    drawbacks = [f" {v.name} sends less, but: {min(v.drawbacks - everywhere)}." for v in worse]
    where = "for each process" if best.case.run.device == "cpu" else "of each device"
    needs = f"It needs {data_size(best.device_bytes or 0)} of the {data_size(best.capacity_bytes)} {where}{description}"
    compared = names(["fit", *["use every GPU"] * several, *["have no drawback"] * bool(drawbacks)])
    parts = (
        "" if best.fit == Fit.YES else ", which may not be enough,",
        f" and communicates {'about as little as any' if similar else 'least'} of the strategies that {compared}"
        if best.cost
        else " and communicates nothing",
        f"; {similar[0].name} sends hardly less, and is predicted to be slower" if similar else "",
        f"; {too_large} would not fit or may not fit" if too_large else "",
    )
    return f"{needs}{''.join(parts)}.{''.join(drawbacks[:1])}"


def _changed(case: Case, extra_patch: Mapping[str, Any], unrelated: frozenset[str]) -> list[Variant]:
    """The variants of the case with `extra_patch`, as changes of the case itself. Their rules are checked only if one
    fits."""
    found = _distinct(Case(case.with_patch(extra_patch), case.machine, case.facts))
    return [Variant(v.name, {**extra_patch, **v.patch}, v.case, unrelated=unrelated) for v in found]


def _smaller_settings(case: Case) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Patches that reduce activation memory, and their description: none, activation checkpointing, smaller batches."""
    checkpointing = {"train.activation_checkpointing": True}
    yield {}, ""
    yield checkpointing, " with activation checkpointing"
    for patch in smaller_batches(case):
        size = patch["train.per_device_train_batch_size"]
        yield {**checkpointing, **patch}, f" with activation checkpointing and a per-device batch size of {size}"
