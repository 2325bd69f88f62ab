"""Examples -> token ids with labels: read, split, rendered with the template, tokenized, truncated, and counted."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.compute as pc
from datasets import Dataset, concatenate_datasets, load_from_disk
from datasets.arrow_writer import ArrowWriter

from backend import registry
from backend.config import RunSpec
from backend.config.options import for_dataset
from backend.data import DataFileError, is_absurd, mixed, mixed_counts, prepared, to_text
from backend.data.chat import has_other_weights
from backend.data.preferences import MARGIN
from backend.train import end_tokens, template_date
from backend.train.encoding import BatchTokenizer, Columns, Rendered, TextEncoder
from backend.train.examples import (
    ConvertedExample,
    Part,
    Tick,
    about,
    datasets,
    hub_fingerprint,
    select,
    tell_skipped,
    telling,
)
from backend.train.loss_weights import ARROW_TYPE, WEIGHTS, without_empty
from backend.train.preference_data import (
    PreferenceTokenizer,
    add_kl_completions,
    as_conversation,
    count_unread,
    unread_keys,
)
from backend.train.run_log import Stopped, TrainError
from backend.train.templates import IGNORE_INDEX, ChatTokenizer, Labeled, UnsupportedConversation, is_trained
from backend.train.worker_processes import in_processes
from backend.wording import counted, ratio

TRAIN, VALIDATION = "train", "validation"  # folders with datasets
SKIPPED = "skipped"  # key of the number of skipped examples; with a reason appended, of those skipped for it
OTHERS = "others.json"  # what PreparedData has besides the datasets
COMPARED_ROWS = 64
BATCH_SIZE = 200  # examples between two checks for a stop request


@dataclass(frozen=True)
class PreparedData:
    """What the trainer and the generation evaluation need. The datasets have the columns that the stage's trainer
    reads."""

    train: Dataset
    validation: Dataset | None
    validation_sizes: tuple[int, ...] = ()  # with several datasets, which follow each other in `validation`
    eval_examples: list[ConvertedExample] = field(default_factory=list)  # of the generation evaluation
    end_tokens: tuple[int, ...] = ()  # of the training examples' completions

    @property
    def longest(self) -> int:
        """The tokens of the longest example; for preference data, those of a prompt with one of its completions."""
        return max((_longest_row(each) for each in (self.train, self.validation) if each), default=0)


def _longest_row(dataset: Dataset) -> int:
    sizes = {
        name: pc.list_value_length(dataset.data.column(name)) for name in dataset.column_names if name.endswith("_ids")
    }
    prompts = sizes.pop("prompt_ids", None)
    whole = [pc.add(prompts, each) if prompts else each for each in sizes.values()]
    return max((pc.max(each).as_py() or 0 for each in whole), default=0)


@dataclass(frozen=True)
class ExampleTokenizer(BatchTokenizer[Labeled]):
    """Makes (input ids, labels) of examples; pickled into the worker processes."""

    tokenizer: Any
    chat: ChatTokenizer | None  # None: plain text
    pretraining: bool
    max_length: int

    def columns(self, example: ConvertedExample, result: Labeled) -> tuple[Columns, Counter[str]]:
        """Ids, labels and weights of the usable sequences, and how many were truncated, split or dropped."""
        ids, labels, weights, counts = [], [], [], Counter[str]()
        count_unread(self.chat, example.value, counts)
        of_tokens = result[2]
        for tokens, targets in self._chunks(example, *result[:2], counts):
            # Nothing predicts the first token, so it has no loss.
            if all(label == IGNORE_INDEX for label in islice(targets, 1, None)):
                counts["dropped"] += 1
                continue
            ids.append(numpy.array(tokens, numpy.int32))  # five times as fast to write as lists
            labels.append(numpy.array(targets))
            weights.append(of_tokens and numpy.array(of_tokens[: len(tokens)], numpy.float32))
        return {"input_ids": ids, "labels": labels, WEIGHTS: weights}, counts

    def sequences(self, example: ConvertedExample) -> Iterator[tuple[str, list[int], list[int], list[float] | None]]:
        """(name, ids, labels, weights) of an example's only sequence, before it is truncated or split. Raises
        TrainError."""
        yield ("", *self.encoder.finish(self.render(example)))

    def _chunks(
        self, example: ConvertedExample, ids: list[int], labels: list[int], counts: Counter[str]
    ) -> list[tuple[list[int], list[int]]]:
        counts["tokens"] += len(ids)
        counts["labeled"] += len(labels) - labels.count(IGNORE_INDEX)
        if self.chat is not None:
            ends = self.chat.ends(labels, example.value)
            if ends[-1:] == [None]:
                counts["endless"] += 1
                counts[end_tokens.UNKNOWN + self.chat.unknown_end(labels, example.value)] += 1
            turns = example.value.get("messages", ())
            if self.chat.all_tokens and turns and not any(map(is_trained, turns)):
                counts["weightless"] += 1
            counts.update(end_tokens.keys(ends, () if self.chat.all_tokens else self.chat.inner(labels)))
        if len(ids) <= self.max_length:
            return [(ids, labels)]
        if self.pretraining:  # a long text is split, so that all of it is trained on
            counts["split"] += 1
            starts = range(0, len(ids), self.max_length)
            return [(ids[start : start + self.max_length], labels[start : start + self.max_length]) for start in starts]
        counts["truncated"] += 1
        return [(ids[: self.max_length], labels[: self.max_length])]

    @cached_property
    def encoder(self) -> TextEncoder:
        """Encodes the texts."""
        return self.chat.encoder if self.chat else TextEncoder(self.tokenizer)

    def render(self, example: ConvertedExample) -> Rendered[Labeled]:
        """The text of an example. Raises TrainError."""
        value, chat = example.value, self.chat
        if chat is None or "text" in value:
            if has_other_weights(value.get("messages", ())):
                raise TrainError(
                    f"{example.location}: a turn has a weight, and pretraining trains on the whole text. Set "
                    "train.stage to sft, or remove the weight."
                )
            return Rendered([to_text(value)], self._whole_text, special_tokens=True)
        try:
            if "prompt" not in value:
                return chat.conversation(value["messages"], value)
            found = chat.completions(value["prompt"], [value["completion"]], value)
            return Rendered(found.texts, lambda tokens: self._completion(*found.finish(tokens)))
        except UnsupportedConversation as error:
            raise TrainError(f"{example.location}: {error}.") from error

    def _whole_text(self, tokens: Sequence[list[int]]) -> Labeled:
        (ids,) = tokens
        eos = self.tokenizer.eos_token_id
        if len(ids) > 1 and ids[0] == ids[1] == self.tokenizer.bos_token_id:  # the text has a BOS token, too
            del ids[0]
        if eos is not None and ids[-1:] != [eos]:
            ids.append(eos)
        return ids, list(ids), None

    def _completion(self, prompt: list[int], completions: list[list[int]]) -> Labeled:
        """As in TRL, the loss is on the whole completion, and on no turn of the prompt."""
        ids = prompt + completions[0]
        all_tokens = self.chat is not None and self.chat.all_tokens
        return ids, list(ids) if all_tokens else [IGNORE_INDEX] * len(prompt) + completions[0], None


Tokenizer = ExampleTokenizer | PreferenceTokenizer


def tokenize(
    part: Part, to_columns: Tokenizer, workers: int, tick: Tick, path: Path | None = None
) -> tuple[Dataset, Counter[str]]:
    """A dataset of tokens in the order of the part, and the counts. It is written to the new file `path`, and kept in
    memory without one. Ends early, with what is done so far, when `tick` returns False."""
    counts, tokens = Counter[str](), _Tokens(path)
    order, sizes = array("q"), array("q", [0]) * len(part)  # examples as they are read; rows of each example
    processes = workers if len(part) > BATCH_SIZE else 1
    function = partial(_tokenized, to_columns, part.skips)
    with contextlib.closing(in_processes(function, _batches(part), processes)) as found:
        for numbers, columns, more, rows in found:
            tokens.write(columns)
            counts.update(more)
            order.extend(numbers)
            for number, count in zip(numbers, rows, strict=True):
                sizes[number] = count
            if not tick(len(order), len(part)):
                break
    dataset = tokens.dataset()
    return (dataset if part.is_in_file_order else _in_order(dataset, order, sizes)), counts


def _batches(part: Part) -> Iterator[list[tuple[int, ConvertedExample]]]:
    examples = iter(part)
    while batch := list(islice(examples, BATCH_SIZE)):
        yield batch


def _tokenized(
    to_columns: Tokenizer, skips: bool, batch: Sequence[tuple[int, ConvertedExample]]
) -> tuple[list[int], Columns, Counter[str], list[int]]:
    """The numbers of the examples, their columns and counts, and how many rows of the columns each example has. With
    `skips`, an example that cannot be rendered has none."""
    columns: Columns = {}
    counts, rows = Counter[str](), []
    for each in to_columns.each([example for _, example in batch]):
        if not isinstance(each, TrainError):
            found, more = each
        elif skips:
            found, more = {}, Counter({SKIPPED: 1} | ({f"{SKIPPED} {each}": 1} if not counts[SKIPPED] else {}))
        else:
            raise each
        counts.update(more)
        for name, values in found.items():
            columns.setdefault(name, []).extend(values)
        rows.append(max(map(len, found.values()), default=0))
    return [number for number, _ in batch], columns, counts, rows


class _Tokens:
    """A dataset that is written batch by batch, to a file or to memory."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.buffer = path, pyarrow.BufferOutputStream()
        self.writer = ArrowWriter(path=str(path)) if path else ArrowWriter(stream=self.buffer)
        self.is_empty = True

    def write(self, columns: Columns) -> None:
        """Append rows."""
        if any(columns.values()):
            if WEIGHTS in columns:  # typed, since most examples have none
                columns = {**columns, WEIGHTS: pyarrow.array(columns[WEIGHTS], ARROW_TYPE)}
            self.writer.write_batch(columns)
            self.is_empty = False

    def dataset(self) -> Dataset:
        """The dataset; nothing can be written after that."""
        if self.is_empty:
            self.writer.close()
            return Dataset.from_dict({})
        self.writer.finalize()
        written = Dataset.from_file(str(self.path)) if self.path else Dataset.from_buffer(self.buffer.getvalue())
        return without_empty(written)


