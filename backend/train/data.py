"""Examples -> token ids with labels: read, split, rendered with the template, tokenized, truncated, and counted."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any

from datasets import Dataset, concatenate_datasets, load_dataset, load_from_disk

from backend import registry
from backend.config import RunSpec
from backend.data import (
    DataFileError,
    Example,
    InvalidExample,
    convert,
    detect_format,
    detection_problem,
    expand,
    file_patterns,
    read_examples,
    sample,
    split,
    to_text,
    unpair,
    without_padding,
)
from backend.data.copies import Seen
from backend.data.formats import UNKNOWN_COLUMNS
from backend.train import end_tokens
from backend.train.end_tokens import END
from backend.train.preference_data import (
    Columns,
    PreferenceTokenizer,
    add_kl_completions,
    as_conversation,
    count_unread,
    unread_keys,
)
from backend.train.run_log import TrainError
from backend.train.templates import IGNORE_INDEX, ChatTokenizer, UnsupportedConversation, is_trained
from backend.wording import counted

OTHERS = "others.json"  # what PreparedData has besides the datasets
BATCH_SIZE = 200  # examples between two checks for a stop request
Tick = Callable[[int, int], bool]  # (examples done, examples in total) -> continue?


@dataclass(frozen=True)
class ConvertedExample:
    """An example as a conversation, a text or a preference, and its file and line for messages about it."""

    location: str
    value: dict[str, Any]


@dataclass(frozen=True)
class PreparedData:
    """What the trainer and the generation evaluation need. The datasets have the columns that the stage's trainer
    reads."""

    train: Dataset
    validation: Dataset | None
    eval_examples: list[ConvertedExample] = field(default_factory=list)  # of the generation evaluation
    end_tokens: tuple[int, ...] = ()  # of the training examples' completions


def load_examples(
    spec: RunSpec, info: Callable[[str], None] = lambda line: None
) -> tuple[list[ConvertedExample], list[ConvertedExample]]:
    """(training examples, validation examples), in an order that train.seed decides; `info` gets log lines. Raises
    TrainError."""
    data, seed = spec.data, spec.train.seed
    train_files, validation_files = file_patterns(data)
    train = _read_hub(spec) if data.source == "hub" else _read_files(spec, train_files, "data.files")
    validation = []
    if data.source == "builtin" or data.validation == "files":
        validation = _read_files(spec, validation_files, "data.validation_files")
    if data.drop_duplicates:
        train, validation = _without_copies(train, validation, info)
    if data.source != "builtin" and data.validation == "split":
        if len(train) < 2:
            raise TrainError(
                "data.validation: a dataset with one example cannot be split. Set it to none, or use validation files."
            )
        train, validation = split(train, data.validation_split, seed)
    if spec.train.stage == "kto":
        train, validation = (
            [ConvertedExample(example.location, value) for example in part for value in unpair(example.value)]
            for part in (train, validation)
        )
    # KTO trains in the order of the dataset.
    return sample(train, data.max_samples, seed, shuffles=spec.train.stage == "kto"), validation


def _without_copies(
    train: list[ConvertedExample], validation: list[ConvertedExample], info: Callable[[str], None]
) -> tuple[list[ConvertedExample], list[ConvertedExample]]:
    """The examples without copies, and without validation examples that are training examples."""
    seen = Seen()
    kept = [example for example in train if not seen.is_copy(example.value)]
    others = [example for example in validation if not seen.is_copy(example.value, remember=False)]
    for name, dropped in (("training", len(train) - len(kept)), ("validation", len(validation) - len(others))):
        if dropped:
            info(f"{counted(dropped, f'{name} example')} dropped: equal to a training example before.")
    return kept, others


def _read_files(spec: RunSpec, files: Sequence[str], option: str) -> list[ConvertedExample]:
    try:
        paths = expand(files)
    except DataFileError as error:
        raise TrainError(f"{option}: {error}.") from error
    located = ((f"{path}, line {line}", row) for path in paths for line, row in read_examples(path))
    try:
        return list(_convert(spec, located))
    except DataFileError as error:
        raise TrainError(f"{error}.") from error


def _read_hub(spec: RunSpec) -> list[ConvertedExample]:
    data = spec.data
    try:
        table = load_dataset(data.hub_id, data.hub_config or None, split=data.hub_split)
    except Exception as error:  # of many kinds: network, name, split, configuration
        raise TrainError(f"data.hub_id: {data.hub_id} could not be loaded: {_first_line(error)}") from error
    if data.system_column not in ("", "system", *table.column_names) and data.format not in ("auto", "text"):
        columns = ", ".join(table.column_names)
        raise TrainError(f"data.system_column: the dataset has no column {data.system_column}; it has {columns}.")
    return list(
        _convert(spec, ((f"{data.hub_id}, row {n}", row) for n, row in enumerate(map(without_padding, table), 1)))
    )


def _convert(spec: RunSpec, located: Iterable[tuple[str, Example]]) -> Iterator[ConvertedExample]:
    """Converted examples. With data.format auto, the first example decides the format. Raises TrainError."""
    stage = registry.STAGES[spec.train.stage]
    format, empty = spec.data.format if spec.data.source != "builtin" else "auto", True
    for location, row in located:
        empty = False
        if format == "auto":
            format = detect_format(row, stage.formats) or ""
            if not format:
                problem = detection_problem(row, stage.formats)
                advice = " Set data.format and its column options." if problem.startswith(UNKNOWN_COLUMNS) else ""
                raise TrainError(f"{location}: {problem}.{advice}")
        if format not in stage.formats:
            option = "data.builtin" if spec.data.source == "builtin" else "data.format"
            raise TrainError(
                f"{location}: {option}: {stage.label} needs the format {registry.FORMATS[stage.formats[0]].label}, but "
                f"this example has the format {registry.FORMATS[format].label}."
            )
        try:
            yield ConvertedExample(location, convert(row, format, spec.data))
        except InvalidExample as error:
            raise TrainError(f"{location}: {error}.") from error
    if empty:
        raise TrainError("The dataset has no examples. Check data.files, or data.hub_split.")


@dataclass(frozen=True)
class ExampleTokenizer:
    """Makes (input ids, labels) of examples; pickled into the worker processes."""

    tokenizer: Any
    chat: ChatTokenizer | None  # None: plain text
    pretraining: bool
    max_length: int

    def __call__(self, examples: Sequence[ConvertedExample]) -> tuple[Columns, Counter[str]]:
        """Ids and labels of the usable examples, and how many were truncated, split or dropped."""
        ids, labels, counts = [], [], Counter[str]()
        for example in examples:
            count_unread(self.chat, example.value, counts)
            for tokens, targets in self._chunks(example, counts):
                # Nothing predicts the first token, so it has no loss.
                if all(label == IGNORE_INDEX for label in targets[1:]):
                    counts["dropped"] += 1
                    continue
                ids.append(tokens)
                labels.append(targets)
        return {"input_ids": ids, "labels": labels}, counts

    def sequences(self, example: ConvertedExample) -> Iterator[tuple[str, list[int], list[int]]]:
        """(name, ids, labels) of an example's only sequence, before it is truncated or split. Raises TrainError."""
        yield ("", *self._tokenize(example))

    def _chunks(self, example: ConvertedExample, counts: Counter[str]) -> list[tuple[list[int], list[int]]]:
        ids, labels = self._tokenize(example)
        counts["tokens"] += len(ids)
        if self.chat is not None:
            ends = self.chat.ends(labels)
            counts["endless"] += ends[-1:] == [None]
            counts.update({f"{END}{token}" for token in ends if token is not None})
        if len(ids) <= self.max_length:
            return [(ids, labels)]
        if self.pretraining:  # a long text is split, so that all of it is trained on
            counts["split"] += 1
            starts = range(0, len(ids), self.max_length)
            return [(ids[start : start + self.max_length], labels[start : start + self.max_length]) for start in starts]
        counts["truncated"] += 1
        return [(ids[: self.max_length], labels[: self.max_length])]

    def _tokenize(self, example: ConvertedExample) -> tuple[list[int], list[int]]:
        if self.chat is None or "text" in example.value:
            if any(turn.get("train") is False for turn in example.value.get("messages", ())):
                raise TrainError(
                    f"{example.location}: a turn has a weight of 0, and pretraining trains on the whole text. Set "
                    "train.stage to sft, or remove the weight."
                )
            ids = list(self.tokenizer(to_text(example.value))["input_ids"])
            eos = self.tokenizer.eos_token_id
            if eos is not None and ids[-1:] != [eos]:
                ids.append(eos)
            return ids, list(ids)
        value = example.value
        try:
            if "prompt" in value:  # as in TRL, the loss is on the whole completion, and on no turn of the prompt
                prompt, (completion,) = self.chat.tokenize_completions(value["prompt"], [value["completion"]], value)
                ids = prompt + completion
                return ids, list(ids) if self.chat.all_tokens else [IGNORE_INDEX] * len(prompt) + completion
            return self.chat.tokenize(value["messages"], value)
        except UnsupportedConversation as error:
            raise TrainError(f"{example.location}: {error}.") from error


