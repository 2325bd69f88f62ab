"""The catalogue of rules, and `check`: what cannot work, what works but not as asked, and what would be better.

Floor 3. Imports: below. One rule is one function in the file of its family, with its reason, source, fixes and
examples. Levels: error (cannot work: Start is refused), warning (works, but not as asked), advice. None changes a
spec; a fix is a patch that a person applies.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from backend.config import RunSpec
from backend.config.options import edit, effective
from backend.inspect import InputFacts
from backend.machine import Machine
from backend.rules import (
    accelerate_launcher,
    adapter,
    data,
    hardware,
    kernels,
    launch,
    machine_state,
    memory,
    method,
    nodes,
    optimizer,
    optimizer_settings,
    quantization,
    requirements,
    stages,
    training,
    unsloth,
)
from backend.rules.base import RULES as _ADDED
from backend.rules.base import Case, Example, Finding, Fix, Rule, Violation
from backend.rules.distributed import (
    extra_config,
    extra_config_conflicts,
    sequence_parallel,
    sharding,
    strategy,
)
from backend.rules.examples import DEMO, LAPTOP
from backend.rules.outdated import OUTDATED, Outdated

__all__ = [
    "FAMILIES",
    "OUTDATED",
    "RULES",
    "Case",
    "Example",
    "Finding",
    "Fix",
    "Outdated",
    "Rule",
    "Violation",
    "check",
    "example_findings",
]  # fmt: skip

LEVELS = {"error": 0, "warning": 1, "advice": 2}
RULES: tuple[Rule, ...] = tuple(sorted(_ADDED, key=lambda rule: rule.code))
FAMILIES = {
    "ADP": (adapter, "Adapters"),
    "DAT": (data, "Rows"),
    "HW": ((hardware, machine_state, requirements), "Machine"),
    "KRN": (kernels, "Attention and kernels"),
    "LCH": ((launch, accelerate_launcher), "Launch"),
    "MDL": (method, "Model and template"),
    "MEM": (memory, "Memory"),
    "MTH": (method, "Method"),
    "NOD": (nodes, "Nodes"),
    "OPT": ((optimizer, optimizer_settings), "Optimizer"),
    "OUT": (training, "What is kept"),
    "PRC": ((hardware, kernels), "Precision"),
    "QNT": (quantization, "Packed weights"),
    "STG": (stages, "Stage"),
    "STR": ((strategy, sharding, sequence_parallel, extra_config, extra_config_conflicts), "Strategy"),
    "TRN": (training, "Training and checkpoints"),
    "UNS": (unsloth, "Unsloth"),
}


def check(spec: RunSpec, machine: Machine, facts: InputFacts) -> tuple[Finding, ...]:
    """Every finding on `spec`, errors first, in the order of codes."""
    return examine(Case(effective(spec), machine, facts))


def examine(case: Case) -> tuple[Finding, ...]:
    """As `check`. The case's spec is effective: hidden options have no effect, so they raise nothing."""
    found = [finding for rule in RULES if (finding := rule.finding(case)) is not None]
    return tuple(sorted(found, key=lambda finding: (LEVELS[finding.level], finding.code)))


@cache
def example_findings() -> Mapping[str, Finding]:
    """Code -> what each rule finds in its failing example. Many fixes are computed for the case, so a rule alone does
    not have them."""
    found = {}
    for rule in RULES:
        spec = effective(edit(RunSpec(), rule.fails_on.patch))
        case = Case(spec, rule.fails_on.machine or LAPTOP, rule.fails_on.facts or DEMO)
        if finding := rule.finding(case):
            found[rule.code] = finding
    return found