def _in_order(dataset: Dataset, order: Sequence[int], sizes: Sequence[int]) -> Dataset:
    """The rows of the examples in the order of their numbers. `order`: the numbers as the rows have them; `sizes`: how
    many rows each example has."""
    starts, start = array("q", [0]) * len(sizes), 0
    for number in order:
        starts[number] = start
        start += sizes[number]
    return dataset.select(
        array("q", (row for start, size in zip(starts, sizes, strict=True) for row in range(start, start + size)))
    )


def tokenizer_for(spec: RunSpec, tokenizer: Any, first: ConvertedExample) -> Tokenizer:
    """How the examples of `spec` are tokenized; `first`: any of them. Raises TrainError."""
    if spec.train.stage in registry.PREFERENCE_STAGES:
        chat = ChatTokenizer.create(tokenizer, True, spec.data.template_kwargs)
        return PreferenceTokenizer(chat, spec.train.stage, spec.data.max_length)
    pretraining = spec.train.stage == "pretraining"
    if pretraining or "text" in first.value:
        return ExampleTokenizer(tokenizer, None, pretraining, spec.data.max_length)
    chat = ChatTokenizer.create(tokenizer, spec.data.loss_on == "all_tokens", spec.data.template_kwargs)
    return ExampleTokenizer(tokenizer, chat, pretraining, spec.data.max_length)