def tokenize(
    examples: Sequence[ConvertedExample], to_columns: ExampleTokenizer | PreferenceTokenizer, workers: int, tick: Tick
) -> tuple[Dataset, Counter[str]]:
    """A dataset of tokens, and the counts. Ends early, with what is done so far, when `tick` returns False."""
    batches = [examples[start : start + BATCH_SIZE] for start in range(0, len(examples), BATCH_SIZE)]
    counts, parts = Counter[str](), []
    in_processes = workers > 1 and len(batches) > 1
    with contextlib.closing(_in_processes(to_columns, batches, workers)) as mapped:
        for done, (columns, more) in enumerate(mapped if in_processes else map(to_columns, batches), 1):
            counts += more
            parts.append(Dataset.from_dict(columns))
            if not tick(min(done * BATCH_SIZE, len(examples)), len(examples)):
                break
    return concatenate_datasets([part for part in parts if len(part)] or parts[:1]), counts


class _Worker:
    """A process that computes `function` of batches. It has a pipe of its own, whose end tells that it was killed."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, other_end = context.Pipe()
        self.process = context.Process(target=_serve, args=(function, other_end, self.pipe), daemon=True)
        self.process.start()
        other_end.close()

    def send(self, batch: Any) -> None:
        """Start to compute the batch."""
        with contextlib.suppress(OSError):  # it was killed, as `receive` will find
            self.pipe.send(batch)

    def receive(self) -> Any:
        """The result, or the exception of `function`. Raises TrainError if the process was killed."""
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode or 0
            how = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"
            raise TrainError(
                f"A tokenization process {how}. If the machine ran out of CPU memory (RAM), reduce "
                "data.dataset_num_proc, or stop other programs."
            ) from None

    def end(self) -> None:
        """End the process, whatever it does."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _serve(function: Callable[[Any], Any], pipe: Connection, parents_end: Connection) -> None:
    """What a worker process does until the training process closes its end of the pipe, or ends."""
    parents_end.close()
    with contextlib.suppress(EOFError, OSError):
        while True:
            batch = pipe.recv()
            try:
                result = function(batch)
            except Exception as error:
                result = ExceptionWithTraceback(error, error.__traceback__)
            pipe.send(result)


