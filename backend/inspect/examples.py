"""Inspection of all examples in the worker process, with the model's tokenizer and chat template where it has them.

A check requests it and shows what is known so far; the command line and Start wait for it. The result is kept until a
file changes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from backend import registry
from backend.config import RunSpec
from backend.data import DataFileError, expand, file_patterns
from backend.inspect.data_files import inspect_data_files
from backend.inspect.facts import DataIssue, InputFacts
from backend.inspect.model_folder import has_own_code, local_folder
from backend.inspect.worker import SETTING, Result, Show, WorkerCache, installed_versions, may_start, no_show
from backend.paths import cache_folder

# Raise it when the result of backend.train.tokenize_examples or show_examples changes: it is part of the cache key.
FORMAT = 36
# Options that have no effect on a single example.
LATER = {"max_samples", "validation_split", "packing", "dataset_num_proc", "mixing", "weight", "sources"}
TOKENIZER_FILES = ("token*", "vocab*", "merges*", "*.jinja", "chat_template*", "special_tokens*", "spiece*", "added*")

# Fact -> the count that it is.
COUNTS = {
    "num_identical_pairs": "identical",
    "num_dropped": "dropped",
    "num_long_pairs": "long",
    "num_unmarked": "unmarked",
    "num_endless": "endless",
    "num_weightless": "weightless",
    "num_skipped": "skipped",
    "num_skipped_texts": "skipped_texts",
    "num_with_weights": "with_weights",
    "num_weighted": "weighted",
    "num_with_margin": "with_margin",
    "num_copies": "copies",
    "num_copies_in_validation": "copies_in_validation",
    "num_contradictions": "contradictions",
    "num_starts": "starts",
    "num_different_starts": "different_starts",
}


class ExampleReports(WorkerCache):
    """What `backend.train.tokenize_examples` found in the examples of a spec."""

    name, task, format = "examples", "tokenizing the examples", FORMAT


class ShownExamples(WorkerCache):
    """Some examples of a spec, token by token, from `backend.train.show_examples`."""

    name, task, format = "shown_examples", "rendering the example", FORMAT

    def _store(self, key: str, result: Result) -> None:
        """Store nothing: examples are quick to render again, and the folder would grow without a limit."""


@lru_cache(maxsize=8)
def _reports(folder: Path) -> ExampleReports:
    return ExampleReports(folder, seconds=120)  # until the first progress report; the libraries load in 5 s


@lru_cache(maxsize=8)
def _shown(folder: Path) -> ShownExamples:
    return ShownExamples(folder, seconds=60)


def inspect_examples(spec: RunSpec, base: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """The InputFacts that the worker has found so far; {} if nothing can be found. Returns immediately."""
    request = _request(spec, base, environment)
    if request is None:
        return {}
    reports, start = _reports(cache_folder(environment)), may_start(environment)
    found = reports.find(_key(request), _body(request), start)
    if isinstance(found, str):
        return {"examples_problem": found}
    if found is None:
        progress = reports.progress(_key(request))
        facts = facts_from(progress, spec) if progress else {"num_checked": 0, "all_checked": False}
        return {**facts, "examples_pending": True} if start else {}
    return facts_from(found, spec)


def merge_facts(facts: Mapping[str, Any], examples: Mapping[str, Any]) -> dict[str, Any]:
    """The facts, replaced by those of `inspect_examples`, which finds again what `inspect_data_files` has found."""
    issues = dict.fromkeys((*facts.get("data_issues", ()), *examples.get("data_issues", ())))
    return {**facts, **examples, "data_issues": tuple(issues)}


def wait_for_examples(spec: RunSpec, base: Path, environment: Mapping[str, str], seconds: float, show: Show) -> None:
    """Wait until `inspect_examples` knows all examples, at most `seconds`. `show` gets the progress as a text."""
    request = _request(spec, base, environment)
    if request is None or not may_start(environment):
        return

    def show_progress(progress: Result) -> None:
        if progress:
            checked = f"{progress['num_train'] + progress['num_validation']:,}"
            show(f"Checked {checked}{f' of {total:,}' if total else ''} examples")
        else:
            show("Loading the tokenizer" if request["folder"] else "Reading the examples")

    total = InputFacts(**inspect_data_files(spec, base)).num_in_files
    _reports(cache_folder(environment)).wait_for(_key(request), _body(request), seconds, show_progress)


def show_examples(
    spec: RunSpec,
    base: Path,
    environment: Mapping[str, str],
    first: int,
    count: int,
    seconds: float,
    show: Show = no_show,
) -> Result | str | None:
    """`count` examples from the position `first`, 0 for the first of the training files, as `show` of
    backend.train.show_examples returns them; or why they cannot be shown, as a sentence; None while the worker is busy
    with them. Waits at most `seconds`; meanwhile `show` gets what it waits for."""
    if spec.data.source == "hub":
        return "Examples of datasets on the Hub are not shown. Download the dataset and set data.source to files."
    if spec.launch.trainer == "llamafactory":
        return "Examples are not shown: LLaMA-Factory renders and tokenizes them with its own code."
    try:
        request = _inputs(spec, base, environment)
    except (OSError, DataFileError) as error:
        return f"The data files cannot be read: {error}."
    if not request["folder"]:
        return _no_tokenizer(spec, local_folder(spec, base, environment))
    if not may_start(environment):
        return f"The examples are not read because {SETTING} is off."
    range_ = {"first": first, "count": count}
    shown, key, body = _shown(cache_folder(environment)), _key({**request, **range_}), _body(request, **range_)
    found = shown.find(key, body)
    if found is None and seconds:
        found = shown.wait_for(key, body, seconds, lambda _: show("Rendering the examples"))
    return f"The example cannot be shown: {found}." if isinstance(found, str) else found


def summarize_examples(spec: RunSpec, base: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """What is known about all examples, for a picture: "complete", "tokenized" (examples); "lengths" in tokens, of the
    first 2,000 examples, ascending, and "longest" of all; "rows" (how many positions there are, as `show_examples`
    counts them), "longest_row" (a position), and "places": kind of problem -> positions of examples that have it, the
    first 50. Only "complete" if nothing is known. Returns immediately."""
    request = _request(spec, base, environment)
    if request is None:
        return {"complete": True}
    reports, key = _reports(cache_folder(environment)), _key(request)
    result = reports.find(key, _body(request), may_start(environment))
    found = result or reports.progress(key)
    if not found or isinstance(found, str):
        return {"complete": result is not None or not may_start(environment)}
    lengths = sorted(found["token_lengths"])
    state = {"complete": result is not None, "tokenized": found["tokenized"]}
    return {**state, "lengths": lengths, **{name: found[name] for name in ("longest", "longest_row", "rows", "places")}}


def _runs_code(spec: RunSpec, folder: Path) -> bool:
    """Whether loading the tokenizer would run Python code of the model."""
    return spec.model.trust_remote_code and has_own_code(folder)


def _no_tokenizer(spec: RunSpec, folder: Path | None) -> str:
    if folder and _runs_code(spec, folder):
        return "The tokenizer may run custom code (trust_remote_code), so examples are not rendered before the start."
    if spec.model.source == "path":
        return "The model folder has no tokenizer files, so the examples cannot be rendered."
    is_created = spec.model.source == "builtin" and not registry.BUILTIN_MODELS[spec.model.builtin].download_bytes
    how = "creates" if is_created else "downloads"
    return f"The tokenizer is not on this machine yet. The first start of a run, or footplate prepare, {how} it."


def _request(spec: RunSpec, base: Path, environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Same as `_inputs`, but None for data on the Hub, and if `inspect_data_files` finds the same."""
    if spec.data.source == "hub":
        return None
    try:
        request = _inputs(spec, base, environment)
    except (OSError, DataFileError):
        return None  # reported by the inspection of the files
    known = not request["folder"] and inspect_data_files(spec, base)["counts_are_exact"]
    return None if not request["files"] or known else request


