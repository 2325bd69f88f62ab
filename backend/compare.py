"""Comparison of all parallel strategies for one spec and machine: memory, communication, errors, and a recommendation.

Imports config, memory and rules. Nothing is launched: every strategy is checked and estimated as a spec of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from backend import registry
from backend.config import RunSpec
from backend.config.options import effective
from backend.memory import MemoryContext
from backend.memory.communication import host_bytes, network_bytes
from backend.rules import Case
from backend.rules.base import amount
from backend.rules.memory_remedies import available_gpus, other_errors, smaller_batches, strategy_patches

HOST_TRAFFIC_WEIGHT = 4  # a byte between device and host costs as much as this many bytes between devices


@dataclass(frozen=True)
class Variant:
    """A spec with a strategy: the patch that selects it, the peak on each device and in host RAM, and the bytes that
    each device sends per optimizer step, to other devices and to the host."""

    name: str
    patch: Mapping[str, Any]
    device_bytes: int
    capacity_bytes: int
    host_bytes: int
    ram_bytes: int
    sent_bytes: int
    host_traffic_bytes: int
    error: str  # title of the first error that is not about memory; '' without one
    is_current: bool  # the strategy of the spec

    @property
    def fits(self) -> bool:
        """Whether device memory and host RAM suffice."""
        return self.device_bytes <= self.capacity_bytes and self.host_bytes <= self.ram_bytes

    @property
    def runs(self) -> bool:
        """Whether it fits and no rule reports an error."""
        return self.fits and not self.error

    @property
    def cost(self) -> int:
        """The weighted communication of an optimizer step."""
        return self.sent_bytes + HOST_TRAFFIC_WEIGHT * self.host_traffic_bytes


def variants(case: Case, extra_patch: Mapping[str, Any] = {}) -> list[Variant]:
    """Every recommended strategy, each with `extra_patch` applied too; [] if the model's shape is not known."""
    if case.shape is None or case.shape.activations_unknown:
        return []
    patched = Case(case.with_patch(extra_patch), case.machine, case.facts)
    return [_variant(case, label, {**extra_patch, **patch}) for _, label, patch in strategy_patches(patched)]


def recommend(case: Case, known: list[Variant] | None = None) -> tuple[Variant, str] | None:
    """The variant that runs, uses every device and communicates least, with the reason; None if none runs. `known` are
    the variants of the case, if they are computed already."""
    several = len(available_gpus(case)) > 1 and case.run.device == case.machine.device
    for extra_patch, description in _smaller_settings(case):
        found = variants(case, extra_patch) if extra_patch or known is None else known
        found = [v for v in found if not several or v.patch["parallel.strategy"] in registry.MULTI_PROCESS]
        running = sorted((v for v in found if v.runs), key=lambda v: v.cost)
        if running:
            best = running[0]
            too_large = [v.name for v in found if not v.error and not v.fits and v.cost <= best.cost]
            reason = (
                f"It needs {amount(best.device_bytes)} of {amount(best.capacity_bytes)} per device{description} and "
                "has the least communication of the strategies that fit"
            )
            return best, f"{reason}; {', '.join(too_large)} would not fit." if too_large else f"{reason}."
    return None


def _smaller_settings(case: Case) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Patches that reduce activation memory, and their description: none, activation checkpointing, smaller batches."""
    checkpointing = {"train.activation_checkpointing": True}
    yield {}, ""
    yield checkpointing, " with activation checkpointing"
    for patch in smaller_batches(case):
        size = patch["train.per_device_train_batch_size"]
        yield {**checkpointing, **patch}, f" with activation checkpointing and a per-device batch size of {size}"


def _variant(case: Case, name: str, patch: Mapping[str, Any]) -> Variant:
    spec = effective(case.with_patch(patch))
    other = Case(spec, case.machine, case.facts)
    estimate, shape = other.estimate, case.facts.shape
    assert shape is not None
    context = MemoryContext(spec, other.run, case.machine, shape, case.facts.longest_example)
    errors = [rule.title for rule in other_errors(other)]
    return Variant(
        name,
        patch,
        estimate.device_bytes,
        estimate.capacity_bytes,
        estimate.host_bytes,
        case.machine.ram_free_bytes,
        network_bytes(context, spec.train.per_device_train_batch_size * _sequence_length(spec, case)),
        host_bytes(context),
        errors[0] if errors else "",
        spec == case.spec,
    )


def _sequence_length(spec: RunSpec, case: Case) -> int:
    return min(spec.data.max_length, case.facts.longest_example or spec.data.max_length)