def _in_processes(function: Callable[[Any], Any], batches: Sequence[Any], count: int) -> Generator[Any, None, None]:
    """`function` of each batch, in order, computed by `count` processes. multiprocessing.Pool would wait forever for
    the batch of a process that was killed, and ProcessPoolExecutor for the rest of a result."""
    todo, results = iter(enumerate(batches)), {}
    workers: list[_Worker] = []
    working: dict[Any, tuple[_Worker, int]] = {}  # by its pipe; the number of the batch

    def send_next(worker: _Worker) -> None:
        if task := next(todo, None):
            working[worker.pipe] = (worker, task[0])
            worker.send(task[1])

    try:
        for _ in range(min(count, len(batches))):
            workers.append(_Worker(function))
            send_next(workers[-1])
        for number in range(len(batches)):
            while number not in results:
                for pipe in wait(list(working)):
                    worker, finished = working.pop(pipe)
                    results[finished] = worker.receive()
                    send_next(worker)
            result = results.pop(number)
            if isinstance(result, Exception):
                raise result
            yield result
    finally:
        for worker in workers:
            worker.end()


def tokenizer_for(
    spec: RunSpec, tokenizer: Any, examples: Sequence[ConvertedExample]
) -> ExampleTokenizer | PreferenceTokenizer:
    """How the examples of `spec` are tokenized. Raises TrainError."""
    if spec.train.stage in registry.PREFERENCE_STAGES:
        chat = ChatTokenizer.create(tokenizer, True, spec.data.template_kwargs)
        return PreferenceTokenizer(chat, spec.train.stage, spec.data.max_length)
    pretraining = spec.train.stage == "pretraining"
    text = pretraining or (bool(examples) and "text" in examples[0].value)
    if text:
        return ExampleTokenizer(tokenizer, None, pretraining, spec.data.max_length)
    chat = ChatTokenizer.create(tokenizer, spec.data.loss_on == "all_tokens", spec.data.template_kwargs)
    return ExampleTokenizer(tokenizer, chat, pretraining, spec.data.max_length)


def tokenize_longest(
    examples: Sequence[ConvertedExample],
    to_columns: ExampleTokenizer | PreferenceTokenizer,
    workers: int,
    tick: Tick,
    count: int,
) -> tuple[Dataset, Counter[str]]:
    """As `tokenize`, of about the `count` longest examples, the longest first. Their text decides which are tokenized;
    examples that cannot be used are replaced by the next ones."""
    ordered, taken = sorted(examples, key=lambda example: len(str(example.value)), reverse=True), count
    while True:
        dataset, counts = tokenize(ordered[:taken], to_columns, workers, tick)
        if len(dataset) >= count or taken >= len(ordered):
            break
        taken *= 4
    columns = [name for name in dataset.column_names if name.endswith("ids")]
    lengths = [sum(map(len, lists)) for lists in zip(*(dataset[name] for name in columns), strict=True)]
    return dataset.select(sorted(range(len(lengths)), key=lambda n: -lengths[n])[:count]), counts