def tokenize_longest(
    part: Part, to_columns: Tokenizer, workers: int, tick: Tick, path: Path | None, count: int
) -> tuple[Dataset, Counter[str]]:
    """Same as `tokenize`, but of about the `count` longest examples only, the longest first. The lengths of their texts
    decide which are tokenized; examples that cannot be used are replaced by the next ones."""
    lengths = dict(sorted((number, len(str(example.value))) for number, example in part))
    ordered, taken = sorted(lengths, key=lengths.__getitem__, reverse=True), count
    while True:
        longest = replace(part, positions=[part.positions[number] for number in ordered[:taken]])
        dataset, counts = tokenize(longest, to_columns, workers, tick, path)
        if len(dataset) >= count or taken >= len(ordered):
            break
        taken *= 4
    return _longest(dataset, count), counts


def _longest(dataset: Dataset, count: int) -> Dataset:
    """At most `count` rows, those with the most tokens first."""
    columns = [name for name in dataset.column_names if name.endswith("ids")]
    tokens = [sum(map(len, lists)) for lists in zip(*(dataset[name] for name in columns), strict=True)]
    return dataset.select(sorted(range(len(tokens)), key=lambda n: -tokens[n])[:count])


def prepare(
    spec: RunSpec,
    tokenizer: Any,
    tick: Tick,
    info: Callable[[str], None],
    longest: tuple[int, int] | None = None,
    folder: Path | None = None,
) -> PreparedData:
    """Read and tokenize all examples, into files of `folder`, or into memory without one; `info` gets log lines.
    `longest`: only so many of the longest training and validation examples, the longest first. Raises TrainError."""
    nothing = PreparedData(Dataset.from_dict({}), None)
    try:
        parts = select(spec, info, tick)
    except Stopped:
        return nothing
    evaluates, most = spec.eval.strategy != "no", dict(zip((TRAIN, VALIDATION), longest or (0, 0), strict=True))
    total, done = sum(len(train) + len(validation) * evaluates for train, validation in parts), 0
    if not tick(0, total):
        return nothing  # a stop was requested
    tokenizers = [tokenizer_for(spec, tokenizer, next(iter(train))[1]) for train, _ in parts]
    found: dict[str, list[Dataset]] = {TRAIN: [], VALIDATION: []}
    ends = Counter[str]()

    def tokens_of(index: int, name: str, part: Part, before: int) -> tuple[Dataset, Counter[str]]:
        work = partial(tokenize_longest, count=most[name]) if longest else tokenize
        path = folder / f"{name}-{index}.arrow" if folder else None
        with about(spec, index):
            return work(
                part, tokenizers[index], spec.data.dataset_num_proc, lambda count, _: tick(before + count, total), path
            )

    for index, pair in enumerate(parts):
        for name, part in zip((TRAIN, VALIDATION)[: 1 + evaluates], pair, strict=False):
            dataset, counts = tokens_of(index, name, part, done)
            done += len(part)
            which = "The longest of " if longest else "Prepared " if name == TRAIN and spec.data.streaming else ""
            used = len(part) - counts[SKIPPED]
            tell_counts(name, used, counts, for_dataset(spec, index), telling(spec, index, info), which)
            if not tick(done, total):
                return nothing  # a stop was requested
            found[name].append(dataset)
            if name == TRAIN:
                ends += counts
                if not len(dataset):
                    with about(spec, index):
                        raise TrainError(_no_example_left(used, counts, spec))
    sizes = tuple(map(len, found[VALIDATION])) if spec.data.sources else ()
    train = add_kl_completions(_mixture(spec, found[TRAIN], info, most[TRAIN]), spec)
    validation = _one_after_another(found[VALIDATION])
    if longest and spec.data.sources and validation is not None:
        validation, sizes = _longest(validation, most[VALIDATION]), ()
    generates = registry.STAGES[spec.train.stage].generates
    each = zip_longest(*(conversations(part, to) for (_, part), to in zip(parts, tokenizers, strict=True)))
    evaluated = islice(filter(None, chain.from_iterable(each)), spec.eval.num_generations if generates else 0)
    return PreparedData(
        train, validation and add_kl_completions(validation, spec), sizes, list(evaluated), end_tokens.counted(ends)
    )


