"""What the first training examples say about how to use the model: their system prompt, without which outputs can
differ from what the model has learned, whether they have several turns, and whether they are plain text."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from backend.config import Data, RunSpec
from backend.config.options import SpecError, effective, for_dataset
from backend.data import DataFileError, InvalidExample, convert, detect_format, expand, file_patterns, read_examples
from backend.presets import read
from backend.registry import STAGES

MAX_EXAMPLES = 20
MAX_BYTES = 2**26  # larger files are not read if that means reading them whole
FOLLOWED = (".jsonl", ".csv", ".tsv")  # files that are read a line at a time


class FirstExamples(NamedTuple):
    """`system`: the system prompt of all of them, else data.system_prompt; `has_earlier_turns`: whether one has more
    than one completion; `is_text`: whether all are plain text."""

    system: str
    has_earlier_turns: bool
    is_text: bool


def of_run(path: Path) -> str:
    """Same as `of_training`, for the run whose options are in the file `path`; '' if the file cannot be read."""
    try:
        spec = _spec(path, path.stat().st_mtime_ns)
    except (OSError, SpecError):
        return ""
    return of_training(spec) if STAGES[spec.train.stage].generates or spec.data.system_prompt else ""


@lru_cache(maxsize=64)  # the page asks each second
def _spec(path: Path, changed: int) -> RunSpec:
    """`changed`: when the file was changed."""
    return effective(read(path))


def of_training(spec: RunSpec) -> str:
    """The system prompt of the first examples if all have the same one; else data.system_prompt. The first of several
    datasets decides."""
    return _first_examples(for_dataset(spec, 0)).system


def has_earlier_turns(spec: RunSpec) -> bool:
    """Whether one of the first examples has more than one completion; True if they cannot be read."""
    return _first_examples(for_dataset(spec, 0)).has_earlier_turns


def is_text(spec: RunSpec) -> bool:
    """Whether the examples of all datasets are plain text: by data.format or, if it is detected, by the first examples.
    False if they cannot be read."""
    alone = (for_dataset(spec, number) for number in range(len(spec.data.datasets)))
    return all(own.data.format == "text" or _first_examples(own).is_text for own in alone)


def _first_examples(own: RunSpec) -> FirstExamples:
    """Of a spec with one dataset."""
    unknown = FirstExamples(own.data.system_prompt, True, False)
    try:
        paths = expand(file_patterns(own.data)[0])
        changed = paths[0].stat().st_mtime_ns if paths else 0
    except (OSError, DataFileError):  # the files have been moved since
        return unknown
    if not paths:  # the data is a dataset on the Hub
        return unknown
    data = Data() if own.data.source == "builtin" else own.data
    return _of_examples(paths[0], changed, data.model_dump_json(), tuple(STAGES[own.train.stage].formats))


@lru_cache(maxsize=64)  # the page asks each second
def _of_examples(path: Path, changed: int, columns: str, formats: tuple[str, ...]) -> FirstExamples:
    """`columns`: the options of the data as JSON; `changed`: when the file was changed."""
    data = Data.model_validate_json(columns)
    found, turns, texts = set(), list[bool](), list[bool]()
    unknown = FirstExamples(data.system_prompt, True, False)
    try:
        if path.stat().st_size > MAX_BYTES and not path.name.endswith(FOLLOWED):
            return unknown
        # Bad examples are left out, as the run did (data.on_bad_example).
        for _, example in read_examples(path, MAX_EXAMPLES, in_server=True, skip=lambda error: None):
            format = detect_format(example, formats) if data.format == "auto" else data.format
            try:
                converted = convert(example, format or "", data)
            except (InvalidExample, LookupError):
                continue
            found.add(_of_turns(converted))
            turns.append(_has_earlier_turns(converted))
            texts.append("text" in converted)
    except (OSError, DataFileError, ValueError):
        return unknown
    system = found.pop() if len(found) == 1 else data.system_prompt
    return FirstExamples(system, any(turns) or not turns, bool(texts) and all(texts))


def _of_turns(example: dict[str, Any]) -> str:
    turns = example.get("messages") or example.get("prompt") or ()
    first = turns[0] if isinstance(turns, list) and turns else {}
    return str(first.get("content", "")) if first.get("role") == "system" else ""


def _has_earlier_turns(example: dict[str, Any]) -> bool:
    turns = example.get("messages") or [*example.get("prompt", ()), {"role": "assistant"}]
    return sum(1 for turn in turns if turn["role"] == "assistant") > 1
