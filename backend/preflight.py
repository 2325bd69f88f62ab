"""What a spec comes to on a machine: the one call behind the page's check, its Start, and the shell.

Floor 4. Imports: below. It looks at files (glance), then everything else is pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from backend import registry
from backend.config import RunSpec
from backend.config.options import effective
from backend.inspect import InputFacts, inspect_inputs, resolve_paths, wait_for_architecture
from backend.launch.plan import plan
from backend.machine import Machine
from backend.memory import OVERHEAD, Estimate
from backend.modelspec import trainable
from backend.resolve import ResolvedRun
from backend.rules import Case, Finding, examine
from backend.rules.base import counted
from backend.runs import Plan


@dataclass(frozen=True)
class Report:
    """Findings, estimate and plan of one spec on one machine."""

    spec: RunSpec
    machine: Machine
    facts: InputFacts
    run: ResolvedRun
    estimate: Estimate
    findings: tuple[Finding, ...]
    plan: Plan

    @property
    def can_run(self) -> bool:
        """Whether no finding is an error."""
        return all(f.level != "error" for f in self.findings)

    @property
    def verdict(self) -> str:
        """One line: Can run; Can run, with 1 warning; Can run, memory unknown; Cannot run: 2 errors."""
        said = []
        for level in ("error", "warning"):
            if count := sum(f.level == level for f in self.findings):
                said.append(f"{count} {level}{'s' if count > 1 else ''}")
        if not self.can_run:
            return f"Cannot run: {', '.join(said)}"
        said = [f"with {said[0]}"] if said else []
        return ", ".join(["Can run", *said, *(["memory unknown"] if self.estimate.unknown else [])])

    @property
    def title(self) -> str:
        """The run's name, or one made of model and method."""
        return self.spec.logging.run_name or f"{self.about['model']} {self.about['method']}".strip()

    @property
    def about(self) -> Mapping[str, str]:
        """Model and method in a word each, for lists."""
        return {"model": self.spec.model.name, "method": registry.METHODS[self.spec.method.kind].label}

    @property
    def expected(self) -> Mapping[str, Any] | None:
        """The estimate, to be kept with a run, and what of it the run will measure; None if nobody knows."""
        if self.estimate.unknown:
            return None
        whole = self.estimate.device_bytes
        unseen = sum(row.bytes for row in self.estimate.rows if row.name == OVERHEAD)
        on_cpu = self.run.device == "cpu"  # where it measures all that the process holds
        return {**described(self.estimate), "measured_bytes": whole if on_cpu else whole - unseen}

    @property
    def summary(self) -> str:
        """What it amounts to: rows a step, steps where they are known, parameters trained."""
        spec, parts = self.spec, []
        train, rows = spec.train, counted(self.run.global_batch_size, "row")
        epochs = f"{train.num_train_epochs:g} epoch{'' if train.num_train_epochs == 1 else 's'}"
        by_steps = f"{counted(train.max_steps, 'step')} of {rows}"
        parts.append(by_steps if train.duration == "steps" else f"{epochs}, {rows} a step")
        if self.facts.shape:
            count, whole = trainable(spec, self.facts.shape), self.facts.shape.parameters
            parts.append(f"{_short(count)} of {_short(whole)} trained")
        return "; ".join(parts)


def preflight(spec: RunSpec, machine: Machine, base: Path, wait_seconds: float = 0) -> Report:
    """Inspect, check, estimate and plan. Relative paths in `spec` are relative to `base`. Never raises for the values
    of a spec. An architecture that is not known yet is read for up to `wait_seconds`."""
    if wait_seconds:
        wait_for_architecture(spec, base, seconds=wait_seconds)
    case = build_case(spec, machine, base)
    made = plan(case.spec, machine, run=case.run)
    return Report(case.spec, machine, case.facts, case.run, case.estimate, examine(case), made)


def build_case(spec: RunSpec, machine: Machine, base: Path) -> Case:
    """What rules judge: what has an effect in `spec`, and what its files show."""
    spec = resolve_paths(effective(spec), base)
    return Case(spec, machine, inspect_inputs(spec, base))


def described(found: Estimate) -> dict[str, Any]:
    """An estimate for JSON: its rows, and the totals by place."""
    return {
        **asdict(found),
        "device_bytes": found.device_bytes,
        "low_bytes": found.low_bytes,
        "high_bytes": found.high_bytes,
        "host_bytes": found.host_bytes,
        "disk_bytes": found.disk_bytes,
        "fits": found.fits,
    }


def _short(count: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)
