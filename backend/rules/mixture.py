"""Rules about several datasets together."""

from __future__ import annotations

from dataclasses import replace

from backend.data import is_absurd
from backend.rules.base import Case, Example, Fix, Violation, error, names, warning
from backend.rules.examples import DEMO, USER_DATA, USER_DATA_FACTS

TWO: dict[str, object] = {"data.sources": ({}, {"source": "builtin"})}
TWO_FACTS = replace(DEMO, datasets=(DEMO, DEMO))


@error(
    "DAT032",
    fields=("data.mixing", "data.sources"),
    title="The weights make an epoch far longer than the datasets",
    source="arithmetic: an epoch has more than 100 times the examples of all datasets",
    fails_on=Example({**TWO, "data.mixing": "interleave_all_exhausted", "data.weight": 0.001}, facts=TWO_FACTS),
    passes_on=Example({**TWO, "data.mixing": "interleave_all_exhausted", "data.weight": 0.1}, facts=TWO_FACTS),
)
def far_too_long_epoch(case: Case) -> Violation | None:
    """With interleave_all_exhausted, a small weight repeats the other datasets many times; with concatenate, a large
    weight repeats its own dataset. Such an epoch could take days."""
    if not case.facts.datasets:
        return None
    sizes = [size for size in case.facts.sizes(case.spec) if size is not None]
    if len(sizes) < len(case.facts.datasets):
        return None
    counts = case.facts.mixture(case.spec.data, sizes)
    if not is_absurd(sizes, counts):
        return None
    message = (
        f"An epoch would have {sum(counts):,} examples, but the datasets have only {sum(sizes):,}. Set more similar "
        "weights."
    )
    until_first = Fix(
        "Stop at the first exhausted", {"data.mixing": "interleave_first_exhausted"}, False, "a shorter epoch"
    )
    equal = {f"data.sources[{index}].weight": 1.0 for index in range(1, len(sizes))} | {"data.weight": 1.0}
    return Violation(message, (until_first, Fix("Set all weights to 1", equal, False, "other proportions")))


@warning(
    "DAT033",
    fields=("data.validation", "data.files"),
    title="Validation examples are in another training set",
    source="arithmetic: the validation split is taken from each dataset alone",
    fixes=(
        Fix(
            "Set no validation set for this dataset",
            {"data.validation": "none"},
            False,
            "no eval loss for this dataset",
        ),
    ),
    fails_on=Example(USER_DATA, facts=replace(USER_DATA_FACTS, split_files=("a.jsonl",))),
    passes_on=Example(USER_DATA, facts=USER_DATA_FACTS),
)
def validation_examples_in_another_dataset(case: Case) -> str | None:
    """The eval loss of examples that were trained on falls even if the model overfits. Datasets with the same files and
    data.validation_split have the same validation set."""
    if not case.facts.split_files or not case.spec.data.splits:
        return None
    return f"The validation set is part of {names(case.facts.split_files)}, which another dataset uses for training."


@error(
    "DAT039",
    fields=("data.files", "data.drop_duplicates"),
    title="A dataset has only duplicates of an earlier dataset",
    source="the trainer keeps the first of equal examples, and fails if a dataset has none left",
    fixes=(Fix("Keep duplicates", {"data.drop_duplicates": False}, False, "examples are trained on several times"),),
    fails_on=Example({**USER_DATA, "data.drop_duplicates": True}, facts=replace(USER_DATA_FACTS, repeats=1)),
    passes_on=Example({**USER_DATA, "data.drop_duplicates": True}, facts=USER_DATA_FACTS),
)
def dataset_of_duplicates(case: Case) -> str | None:
    """data.drop_duplicates keeps the first of equal examples in all datasets. No examples are left of a dataset if all
    of its files or examples belong to earlier datasets without data.max_samples."""
    if not case.spec.data.drop_duplicates or not (case.facts.repeats or case.facts.num_distinct == 0):
        return None
    if not case.facts.repeats:
        return (
            "Every example of this dataset is also in earlier datasets, and data.drop_duplicates removes it here. "
            "Remove this dataset; to use its examples more often, raise the weights of those."
        )
    return (
        f"All files of this dataset are also files of dataset {case.facts.repeats}, and data.drop_duplicates removes "
        "examples that an earlier dataset has. Remove this dataset; to use its examples more often, raise the weight "
        f"of dataset {case.facts.repeats}."
    )