def tell_counts(
    name: str, size: int, counts: Counter[str], spec: RunSpec, info: Callable[[str], None], which: str
) -> None:
    """Log what has become of the examples of a part; `which` begins the line."""
    if name == TRAIN and counts["endless"]:
        examples = counted(counts["endless"], "example")
        info(f"In {examples}, no token that ends the completion has a loss, so generation may not stop.")
    kind = "training" if name == TRAIN else "validation"
    tell_skipped(counts[SKIPPED], unread_keys(counts, f"{SKIPPED} "), kind, info)
    info(which + _summary(f"{kind} example", size, counts, spec))


def _one_after_another(found: Sequence[Dataset]) -> Dataset | None:
    """The datasets as one, without empty ones, which have no columns; None without rows."""
    usable = [dataset for dataset in found if len(dataset)]
    return concatenate_datasets(usable) if len(usable) > 1 else usable[0] if usable else None


def _mixture(spec: RunSpec, found: Sequence[Dataset], info: Callable[[str], None], longest: int) -> Dataset:
    """The training set of an epoch; several datasets are mixed in the proportions of their weights."""
    if not spec.data.sources:
        return found[0]
    together = concatenate_datasets(list(found))
    if longest:
        return _longest(together, longest)
    sizes, weights = [*map(len, found)], [source.weight for source in spec.data.datasets]
    if is_absurd(sizes, counts := mixed_counts(sizes, weights, spec.data.mixing)):
        raise TrainError(
            f"data.weight: an epoch would have {sum(counts):,} examples, but the datasets have only "
            f"{sum(sizes):,}. Set more similar weights."
        )
    chosen = mixed(sizes, weights, spec.data.mixing, spec.train.seed, shuffles=spec.train.stage == "kto")
    what = "sequence" if spec.train.stage == "pretraining" else "example"
    for index, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        factor = f" from {size:,} ({ratio(count / size)})" if count != size else ""
        telling(spec, index, info)(f"{counted(count, what)} per epoch{factor}.")
    return together.select(chosen)


