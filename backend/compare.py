"""Every strategy for this model on this machine: what it takes, what it sends, whether it would run; and the lightest.

Floor 4. Imports: derived, memory, options, rules. Nothing is launched: it is the rules and the estimate, asked again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from backend.config import RunSpec
from backend.config.options import effective
from backend.memory import Account
from backend.memory.communication import hosted, sent
from backend.rules import Case
from backend.rules.base import amount
from backend.rules.memory_remedies import obstacles, smaller, strategies

HOST = 4  # a byte to the host counts as so many between devices


@dataclass(frozen=True)
class Variant:
    """One way: the patch that leads there; bytes on each device, in RAM, and sent at each optimizer step."""

    name: str
    patch: Mapping[str, Any]
    device_bytes: int
    capacity_bytes: int
    host_bytes: int
    ram_bytes: int
    sent_bytes: int
    hosted_bytes: int
    obstacle: str
    """The title of the first error but memory; '' if there is none."""
    now: bool

    @property
    def fits(self) -> bool:
        """Whether it stays within each device, and the host's RAM."""
        return self.device_bytes <= self.capacity_bytes and self.host_bytes <= self.ram_bytes

    @property
    def runs(self) -> bool:
        """Whether it would run."""
        return self.fits and not self.obstacle

    @property
    def cost(self) -> int:
        """What a step waits for."""
        return self.sent_bytes + HOST * self.hosted_bytes


def variants(case: Case, ease: Mapping[str, Any] = {}) -> list[Variant]:
    """Every strategy, beside the change `ease`; [] where the model's shape is not known."""
    if case.shape is None or case.shape.activations_unknown:
        return []
    eased = Case(case.with_patch(ease), case.machine, case.facts)
    return [_variant(case, label, {**ease, **patch}) for _, label, patch in strategies(eased)]


def suggestion(case: Case, known: list[Variant] | None = None) -> tuple[Variant, str] | None:
    """The lightest way that runs and uses every device, and why it is that; None if there is none. `known` are the
    variants, where somebody has them."""
    many = len(case.machine.gpus) > 1 and case.run.device == case.machine.device
    for ease, words in _eases(case):
        ways = variants(case, ease) if ease or known is None else known
        found = [v for v in ways if not many or v.patch["parallel.strategy"] != "single"]
        good = sorted((v for v in found if v.runs), key=lambda v: v.cost)
        if good:
            best = good[0]
            over = [v.name for v in found if not v.obstacle and not v.fits and v.cost <= best.cost]
            parts = f"{amount(best.device_bytes)} of {amount(best.capacity_bytes)}{words}, and the least to send"
            return best, f"{parts}; {', '.join(over)} would not fit." if over else f"{parts}."
    return None


def _eases(case: Case) -> Iterator[tuple[Mapping[str, Any], str]]:
    checkpointing = {"train.activation_checkpointing": True}
    yield {}, ""
    yield checkpointing, " with activation checkpointing"
    for patch in smaller(case):
        yield (
            {**checkpointing, **patch},
            f" with activation checkpointing and batches of {patch['train.per_device_train_batch_size']}",
        )


def _variant(case: Case, name: str, patch: Mapping[str, Any]) -> Variant:
    spec = effective(case.with_patch(patch))
    other = Case(spec, case.machine, case.facts)
    found, shape = other.estimate, case.facts.shape
    assert shape is not None
    account = Account(spec, case.machine, shape, case.facts.longest_example)
    errors = [found.title for found in obstacles(other)]
    return Variant(
        name,
        patch,
        found.device_bytes,
        found.capacity_bytes,
        found.host_bytes,
        case.machine.ram_free_bytes,
        sent(account, spec.train.per_device_train_batch_size * _length(spec, case)),
        hosted(account),
        errors[0] if errors else "",
        spec == case.spec,
    )


def _length(spec: RunSpec, case: Case) -> int:
    return min(spec.data.max_length, case.facts.longest_example or spec.data.max_length)
