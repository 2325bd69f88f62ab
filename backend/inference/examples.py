"""What an evaluation measures: validation examples of the run or those of a file, and general texts.

They are prepared by training's code, with its labels: on all validation examples, the loss of the trained model equals
the validation loss at its step. No run trains on the general texts; their loss shows what a model has forgotten.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

from backend.config import RunSpec
from backend.config.options import edit, for_dataset
from backend.data import read_examples, sample
from backend.models import evaluation, kept_prompts, system_prompt
from backend.models.evaluation import Settings
from backend.paths import ASSETS
from backend.runs import SPEC
from backend.runs.folder import Run
from backend.train.data import ExampleTokenizer, conversations, tokenizer_for
from backend.train.examples import COLUMNS_ADVICE, ConvertedExample, Part, select
from backend.train.generation_eval import EvalPrompt, eval_prompts
from backend.train.run_log import TrainError
from backend.train.templates import ChatTokenizer

GENERAL_TEXTS = ASSETS / "general" / "texts.jsonl"
MAX_GENERAL_TOKENS = 64  # tokens of a general text that are used
SEED = 0  # for drawing examples
RENAME_COLUMNS = " Rename the columns to those of the run's data."


@dataclass(frozen=True)
class Item:
    """A sequence with its labels, and its `prompt` if the models generate for it. `content` is the same for the same
    example in evaluations of other runs. `is_general`: the item is a general text."""

    content: str
    ids: list[int]
    labels: list[int]
    prompt: EvalPrompt | None = None
    is_general: bool = False


def read(spec: RunSpec, settings: Settings, tokenizer: Any, info: Callable[[str], None]) -> list[Item]:
    """All items of an evaluation of a run with these options; `info` gets log lines. Raises TrainError."""
    found: list[Item] = []
    if settings.examples:
        spec = _with_data(spec, settings)
        try:
            parts = _chosen(spec, settings, info)
            found = _items(spec, tokenizer, parts, settings.examples, settings.judge is not None)
        except TrainError as error:  # the options of a run that has ended cannot be set
            raise TrainError(str(error).replace(COLUMNS_ADVICE, RENAME_COLUMNS)) from error
        if not found:
            raise TrainError(
                "No example can be evaluated: none has a completion or, as a plain text, a token with a loss. "
                "Choose another data file, or set the number of examples to 0."
            )
    return [*found, *(_general(tokenizer) if settings.general else ())]


def _with_data(spec: RunSpec, settings: Settings) -> RunSpec:
    """The options with the data that is evaluated; a file is read with the columns of the first dataset, unless it has
    prompts that were kept from chats."""
    if not settings.data:
        return spec
    own: dict[str, Any] = {"data.source": "files", "data.files": (settings.data,), "data.validation": "none"}
    own |= {"data.streaming": False, "data.max_samples": 0, "data.drop_duplicates": False}
    if Path(settings.data).name == kept_prompts.FILE:
        own |= kept_prompts.OPTIONS
    elif evaluation.generates(spec):
        # The system prompt of training, for examples without a system prompt of their own.
        own["data.system_prompt"] = system_prompt.of_training(spec)
    return edit(for_dataset(spec, 0), own)


def _chosen(spec: RunSpec, settings: Settings, info: Callable[[str], None]) -> list[Part]:
    """Random examples of each dataset: the same ones whatever the seed of the run, so that runs with different seeds
    are compared on the same examples."""
    known = evaluation.known_validation(spec)
    chosen = [pair for pair, source in zip(select(spec, info), spec.data.datasets, strict=True) if source in known]
    parts = [train if settings.data else validation for train, validation in chosen]
    drawn = (sorted(sample(part.positions, settings.examples, SEED)) for part in parts)
    return [replace(part, positions=positions) for part, positions in zip(parts, drawn, strict=True)]


def _items(spec: RunSpec, tokenizer: Any, parts: Sequence[Part], most: int, for_judge: bool) -> list[Item]:
    """The sequences of at most `most` examples, of each dataset in turn."""
    each = chain.from_iterable(zip_longest(*(_usable(spec, tokenizer, part) for part in parts)))
    items, copies = list[Item](), Counter[str]()
    for example, to_columns in islice(filter(None, each), most):
        columns, _ = to_columns(example)
        found = zip(*([values.tolist() for values in columns[name]] for name in ("input_ids", "labels")), strict=True)
        content = _content(example.value)
        copies[content] += 1
        content = f"{content} {copies[content]}"
        if to_columns.chat is None:
            items += [Item(f"{content} {n}", *each) for n, each in enumerate(found)]
        else:  # `found` is empty for an example without a loss within max_length
            (prompt,) = eval_prompts(to_columns.chat, [example], for_judge)
            ids, labels = next(found, ([], []))
            items.append(Item(content, ids, labels, prompt))
    return items


def _content(value: Mapping[str, Any]) -> str:
    """The hash of an example before rendering and tokenization, which differ between models."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _usable(spec: RunSpec, tokenizer: Any, part: Part) -> Iterator[tuple[ConvertedExample, ExampleTokenizer]]:
    """The examples of a dataset, and how they are tokenized: plain texts, or conversations whose last completion the
    models generate."""
    first = next(iter(part), None)
    if first is None:
        return
    as_trained = to_columns = tokenizer_for(spec, tokenizer, first[1])
    if not isinstance(to_columns, ExampleTokenizer):  # of a pair, the preferred completion counts
        chat = ChatTokenizer.create(tokenizer, spec.data.loss_on == "all_tokens", spec.data.template_kwargs)
        to_columns = ExampleTokenizer(tokenizer, chat, False, spec.data.max_length)
    is_text = to_columns.chat is None
    for example in (each for _, each in part) if is_text else conversations(part, as_trained):
        yield example, to_columns


def _general(tokenizer: Any) -> Iterator[Item]:
    for _, row in read_examples(GENERAL_TEXTS):
        ids = list(tokenizer(row["text"])["input_ids"])[:MAX_GENERAL_TOKENS]
        yield Item(_content(row), ids, ids, is_general=True)


def changed_file(spec: RunSpec, run: Run) -> Path | None:
    """A data file of the user that was changed after the run was created. Footplate's own demo datasets are left out:
    their files become newer whenever Footplate is installed again."""
    with suppress(OSError):
        created = (run.path / SPEC).stat().st_mtime  # spec.yaml is written only once
        return next((path for path in evaluation.data_files(spec) if _is_newer(path, created)), None)
    return None


def _is_newer(path: Path, created: float) -> bool:
    return not path.is_relative_to(ASSETS) and path.stat().st_mtime > created