def conversations(part: Part, to_columns: Tokenizer) -> Iterator[ConvertedExample]:
    """Validation examples as conversations that end with the reference completion, without those that begin with it."""
    for _, example in part:
        if part.skips and _tokenized(to_columns, True, [(0, example)])[2][SKIPPED]:
            continue
        value = as_conversation(example.value) if "prompt" in example.value else example.value
        if value and any(map(is_trained, value.get("messages", ())[1:])):
            yield ConvertedExample(example.location, value)


def _summary(example: str, number: int, counts: Counter[str], spec: RunSpec) -> str:
    before = " before truncation" if counts["truncated"] else ""
    return f"{counted(number, example)}, {counted(counts['tokens'], 'token')}{before}{_notes(number, counts, spec)}."


def _no_example_left(number: int, counts: Counter[str], spec: RunSpec) -> str:
    if not number:
        return "No training example is left: the chat template refuses all of them, as the lines before say."
    if counts["identical"] > counts["dropped"] + counts["long"]:
        return "In every pair, the chosen and the rejected completion are the same. Correct the columns of the dataset."
    which = f"None of the {number:,} training examples has a" if number > 1 else "The only training example has no"
    advice = "Raise data.max_length, or correct the weights of the turns if they have any."
    return f"{which} trained token within the first {spec.data.max_length} tokens. {advice}"