def prepare(
    spec: RunSpec, tokenizer: Any, tick: Tick, info: Callable[[str], None], longest: tuple[int, int] | None = None
) -> PreparedData:
    """Read and tokenize all examples; `info` gets log lines. `longest`: only so many of the longest training and
    validation examples, the longest first. Raises TrainError."""
    train, validation = load_examples(spec, info)
    to_columns = tokenizer_for(spec, tokenizer, train)
    workers = spec.data.dataset_num_proc
    part, which = (partial(tokenize_longest, count=longest[0]), "The longest of ") if longest else (tokenize, "")
    dataset, counts = part(train, to_columns, workers, tick)
    ends = end_tokens.counted(counts)
    if counts["endless"]:
        examples = counted(counts["endless"], "example")
        info(f"In {examples}, no token that ends the completion has a loss, so generation may not stop.")
    info(which + _summary("training example", len(train), counts, spec))
    if not tick(len(train), len(train)):
        return PreparedData(dataset, None)  # a stop was requested
    if not len(dataset):
        raise TrainError(_no_example_left(len(train), counts, spec))
    eval_dataset = None
    if validation and spec.eval.strategy != "no":
        part = partial(tokenize_longest, count=longest[1]) if longest else tokenize
        eval_dataset, counts = part(validation, to_columns, workers, tick)
        info(which + _summary("validation example", len(validation), counts, spec))
        eval_dataset = eval_dataset if len(eval_dataset) else None
    dataset = add_kl_completions(dataset, spec)
    if eval_dataset is not None:
        eval_dataset = add_kl_completions(eval_dataset, spec)
    conversations = _conversations(validation)[: spec.eval.num_generations]
    generates = registry.STAGES[spec.train.stage].generates
    return PreparedData(dataset, eval_dataset, conversations if generates else [], ends)


def _conversations(examples: Sequence[ConvertedExample]) -> list[ConvertedExample]:
    """Validation examples as conversations that end with the reference completion, without those that begin with it."""
    found = ((e.location, as_conversation(e.value) if "prompt" in e.value else e.value) for e in examples)
    with_turns = ((location, value) for location, value in found if value and "messages" in value)
    return [
        ConvertedExample(location, value)
        for location, value in with_turns
        if any(map(is_trained, value["messages"][1:]))
    ]


def _summary(example: str, number: int, counts: Counter[str], spec: RunSpec) -> str:
    return f"{counted(number, example)}, {counted(counts['tokens'], 'token')}{_notes(counts, spec)}."


def _no_example_left(number: int, counts: Counter[str], spec: RunSpec) -> str:
    if counts["identical"] > counts["dropped"] + counts["long"]:
        return "In every pair, the chosen and the rejected completion are the same. Correct the columns of the dataset."
    which = f"None of the {number:,} training examples has a" if number > 1 else "The only training example has no"
    advice = "Raise data.max_length, or correct the weights of the turns if they have any."
    return f"{which} trained token within the first {spec.data.max_length} tokens. {advice}"


def _notes(counts: Counter[str], spec: RunSpec) -> str:
    longest = spec.data.max_length
    words = {
        "truncated": f"truncated to {longest} tokens",
        "split": f"split into sequences of at most {longest} tokens",
        "long": f"dropped because they are longer than {longest} tokens",
        "dropped": "dropped because they have no trained tokens",
        "identical": f"dropped because the chosen and the rejected completion are the same within {longest} tokens",
    }
    notes = "".join(f"; {counts[key]:,} {text}" for key, text in words.items() if counts[key])
    return notes + "".join(f"; {what} left out in {count:,}" for what, count in unread_keys(counts).items())


def save(prepared: PreparedData, folder: Path) -> None:
    """Write the datasets for the other ranks, which map the files instead of tokenizing again."""
    shutil.rmtree(folder, ignore_errors=True)
    prepared.train.save_to_disk(folder / "train")
    if prepared.validation is not None:
        prepared.validation.save_to_disk(folder / "validation")
    examples = [[example.location, example.value] for example in prepared.eval_examples]
    (folder / OTHERS).write_text(json.dumps([examples, prepared.end_tokens]), encoding="utf-8")


def load(folder: Path) -> PreparedData:
    """What `save` wrote."""
    validation = folder / "validation"
    examples, ends = json.loads((folder / OTHERS).read_text(encoding="utf-8"))
    return PreparedData(
        load_from_disk(folder / "train"),
        load_from_disk(validation) if validation.exists() else None,
        [ConvertedExample(location, value) for location, value in examples],
        tuple(ends),
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
