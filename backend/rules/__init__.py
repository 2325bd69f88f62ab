"""The catalog of rules, and `check`, which applies them to a spec.

A rule is a function in the module of its family, with a reason, a source, fixes and examples. Levels: error (the run
cannot work, so Start is refused), warning (it works, but not as requested), advice. Rules never change a spec: a fix is
a patch that the user applies.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pkgutil import walk_packages

from backend.config import RunSpec
from backend.config.options import edit, effective
from backend.inspect import InputFacts
from backend.machine import Machine
from backend.rules.base import RULES as _REGISTERED
from backend.rules.base import Case, Example, Finding, Fix, Rule, Violation
from backend.rules.datasets import each_alone, findings
from backend.rules.examples import DEMO, LAPTOP
from backend.rules.outdated import OUTDATED, Outdated

for _module in walk_packages(__path__, f"{__name__}."):
    import_module(_module.name)  # each adds its rules to _REGISTERED

LEVELS = {"error": 0, "warning": 1, "advice": 2}
RULES: tuple[Rule, ...] = tuple(sorted(_REGISTERED, key=lambda rule: rule.code))
FAMILIES = {  # the letters of a code -> topic
    "ADP": "Adapters",
    "CLU": "Clusters",
    "DAT": "Data",
    "HW": "Hardware and packages",
    "KRN": "Attention and kernels",
    "LCH": "Launch",
    "LLF": "LLaMA-Factory",
    "MDL": "Model and chat template",
    "MEM": "Memory",
    "MTH": "Fine-tuning method",
    "NOD": "Multi-node",
    "OPT": "Optimizer",
    "OUT": "Saved output",
    "PRC": "Precision",
    "QNT": "Quantization",
    "STG": "Training stage",
    "STR": "Distributed training",
    "TRN": "Training and checkpoints",
    "UNS": "Unsloth",
}


def check(spec: RunSpec, machine: Machine, facts: InputFacts) -> tuple[Finding, ...]:
    """All findings about `spec`: errors first, each level sorted by code."""
    return examine(Case(effective(spec), machine, facts))


def examine(case: Case, at_start: bool = True) -> tuple[Finding, ...]:
    """Same as `check`, for a case whose spec is effective: options that are hidden, and so have no effect, are at their
    defaults. Without `at_start`, rules about the moment before launch (ports, free disk, busy devices) are left out."""
    rules = (rule for rule in RULES if at_start or not rule.at_start)
    alone = each_alone(case)
    found = [finding for rule in rules for finding in findings(rule, case, alone)]
    return tuple(sorted(found, key=lambda finding: (LEVELS[finding.level], finding.code)))


@cache
def example_findings() -> Mapping[str, Finding]:
    """Code -> the finding of each rule in its failing example. The documentation lists the fixes of these findings,
    because a rule alone does not have those that are computed per case."""
    found = {}
    for rule in RULES:
        spec = effective(edit(RunSpec(), rule.fails_on.patch))
        case = Case(spec, rule.fails_on.machine or LAPTOP, rule.fails_on.facts or DEMO)
        if finding := rule.finding(case):
            found[rule.code] = finding
    return found