def _notes(number: int, counts: Counter[str], spec: RunSpec) -> str:
    longest = spec.data.max_length
    words = {
        "truncated": f"truncated to {longest} tokens",
        "split": f"split into sequences of at most {longest} tokens",
        "long": f"dropped, longer than {longest} tokens",
        "dropped": "dropped, without trained tokens",
        "identical": f"dropped, with the same chosen and rejected completion within {longest} tokens",
    }
    notes = "".join(f"; {counts[key]:,} {text}" for key, text in words.items() if counts[key])
    dropped = sum(counts[key] for key in ("long", "dropped", "identical"))
    if dropped and spec.train.stage != "pretraining":  # in pretraining, parts of examples are dropped
        notes += f"; {number - dropped:,} left"
    return notes + "".join(f"; {what} left out in {count:,}" for what, count in unread_keys(counts).items())


def prepare_once(
    spec: RunSpec,
    tokenizer: Any,
    tick: Tick,
    info: Callable[[str], None],
    folder: Path,
    min_seconds: float = prepared.MIN_SECONDS,
) -> bool:
    """Create `folder` with what `load` reads: from the cache if the same data was prepared before, else with `prepare`,
    whose result is cached if it took at least `min_seconds`. The folder is empty if `tick` returned False. Returns
    whether the result is in the cache now. Raises TrainError."""
    began, lines = time.monotonic(), list[str]()
    key, states = _key(spec, tokenizer)
    if (known := prepared.take(key, folder)) is not None:
        info("Reusing the cached tokenized dataset for the same files, tokenizer and options.")
        for line in known:
            info(line)
        return True

    def tell(line: str) -> None:
        lines.append(line)
        info(line)

    folder.mkdir()
    made = prepare(spec, tokenizer, tick, tell, folder=folder)
    if not tick(0, 0):
        return False
    save(made, folder)
    if not key or time.monotonic() - began < min_seconds or _key(spec, tokenizer) != (key, states):
        return False
    return prepared.keep(key, folder, spec.data.name, lines)


def _key(spec: RunSpec, tokenizer: Any) -> tuple[str, list[list[int]]]:
    """The key of the data, and the states of its files."""
    try:
        alone = [for_dataset(spec, index) for index in datasets(spec)]
        hub = " ".join(hub_fingerprint(each) for each in alone if each.data.source == "hub")
        return prepared.key_of(spec, tokenizer, hub, template_date.today()), prepared.file_states(spec)
    except (OSError, DataFileError):  # `prepare` reports the error
        return "", []


def fingerprint(dataset: Dataset) -> str:
    """A hash of the number of rows and of some rows: whether tokens are those of an earlier start or version."""
    digest = hashlib.sha256(str(len(dataset)).encode())
    for row in dataset.select(range(0, len(dataset), max(1, len(dataset) // COMPARED_ROWS))):
        also = (WEIGHTS, MARGIN) if row.get(MARGIN) else (WEIGHTS,)  # earlier versions had no margins
        kept = {name: row[name] for name in sorted(row) if name.endswith("ids") or name in also}
        digest.update(json.dumps(kept).encode())
    return digest.hexdigest()


def save(made: PreparedData, folder: Path) -> None:
    """Write the datasets for all ranks, which map the files instead of tokenizing again."""
    made.train.save_to_disk(folder / TRAIN)
    if made.validation is not None:
        made.validation.save_to_disk(folder / VALIDATION)
    for path in folder.glob("*.arrow"):
        path.unlink()
    examples = [[example.location, example.value] for example in made.eval_examples]
    others = [examples, made.end_tokens, made.validation_sizes]
    # Keys of turns that no template reads may have values that JSON has not, such as a date of a Parquet file.
    (folder / OTHERS).write_text(json.dumps(others, default=str), encoding="utf-8")


def load(folder: Path) -> PreparedData:
    """What `save` wrote."""
    validation = folder / VALIDATION
    examples, ends, sizes = json.loads((folder / OTHERS).read_text(encoding="utf-8"))
    return PreparedData(
        load_from_disk(folder / TRAIN),
        load_from_disk(validation) if validation.exists() else None,
        tuple(sizes),
        [ConvertedExample(location, value) for location, value in examples],
        tuple(ends),
    )
