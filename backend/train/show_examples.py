"""Examples as the model sees them, token by token, with what is trained on: made by the functions that the run uses.

Called by `backend.train.worker`, for the page and for `footplate data`. It never downloads anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

from tokenizers.decoders import DecodeStream

from backend import registry
from backend.config import RunSpec
from backend.data import (
    DataFileError,
    Example,
    InvalidExample,
    convert,
    detect_format,
    expand,
    file_patterns,
    place,
    read_examples,
    unpair,
)
from backend.inspect.examples import FORMAT
from backend.train import completion_start, model
from backend.train.data import ExampleTokenizer, Tokenizer, tokenizer_for
from backend.train.examples import ConvertedExample
from backend.train.preference_data import SPECIAL, PreferenceTokenizer, unread_keys
from backend.train.run_log import TrainError
from backend.train.templates import IGNORE_INDEX, UnsupportedConversation
from backend.wording import different_start

MAX_TOKENS = 4000  # of a sequence that are shown
MAX_BROKEN = 1000
MAX_ROW = 20_000  # characters of the example in its file that are shown
NOTES = {
    "dropped": "This example is dropped: it has no token with a loss within max_length.",
    "long": "This example is dropped: it is longer than max_length, and the reward may depend on its end.",
    "identical": "This example is dropped: the chosen and the rejected completion are the same within max_length.",
    "endless": "No token that ends the completion has a loss.",
    "weightless": "The loss covers no completion: each assistant turn has the weight 0.",
}
Piece = tuple[str, list[int], float]


def show(spec: dict[str, Any], base: str, folder: str, first: int, count: int) -> dict[str, Any]:
    """{"examples": [...]} of a spec (sections of a RunSpec; paths are relative to `base`) with the tokenizer in
    `folder`: `count` of them from position `first`, fewer at the end of the files; the validation files come after the
    training files. "problem" says why there are no more.

    Of each: "location", "row" (as in the file), "problem", "notes" (why it is dropped, and what of it is not used), and
    "sequences": one, or one for each completion. Of a sequence: "name", the numbers "tokens", "kept" (without those
    after data.max_length, unless the text is split) and "trained" (of those that are kept), "use" (what is done with
    the latter), "end" (the token that ends the completion, or None), and "pieces" of the first MAX_TOKENS tokens:
    (text, token ids, their weight in the loss, 0 without one)."""
    run_spec = RunSpec.model_validate(spec)
    found: dict[str, Any] = {"format": FORMAT, "examples": [], "problem": ""}
    try:
        tokenizer = model.load_tokenizer(run_spec, model.ModelSource(folder, {"local_files_only": True}))
        rows = _rows(run_spec, Path(base))
        head = list(_until_example(rows))
        if not head:
            return {**found, "problem": "The data files have no examples."}
        if isinstance(head[-1][1], DataFileError):
            return {**found, "problem": f"No example of the data files can be read. {head[0][1]}."}
        format = _format(run_spec, head[-1][1])
        to_columns: Tokenizer | None = None
        for location, row in islice(chain(head, rows), first, first + count):
            examples, problem = _converted(run_spec, location, row, format)
            if examples and to_columns is None:
                to_columns = tokenizer_for(run_spec, tokenizer, examples[0])
            text = "" if isinstance(row, DataFileError) else _row_text(row)
            shown = {"location": location, "row": text, "problem": problem}
            found["examples"].append({**shown, **_tokenized(to_columns, examples, location)})
    except (TrainError, DataFileError) as error:
        found["problem"] = str(error).rstrip(".") + "."
    return found


def _tokenized(to_columns: Tokenizer | None, examples: Sequence[ConvertedExample], location: str) -> dict[str, Any]:
    """The sequences of a row's examples and the notes, and the problem if there is one."""
    found: dict[str, Any] = {"sequences": [], "notes": []}
    try:
        for example in examples:
            assert to_columns
            found["sequences"] += [_sequence(to_columns, example, *parts) for parts in to_columns.sequences(example)]
            found["notes"] += _notes(to_columns, example)
    except TrainError as error:
        text = str(error).removeprefix(f"{location}: ")
        found["problem"] = text[0].upper() + text[1:]
    return found


Row = tuple[str, Example | DataFileError]  # where it is, and the example, or why it cannot be read


def _rows(spec: RunSpec, base: Path) -> Iterator[Row]:
    """The rows of the files, as the inspection counts them. Raises DataFileError, also after MAX_BROKEN broken rows
    without another one between them."""
    broken: list[DataFileError] = []

    def keep(error: DataFileError) -> None:
        if len(broken) == MAX_BROKEN:
            raise error
        broken.append(error)

    for path in chain.from_iterable(expand(files, base) for files in file_patterns(spec.data)):
        for line, row in read_examples(path, skip=keep):
            yield from ((place(path, error.line), error) for error in broken)
            broken.clear()
            yield place(path, line), row
        yield from ((place(path, error.line), error) for error in broken)
        broken.clear()


