"""The rules about the files that a folder or a pattern brings into the training set."""

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
DOCUMENTS = replace(
    USER_DATA_FACTS, left_out_documents=("data/a.md", "data/b.txt"), other_than_documents=("data/train.jsonl",)
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
    message = f"data.files includes {_first(others, 'more file')}, next to {counted(len(own), 'other file')}."
    if max(len(own), len(others)) > MOST:
        return Violation(message)
    fixes = [Fix("Leave them out", {"data.files": own}, False, "fewer training examples")]
    if data.validation != "files":
        validation = {"data.validation": "files", "data.validation_files": others}
        use = Fix("Use them as the validation set", {"data.files": own, **validation}, False, "fewer training examples")
        fixes.insert(0, use)
    return Violation(message, tuple(fixes))


@warning(
    "DAT044",
    fields=("data.files",),
    title="Text documents of a folder are not trained on",
    source="Footplate uses the documents of a folder only if it has no other data files",
    manual_fix="Name the files to train on in data.files, for example with a pattern such as data/*.md.",
    fails_on=Example(FOLDER, facts=DOCUMENTS),
    passes_on=Example({**FOLDER, "data.files": ("data/*.jsonl",)}, facts=USER_DATA_FACTS),
)
def documents_next_to_data_files(case: Case) -> Violation | None:
    """A folder stands for the data files in it. Text documents next to files of other types, such as notes about a
    dataset, are not examples of it."""
    documents, files, data = case.facts.left_out_documents, case.facts.other_than_documents, case.spec.data
    if not documents or data.source != "files" or data.files in (files, documents):
        return None
    message = (
        f"The run does not train on {_first(documents, 'more document')}: text documents are not used in a folder that "
        "has data files of other types."
    )
    fixes = []
    if len(files) <= MOST:
        fixes.append(Fix("List the files that are used", {"data.files": files}))
    if len(documents) <= MOST and len(data.files) == 1:
        instead = {"data.files": documents, "data.format": "auto"}
        fixes.append(Fix("Train on the documents instead", instead, False, "other training examples"))
    return Violation(message, tuple(fixes))


def _first(files: tuple[str, ...], more: str) -> str:
    """The first three files, and how many more there are."""
    return names([*files[:3], *([counted(len(files) - 3, more)] if len(files) > 3 else ())])
