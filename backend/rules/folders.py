"""The rule about the files that a folder or a pattern brings into the training set."""

from __future__ import annotations

from dataclasses import replace

from backend.rules.base import Case, Example, Fix, Violation, names, warning
from backend.rules.examples import USER_DATA_FACTS
from backend.wording import counted

MOST = 32  # files that a fix lists
FOLDER = {"data.source": "files", "data.files": ("data",)}
SPLITS = replace(
    USER_DATA_FACTS, own_split=("data/train.jsonl",), other_splits=("data/test.jsonl", "data/validation.jsonl")
)


@warning(
    "DAT042",
    fields=("data.files",),
    title="Files named like test or validation data are trained on",
    source="the names of the files in the folder, or of those that the pattern matches",
    manual_fix="Name the training files in data.files, for example with a pattern such as data/train*.",
    fails_on=Example(FOLDER, facts=SPLITS),
    passes_on=Example({**FOLDER, "data.files": ("data/train*",)}, facts=USER_DATA_FACTS),
)
def files_of_other_splits(case: Case) -> Violation | None:
    """A folder stands for all data files in it, and a pattern for all files that match. Datasets on the Hub, for
    example, have the files of all their splits in one folder. Scores on examples that were trained on say nothing about
    other examples."""
    others, own, data = case.facts.other_splits, case.facts.own_split, case.spec.data
    if not others or data.source != "files" or data.files == own:
        return None
    shown = [*others[:3], *([counted(len(others) - 3, "more file")] if len(others) > 3 else ())]
    message = f"data.files includes {names(shown)}, next to {counted(len(own), 'other file')}."
    if max(len(own), len(others)) > MOST:
        return Violation(message)
    fixes = [Fix("Leave them out", {"data.files": own}, False, "fewer training examples")]
    if data.validation != "files":
        validation = {"data.validation": "files", "data.validation_files": others}
        use = Fix("Use them as the validation set", {"data.files": own, **validation}, False, "fewer training examples")
        fixes.insert(0, use)
    return Violation(message, tuple(fixes))