def _until_example(rows: Iterator[Row]) -> Iterator[Row]:
    """The rows up to the first that can be read."""
    for location, row in rows:
        yield location, row
        if not isinstance(row, DataFileError):
            return


def _format(spec: RunSpec, first: Example) -> str:
    """The format of all examples: the first one decides it, as in the run. Raises TrainError."""
    formats = registry.STAGES[spec.train.stage].formats
    is_set = spec.data.source != "builtin" and spec.data.format != "auto"
    format = spec.data.format if is_set else detect_format(first, formats)
    if format not in formats:
        stage = registry.STAGES[spec.train.stage].label
        raise TrainError(f"The first example has no data format that {stage} can use; see the check report.")
    return str(format)


def _converted(
    spec: RunSpec, location: str, row: Example | DataFileError, format: str
) -> tuple[list[ConvertedExample], str]:
    """The examples of a row, more than one for a pair in KTO, and why it has none."""
    if isinstance(row, DataFileError):
        return [], f"This example {row.message}."
    try:
        value = convert(row, format, spec.data)
        values = unpair(value) if spec.train.stage == "kto" else [value]
    except InvalidExample as error:
        sentence = str(error)
        return [], f"This example {error}." if sentence.startswith(("has ", "is ")) else f"In this example, {error}."
    return [ConvertedExample(location, each) for each in values], ""


def _row_text(row: Example) -> str:
    text = json.dumps(row, ensure_ascii=False, indent=2, default=str)
    return text if len(text) <= MAX_ROW else f"{text[:MAX_ROW]}\n… {len(text) - MAX_ROW:,} more characters"


def _notes(to_columns: Tokenizer, example: ConvertedExample) -> list[str]:
    """What the run would count for this example, as sentences."""
    _, counts = to_columns(example)
    notes = [text for name, text in NOTES.items() if counts[name]]
    notes += [f"Not used: {what}." for what in unread_keys(counts)]
    notes += [f"A text has {token}, which is tokenized as a special token." for token in unread_keys(counts, SPECIAL)]
    if start := _start(to_columns, example):
        notes.append(f"In this example, {different_start(*start)}")
    return notes


def _start(to_columns: Tokenizer, example: ConvertedExample) -> completion_start.Start | None:
    """How the completion begins in generation and in training, if that differs and the trained model generates."""
    is_reward = isinstance(to_columns, PreferenceTokenizer) and to_columns.stage == "reward"
    if to_columns.chat is None or is_reward:
        return None
    try:
        return completion_start.difference(to_columns.chat, example.value)
    except UnsupportedConversation:  # a template without a generation prompt for it
        return None


def _sequence(
    to_columns: Tokenizer,
    example: ConvertedExample,
    name: str,
    ids: list[int],
    labels: list[int],
    weights: Sequence[float] | None = None,
) -> dict[str, Any]:
    splits = isinstance(to_columns, ExampleTokenizer) and to_columns.pretraining
    is_reward = isinstance(to_columns, PreferenceTokenizer) and to_columns.stage == "reward"
    kept = len(ids) if splits else to_columns.max_length
    losses = [weight * (label != IGNORE_INDEX) for label, weight in zip(labels, weights or repeat(1), strict=False)]
    for start in range(0, len(losses), to_columns.max_length if splits else len(losses) or 1):
        losses[start] = 0  # nothing predicts the first token of a sequence
    tokenizer = to_columns.tokenizer if isinstance(to_columns, ExampleTokenizer) else to_columns.chat.tokenizer
    ends = to_columns.chat.ends(labels[:kept], example.value) if to_columns.chat else []
    end = ends[-1] if ends else None
    return {
        "name": name,
        "tokens": len(ids),
        "trained": sum(weight > 0 for weight in losses[:kept]),
        "use": "compared" if is_reward else "with a loss",
        "kept": min(kept, len(ids)),
        "end": None if end is None else tokenizer.decode([end]),
        "pieces": _pieces(tokenizer, ids[:MAX_TOKENS], losses),
    }


def _pieces(tokenizer: Any, ids: Sequence[int], weights: Sequence[float]) -> list[Piece]:
    """The text of each token, or of several tokens that together are one character."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # not a fast tokenizer
        words = tokenizer.convert_ids_to_tokens(list(ids))
        return [(str(word), [id], weight) for word, id, weight in zip(words, ids, weights, strict=False)]
    stream, found, pending = DecodeStream(skip_special_tokens=False), list[Piece](), list[int]()
    for id, weight in zip(ids, weights, strict=False):
        pending.append(id)
        text = stream.step(backend, id)
        if text is not None:
            found.append((text, pending, weight))
            pending = []
    if pending:
        found.append((tokenizer.decode(pending), pending, weights[len(ids) - 1]))
    return found
