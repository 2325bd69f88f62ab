"""Inspection of the examples with the model's tokenizer and chat template, as the run will render and tokenize them.

Imports registry, config, data, inspect, model, train.data, run_log, templates. Called by `backend.train.worker`; what
it finds is shown before the run starts. It never downloads anything.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backend import registry
from backend.config import RunSpec
from backend.data import (
    DataFileError,
    InvalidExample,
    convert,
    detect_format,
    expand,
    file_patterns,
    read_examples,
    unpair,
)
from backend.inspect.examples import FORMAT
from backend.train import model
from backend.train.data import ConvertedExample, tokenizer_for
from backend.train.run_log import TrainError
from backend.train.templates import UnmarkedCompletions

MAX_ISSUES = 3
MAX_LENGTHS = 2000
BATCH = 16  # examples between two looks at the clock


def inspect(spec: dict[str, Any], base: str, folder: str, seconds: float) -> dict[str, Any]:
    """Facts about the examples of a spec (sections of a RunSpec; paths are relative to `base`) with the tokenizer in
    `folder`, from at most `seconds` of tokenization: `problem` of the tokenizer, `issues` (location, reason) of
    examples that cannot be rendered, `token_lengths`, how many examples have a trained token (`usable`), and whether
    all were tokenized (`complete`)."""
    run_spec, found = RunSpec.model_validate(spec), ExampleFacts()
    try:
        tokenizer = model.load_tokenizer(run_spec, model.ModelSource(folder, {"local_files_only": True}))
        found.vocabulary = max(tokenizer.get_vocab().values()) + 1
        if run_spec.data.chat_template == "model":
            found.has_chat_template = bool(tokenizer.chat_template)
        _tokenize(run_spec, Path(base), tokenizer, time.monotonic() + seconds, found)
    except TrainError as error:
        found.problem = str(error)
    return found.as_json()


@dataclass
class ExampleFacts:
    """The result, while it is collected."""

    problem: str = ""
    has_chat_template: bool | None = None  # of the tokenizer; None where the run sets another one
    vocabulary: int = 0  # the largest token id + 1
    checked: int = 0
    usable: int = 0  # training examples with a trained token
    complete: bool = False
    issues: list[tuple[str, str]] = field(default_factory=list)
    token_lengths: list[int] = field(default_factory=list)  # of the first MAX_LENGTHS examples
    longest: int = 0  # of all examples that were tokenized
    counts: Counter[str] = field(default_factory=Counter)

    def as_json(self) -> dict[str, Any]:
        """As the client reads it."""
        return {"format": FORMAT, **vars(self), "counts": dict(self.counts)}


def _tokenize(spec: RunSpec, base: Path, tokenizer: Any, until: float, found: ExampleFacts) -> None:
    """Fill `found` from the training examples, then from the validation examples."""
    to_columns: Any = None
    for is_training, example in _examples(spec, base):
        if to_columns is None:
            if found.has_chat_template is False and spec.train.stage != "pretraining" and "text" not in example.value:
                return  # the rule about a missing chat template says it
            to_columns = tokenizer_for(spec, tokenizer, [example])
        if found.checked % BATCH == 0 and time.monotonic() > until:
            return
        found.checked += 1
        try:
            columns, counts = to_columns([example])
        except TrainError as error:
            found.counts["unmarked"] += isinstance(error.__cause__, UnmarkedCompletions)
            if len(found.issues) < MAX_ISSUES:
                found.issues.append((example.location, str(error).removeprefix(f"{example.location}: ").rstrip(".")))
            continue
        found.counts += counts
        found.usable += is_training and any(len(values) for values in columns.values())
        if length := counts["longest_sequences"] or counts["tokens"]:  # of a pair, the longer sequence
            found.longest = max(found.longest, length)
            if len(found.token_lengths) < MAX_LENGTHS:
                found.token_lengths.append(length)
    found.complete = True


def _examples(spec: RunSpec, base: Path) -> Iterator[tuple[bool, ConvertedExample]]:
    """(whether it is a training example, the example), for examples that can be read and converted; the others are
    reported by the inspection of the data files."""
    for is_training, files in zip((True, False), file_patterns(spec.data), strict=True):
        for path in expand(files, base):
            yield from ((is_training, example) for example in _converted(spec, path))


def _converted(spec: RunSpec, path: Path) -> Iterator[ConvertedExample]:
    """The examples of one file, up to the first that cannot be read."""
    data, formats = spec.data, registry.STAGES[spec.train.stage].formats
    format = "" if data.source == "builtin" or data.format == "auto" else data.format
    with suppress(DataFileError):
        for line, row in read_examples(path):
            format = format or detect_format(row, formats) or ""
            if format not in formats:
                return
            try:
                value = convert(row, format, data)
            except InvalidExample:
                continue
            for each in unpair(value) if spec.train.stage == "kto" else [value]:
                yield ConvertedExample(f"{path}, line {line}", each)