def _inputs(spec: RunSpec, base: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """What the worker needs and the result depends on. Without a `folder`, examples are only read: the model is not
    downloaded, or its tokenizer has custom code, which is not run while a form is filled in. Raises OSError,
    DataFileError."""
    folder = local_folder(spec, base, environment)
    data = _files(_data_files(spec), base)
    model = _files(TOKENIZER_FILES, folder) if folder and not _runs_code(spec, folder) else []
    place = str(folder) if model else ""
    return {
        "spec": _inspected(spec, base),
        "base": str(base),
        "folder": place,
        "files": [*data, *model] if data else [],
    }


def _inspected(spec: RunSpec, base: Path) -> dict[str, Any]:
    """The sections that decide how examples are read, rendered and tokenized."""
    model = spec.model.model_dump(include={"source", "builtin", "hub_id", "revision", "path"})
    data = spec.data.model_dump(exclude=LATER)
    if template := spec.data.chat_template_file:
        data["chat_template_file"] = str(base / Path(template).expanduser())
    train: dict[str, Any] = {"stage": spec.train.stage}
    if spec.data.streaming and spec.data.splits:  # the content of an example decides whether it is held out
        data["validation_split"], train["seed"] = spec.data.validation_split, spec.train.seed
    return {"model": model, "data": data, "train": train}


def _data_files(spec: RunSpec) -> tuple[str, ...]:
    data = spec.data
    template = (data.chat_template_file,) if data.chat_template == "file" and data.chat_template_file else ()
    return (*chain(*file_patterns(data)), *template)


def _files(patterns: tuple[str, ...], base: Path) -> list[tuple[str, int, int]]:
    """(path, size, modification time) of the files that match. Raises OSError, DataFileError."""
    found = []
    for pattern in patterns:
        paths = expand([pattern], base) if patterns is not TOKENIZER_FILES else sorted(base.glob(pattern))
        found += [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths if path.is_file()]
    return found


def _key(request: Mapping[str, Any]) -> str:
    versions = installed_versions("transformers", "tokenizers", "trl", "jinja2")
    text = json.dumps([FORMAT, versions, request], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _body(request: Mapping[str, Any], **more: int) -> Result:
    return {"examples": {**{name: request[name] for name in ("spec", "base", "folder")}, **more}}


def facts_from(found: Result, spec: RunSpec) -> dict[str, Any]:
    """InputFacts from what the worker has found."""
    option = "data.builtin" if spec.data.source == "builtin" else "data.files"
    validation = "data.builtin" if spec.data.source == "builtin" else "data.validation_files"
    facts: dict[str, Any] = {
        "tokenizer_problem": found["problem"],
        "tokenizer_size": found["vocabulary"],
        "known_size": found["known_vocabulary"],
        "data_issues": tuple(
            DataIssue(option if is_training else validation, place, text, is_example)
            for is_training, place, text, is_example in found["data_issues"]
        ),
        "unrenderable_examples": tuple(
            DataIssue(option if is_training else validation, place, text, True)
            for is_training, place, text in found["unrenderable"]
        ),
        "num_invalid": found["invalid"][0],
        "num_invalid_validation": found["invalid"][1],
        "num_unrenderable": found["num_unrenderable"][0],
        "num_unrenderable_validation": found["num_unrenderable"][1],
        "num_checked": found["num_train"] + found["num_validation"],
        "all_checked": found["complete"],
        "num_usable": found["usable"] if found["complete"] and found["tokenized"] else None,
        "unusable_positions": tuple(found["unusable"]) if found["unusable"] is not None else None,
        "num_usable_validation": found["usable_validation"],
        "num_held_out": found["held_out"],
        "held_out_positions": tuple(found["held_out_positions"]),
        "unread_keys": tuple(sorted(found["unread"].items())),
        "special_tokens": tuple(sorted(found["special"].items())),
        "unknown_ends": tuple(sorted(found["unknown_ends"].items())),
        "unlike_llamafactory": tuple(sorted(found["unlike_llamafactory"].items())),
        "split_markers": tuple(found["split_markers"]),
        "start_difference": tuple(found["start"] or ()),
        "start_kwargs": json.dumps(found["start_kwargs"]) if found["start_kwargs"] else "",
        "skipped": tuple(found["skipped"]),
        "equal_places": tuple((kind, *places) for kind, places in sorted(found["equal_places"].items())),
        **{name: found["counts"].get(count, 0) for name, count in COUNTS.items()},
        "digests": tuple(found.get("digests", ())),  # a progress report has none
    }
    if found["complete"] and all(issue.is_example for issue in facts["data_issues"]):
        facts |= {"num_examples": found["num_train"], "counts_are_exact": True}
        if file_patterns(spec.data)[1]:
            facts["num_validation_examples"] = found["num_validation"]
    if found["complete"] and any(found["labels"]):
        facts["label_counts"] = tuple(found["labels"])
    if found["has_chat_template"] is not None:
        facts["has_chat_template"] = found["has_chat_template"]
    facts |= _lengths_from(found, drops_examples=spec.launch.trainer == "footplate")
    if labeled := found["counts"].get("labeled"):
        facts["labeled_share"] = labeled / found["counts"]["tokens"]
    return facts


def _lengths_from(found: Result, drops_examples: bool) -> dict[str, Any]:
    """What is known about the tokens of the examples; `drops_examples`: the trainer drops those without a trained
    token."""
    facts: dict[str, Any] = {}
    if found["token_lengths"]:
        facts["token_lengths"] = _with_longest(found["token_lengths"], found["longest"])
    if found["trained_lengths"] and drops_examples:
        facts["trained_lengths"] = _with_longest(found["trained_lengths"], found["longest_trained"])
    if found["complete"] and len(found["token_lengths"]) == found["num_train"]:
        facts["lengths_in_order"] = tuple(found["token_lengths"])
    if found["measured"]:
        facts["sequences_per_example"] = found["sequences"] / found["measured"]
    return facts


def _with_longest(lengths: list[int], longest: int) -> tuple[int, ...]:
    """The lengths of the first examples in ascending order, and that of the longest of all."""
    first = sorted(lengths)
    return (*first, longest) if longest > first[-1] else tuple(first)
