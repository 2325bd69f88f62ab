"""The rules about a dataset, for each of several datasets as if it was the only one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from backend.config import Source
from backend.config.options import for_dataset, renamed
from backend.config.sources import key_of
from backend.rules.base import Case, Finding, Fix, Rule

OWN = {f"data.{name}" for name in Source.model_fields}


def findings(rule: Rule, case: Case, alone: Sequence[Case]) -> Iterator[Finding]:
    """The finding of a rule about `case`. If the rule is about the options of a dataset, its findings about the cases
    `alone`, joined into one."""
    if not alone or rule.fields[0] not in OWN:
        if finding := rule.finding(case):
            yield finding
        return
    found = [(index, finding) for index, each in enumerate(alone) if (finding := rule.finding(each))]
    if not found:
        return
    named = [_named(finding, case, index) for index, finding in found]
    yield replace(
        named[0],
        message=" ".join(finding.message for finding in named),
        fields=tuple(dict.fromkeys(name for finding in named for name in finding.fields)),
        fixes=tuple({str(fix.patch): fix for finding in named for fix in finding.fixes}.values()),
    )


def each_alone(case: Case) -> list[Case]:
    """A case for each dataset alone if there are several; none for a single dataset."""
    if not case.facts.datasets:
        return []
    return [
        replace(case, spec=for_dataset(case.spec, index), facts=facts)
        for index, facts in enumerate(case.facts.datasets)
    ]


def _named(finding: Finding, case: Case, index: int) -> Finding:
    """A finding about a dataset alone, with its options as they are written in the list."""
    return replace(
        finding,
        message=renamed(f"{case.spec.data.title_of(index)}: {finding.message}", index),
        fields=tuple(renamed(name, index) for name in finding.fields),
        fixes=tuple(_placed(fix, case, index) for fix in finding.fixes),
    )


def _placed(fix: Fix, case: Case, index: int) -> Fix:
    """A fix of a dataset's own options has the dataset in its label, and does not turn off the evaluation of other
    datasets."""
    if not OWN & fix.patch.keys():
        return fix
    others = (each for number, each in enumerate(case.spec.data.datasets) if number != index)
    evaluates = any(each.source == "builtin" or each.validation != "none" for each in others)
    patch = {
        key_of(index, name.removeprefix("data.")) if name in OWN else name: value
        for name, value in fix.patch.items()
        if not (evaluates and name.startswith(("eval.", "save.")))
    }
    return replace(fix, label=f"Dataset {index + 1}: {fix.label}", patch=patch)
