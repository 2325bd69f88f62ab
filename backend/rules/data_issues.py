"""What rules say about examples and data files with errors."""

from __future__ import annotations

from collections.abc import Iterable

from backend.data import file_of
from backend.inspect import DataIssue
from backend.rules.base import Case, Fix, names
from backend.wording import counted


def summary(issues: list[DataIssue], total: int = 0, is_exact: bool = False) -> str:
    """The first three errors, with the other examples that have the same one, and how many examples have errors:
    `total`, of which `issues` has the first ones of each file. `is_exact`: all examples were checked."""
    groups: dict[tuple[str, str], list[DataIssue]] = {}
    for issue in issues:
        groups.setdefault((_file_of(issue), issue.message), []).append(issue)
    shown, sentences = list(groups.items())[:3], []
    for (file, _), (first, *others) in shown:
        sentences.append(f"{first}.")
        if others:
            where = names([issue.location.removeprefix(f"{file}, ") for issue in others])
            sentences.append(f"{where[0].upper()}{where[1:]} {'has' if len(others) == 1 else 'have'} the same error.")
    hidden = [issue for _, group in list(groups.items())[3:] for issue in group]
    total = max(total, sum(issue.is_example for issue in issues))
    if total > sum(issue.is_example for _, group in shown for issue in group):
        have = "has" if total == 1 else "have"
        sentences.append(f"In total, {'' if is_exact else 'at least '}{counted(total, 'example')} {have} errors.")
    if files := sum(not issue.is_example for issue in hidden):
        sentences.append(f"And {counted(files, 'more file')} cannot be used.")
    return " ".join(sentences)


def _file_of(issue: DataIssue) -> str:
    """The file of an example, or the location of another issue."""
    return file_of(issue.location) if issue.is_example else issue.location


def fields_of(issues: Iterable[DataIssue]) -> tuple[str, ...]:
    """The options that name the files of these issues."""
    return tuple(dict.fromkeys(issue.field for issue in issues))


def rendered_issues(case: Case) -> list[DataIssue]:
    """The examples that the run would render, and cannot. It renders those of the validation files only for the eval
    loss and for generations."""
    renders = case.spec.eval.strategy != "no" or case.spec.eval.num_generations > 0
    found = case.facts.unrenderable_examples
    return [issue for issue in found if renders or issue.field != "data.validation_files"]


def unrenderable_summary(case: Case, issues: list[DataIssue]) -> str:
    """`summary` of examples that cannot be rendered."""
    facts = case.facts
    counts = {"data.files": facts.num_unrenderable, "data.validation_files": facts.num_unrenderable_validation}
    return summary(issues, sum(counts.get(field, 0) for field in fields_of(issues)), facts.all_checked)


def without_system_prompt(case: Case, reasons: Iterable[str]) -> list[Fix]:
    """The fix for a template that accepts no system turns, if all of them come from data.system_prompt."""
    is_cause = case.spec.data.system_prompt and any("system" in reason.lower() for reason in reasons)
    return [Fix("Remove the system prompt", {"data.system_prompt": ""}, False)] if is_cause else []
