"""The facts about the data of a run, which has one dataset or several: about each alone, and about all together."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from backend.config import RunSpec, Source
from backend.config.options import for_dataset, renamed
from backend.data import DataFileError, expand, file_patterns
from backend.inspect.data_files import inspect_data_files
from backend.inspect.examples import inspect_examples, merge_facts
from backend.inspect.facts import DataIssue, InputFacts
from backend.wording import counted, ratio

Facts = dict[str, Any]
# How the facts about each dataset are combined: added up, joined or counted; any other fact has the first value that is
# set.
SUMS = (
    "num_examples", "num_validation_examples", "num_checked", "num_usable",
    "num_usable_validation", "num_identical_pairs", "num_unmarked", "num_endless", "num_weightless",
    "num_starts", "num_different_starts", "num_skipped", "num_skipped_texts", "num_copies", "num_copies_in_validation",
    "num_contradictions", "num_with_weights", "num_weighted", "num_invalid", "num_invalid_validation",
    "num_unrenderable", "num_unrenderable_validation", "num_with_margin",
)  # fmt: skip
TUPLES = ("data_issues", "unrenderable_examples", "skipped", "shared_files", "equal_places")
# Fields of a Source.
SELECTING = {"files", "max_samples", "validation", "validation_split", "validation_files", "weight"}
OWN = {"unusable_positions", "held_out_positions", "lengths_in_order", "digests"}  # not combined
COUNTED = ("unread_keys", "special_tokens", "unknown_ends", "unlike_llamafactory")


def inspect_datasets(spec: RunSpec, loaded: RunSpec, base: Path, environment: Mapping[str, str], model: Facts) -> Facts:
    """The InputFacts about the model, `model`, and about the data. `loaded`: the spec with the model that is loaded,
    which may be that of an earlier run. With several datasets, "datasets" has what is known about each."""
    found = []
    for index in range(len(spec.data.datasets)):
        files = inspect_data_files(for_dataset(spec, index), base)
        found.append(merge_facts(model | files, inspect_examples(for_dataset(loaded, index), base, environment)))
    if not spec.data.sources:
        return found[0]
    together = [
        {**shared, "num_distinct": _num_distinct(spec, found, index)}
        for index, shared in enumerate(_shared_files(spec, base))
    ]
    each = tuple(InputFacts(**{**facts, **shared}) for facts, shared in zip(found, together, strict=True))
    facts = {**model, **combined(each, {name for facts in found for name in facts})}
    return {**facts, "label_counts": _label_counts(spec, InputFacts(**facts))}


def _label_counts(spec: RunSpec, facts: InputFacts) -> tuple[int, int] | None:
    """The desirable and undesirable completions of an epoch; None if a dataset has no labels or an unknown size."""
    sizes, labels = facts.sizes(spec), [each.label_counts or (0, 0) for each in facts.datasets]
    if not all(sizes) or not all(map(any, labels)):
        return None
    counts = facts.mixture(spec.data, [size or 0 for size in sizes])  # of which each dataset has its share of labels
    desirable, undesirable = (
        sum(count * of[side] / sum(of) for count, of in zip(counts, labels, strict=True)) for side in (0, 1)
    )
    return max(round(desirable), desirable > 0), max(round(undesirable), undesirable > 0)


def _shared_files(spec: RunSpec, base: Path) -> list[Facts]:
    """For each dataset: its validation files that any dataset trains on; the files from which it splits off a
    validation set, but another dataset does not split off the same part; and the earlier dataset that it repeats."""
    files = []
    for source in spec.data.datasets:
        try:
            files.append([{os.path.realpath(path) for path in expand(part, base)} for part in file_patterns(source)])
        except (OSError, DataFileError):  # reported by the inspection of the files
            files.append([set(), set()])
    trained = set().union(*(train for train, _ in files))
    found = []
    for index, (source, (train, validation)) in enumerate(zip(spec.data.datasets, files, strict=True)):
        shared = trained & validation
        others = (
            files[number][0]
            for number, other in enumerate(spec.data.datasets)
            if other is not source and not (other.splits and _selects_as(source, train, other, files[number][0]))
        )
        split = train & set().union(*others) if source.splits else set()
        earlier = enumerate(zip(spec.data.datasets[:index], files[:index], strict=True), 1)
        repeats = next(
            (
                n
                for n, (other, (its, _)) in earlier
                if train and train <= its and not other.max_samples and _reads_as(other, source)
            ),
            0,
        )
        shares = {"shared_files": tuple(sorted(shared)), "split_files": tuple(sorted(split))}
        found.append({**shares, "repeats": repeats})
    return found


def _num_distinct(spec: RunSpec, found: Sequence[Facts], index: int) -> int | None:
    """How many training examples of a dataset the datasets before do not have; None if that is not known. Those of
    which only a part is used have other examples in each run with another seed."""
    own = {*found[index].get("digests", ())}
    before = zip(spec.data.datasets[:index], found, strict=False)
    earlier = (facts.get("digests", ()) for source, facts in before if not source.max_samples)
    return len(own - set().union(*earlier)) if own else None


def _reads_as(one: Source, other: Source) -> bool:
    """Whether two datasets make the same examples from the same file."""
    reading = Source.model_fields.keys() - SELECTING
    return one.model_dump(include=reading) == other.model_dump(include=reading)


def _selects_as(one: Source, its_files: set[str], other: Source, other_files: set[str]) -> bool:
    """Whether two datasets split the same examples."""
    return its_files == other_files and one.validation_split == other.validation_split


def combined(each: Sequence[InputFacts], known: Collection[str]) -> Facts:
    """The facts about all datasets; `known`: those that were inspected for each."""
    named = [_renamed(facts, index) for index, facts in enumerate(each)]
    facts: Facts = {"datasets": tuple(each)}
    for name in {*known, "shared_files"} - OWN:
        values = [getattr(own, name) for own in named]
        if name in SUMS:
            facts[name] = None if None in values else sum(values)
        elif name in TUPLES:
            facts[name] = tuple(dict.fromkeys(item for value in values for item in value))
        elif name in COUNTED:
            counts = Counter[str]()
            for value in values:
                counts.update(dict(value))
            facts[name] = tuple(sorted(counts.items()))
        else:
            facts[name] = next((value for value in values if value), values[0])
    facts["token_lengths"] = tuple(sorted(length for own in each for length in own.token_lengths))
    facts["trained_lengths"] = tuple(sorted(length for own in each for length in own.used_lengths))
    sizes = [sum(own.token_lengths) for own in each]
    labeled = sum(own.labeled_share * size for own, size in zip(each, sizes, strict=True))
    facts["labeled_share"] = labeled / sum(sizes) if sum(sizes) else 1.0
    for name in ("tokenizer_size", "known_size"):
        facts[name] = max(getattr(own, name) for own in each)
    facts["min_prompt_tokens"] = min((own.min_prompt_tokens for own in each if own.min_prompt_tokens), default=0)
    formats = {own.format for own in each}
    facts["format"] = formats.pop() if len(formats) == 1 else ""  # one format does not stand for all
    facts["counts_are_exact"] = all(own.counts_are_exact for own in each)
    facts["all_checked"] = all(own.all_checked for own in each)
    facts["num_validation_examples"] = sum(own.num_validation_examples or 0 for own in each)
    return facts


def _renamed(facts: InputFacts, index: int) -> InputFacts:
    """The facts, with the options of the dataset as they are written in the list."""

    def issues(found: tuple[DataIssue, ...]) -> tuple[DataIssue, ...]:
        return tuple(replace(issue, field=renamed(issue.field, index)) for issue in found)

    return replace(
        facts,
        data_issues=issues(facts.data_issues),
        unrenderable_examples=issues(facts.unrenderable_examples),
    )


def shares(spec: RunSpec, facts: InputFacts) -> list[str]:
    """What each of several datasets contributes to an epoch, a sentence each, '' where that is not known; none for a
    single dataset."""
    if not facts.datasets:
        return []
    sizes = facts.sizes(spec)
    known = [size for size in sizes if size is not None]
    if spec.data.mixing != "concatenate" and len(known) < len(sizes):  # an unknown size affects all shares
        return [""] * len(sizes)
    counts = facts.mixture(spec.data, [size or 0 for size in sizes])
    return [
        "" if size is None else _share(spec, size, count, each)
        for size, count, each in zip(sizes, counts, facts.datasets, strict=True)
    ]


def _share(spec: RunSpec, size: int, count: int, facts: InputFacts) -> str:
    splits, limit = spec.train.stage == "pretraining", spec.data.max_length
    lengths = [min(length, limit) for length in facts.used_lengths if length]
    what = counted(count, "sequence" if splits else "example")
    times = f" from {size:,} ({ratio(count / size)})" if count != size and size else ""
    share = sum(facts.used_lengths if splits else lengths) / max(1, len(lengths))
    if splits:  # into sequences
        share /= max(1, sum(-(-length // limit) for length in facts.used_lengths) / max(1, len(lengths)))
    tokens = f"; about {counted(round(count * share), 'token')}" if lengths else ""
    sure = "" if facts.counts_are_exact else "About "
    sure = "At most " if spec.data.drop_duplicates else sure  # copies in other datasets are not known before the run
    return f"{sure}{what} per epoch{times}{tokens}."
