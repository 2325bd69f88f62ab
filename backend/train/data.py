"""Rows -> tokens with labels: read, split, limited, written with the chat template, cut, and counted.

Beside the floors. Imports catalog, rows, spec, paths, pairs, templates, journal.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset, concatenate_datasets, load_dataset, load_from_disk

from backend import registry
from backend.config import RunSpec
from backend.data import Row, RowError, Unfit, convert, expand, plain, read_rows, recognise, unpaired
from backend.paths import ASSETS
from backend.train.preference_data import Columns, Comparing, finished, question
from backend.train.run_log import TrainError
from backend.train.templates import Unlearnable, Writer

BATCH = 200  # rows between two looks at the stop file
Tick = Callable[[int, int], bool]  # (rows done, rows in all) -> go on?


@dataclass(frozen=True)
class Item:
    """A row as conversation or text, and where it stands (file and line), for messages about it."""

    where: str
    value: dict[str, Any]


@dataclass(frozen=True)
class Prepared:
    """What the trainer and the answers need. Tables have the columns that the stage's trainer reads."""

    train: Dataset
    validation: Dataset | None
    held_out: list[Item] = field(default_factory=list)  # to be answered before and after


def collect(spec: RunSpec) -> tuple[list[Item], list[Item]]:
    """(rows to learn from, rows kept back), in an order that the seed decides. Raises TrainError."""
    data, seed = spec.data, spec.train.seed
    if data.source == "builtin":
        train, held = (_files(spec, [ASSETS / data.builtin / f"{part}.jsonl"]) for part in ("train", "validation"))
    else:
        train = _hub(spec) if data.source == "hub" else _files(spec, _expand(data.files, "data.files"))
        held = []
        if data.validation == "files":
            held = _files(spec, _expand(data.validation_files, "data.validation_files"))
        elif data.validation == "split":
            train, held = _split(train, data.validation_split, seed)
    if spec.train.stage == "kto":
        train, held = ([Item(i.where, v) for i in part for v in unpaired(i.value)] for part in (train, held))
    if data.max_samples or spec.train.stage == "kto":  # KTO trains in the order of the rows
        random.Random(seed).shuffle(train)
    return train[: data.max_samples or None], held


def _split(items: list[Item], share: float, seed: int) -> tuple[list[Item], list[Item]]:
    if len(items) < 2:
        raise TrainError("data.validation: one row cannot be split; set it to none, or give validation files.")
    order = list(range(len(items)))
    random.Random(seed).shuffle(order)
    held = set(order[: min(len(items) - 1, max(1, round(len(items) * share)))])
    return [x for i, x in enumerate(items) if i not in held], [x for i, x in enumerate(items) if i in held]


def _expand(files: Sequence[str], option: str) -> list[Path]:
    try:
        found = expand(files)
    except RowError as error:
        raise TrainError(f"{option}: {error}.") from error
    if not found:
        raise TrainError(f"{option} is empty: name a file of rows.")
    return found


def _files(spec: RunSpec, paths: Iterable[Path]) -> list[Item]:
    try:
        return list(_items(spec, ((f"{path}, line {line}", row) for path in paths for line, row in read_rows(path))))
    except RowError as error:
        raise TrainError(f"{error}.") from error


def _hub(spec: RunSpec) -> list[Item]:
    data = spec.data
    if not data.hub_id.strip():
        raise TrainError("data.hub_id is empty: write organisation/name.")
    try:
        table = load_dataset(data.hub_id, data.hub_config or None, split=data.hub_split)
    except Exception as error:  # of many kinds: network, name, split, configuration
        raise TrainError(f"data.hub_id: {data.hub_id} could not be loaded: {_first_line(error)}") from error
    return list(_items(spec, ((f"{data.hub_id}, row {n}", row) for n, row in enumerate(table, 1))))


def _items(spec: RunSpec, found: Iterable[tuple[str, Row]]) -> Iterator[Item]:
    """Rows, converted; the first one decides the format where it is to be recognised. Raises TrainError."""
    stage = registry.STAGES[spec.train.stage]
    format, empty = spec.data.format if spec.data.source != "builtin" else "auto", True
    for where, row in found:
        empty = False
        if format == "auto":
            format = recognise(row, stage.formats) or ""
            if not format:
                raise TrainError(f"{where}: no known format has the columns {', '.join(row)}: set data.format.")
        if format not in stage.formats:
            name = "data.builtin" if spec.data.source == "builtin" else "data.format"
            wanted = registry.FORMATS[stage.formats[0]].label.lower()
            raise TrainError(
                f"{where}: {name}: {stage.label} learns from {wanted}, and this row has "
                f"{registry.FORMATS[format].label.lower()}."
            )
        try:
            yield Item(where, convert(row, format, spec.data))
        except Unfit as error:
            raise TrainError(f"{where}: {error}.") from error
    if empty:
        raise TrainError("The data has no rows: check data.files, or the split of the hub's dataset.")


@dataclass(frozen=True)
class Tokenizing:
    """Makes (input ids, labels) of rows; sent to preparation processes as a whole."""

    tokenizer: Any
    writer: Writer | None  # None: plain text
    pretraining: bool
    max_length: int

    def __call__(self, items: Sequence[Item]) -> tuple[Columns, Counter[str]]:
        """Ids and labels of what can be learned from, and how many rows were cut, split or dropped."""
        ids, labels, counts = [], [], Counter[str]()
        for item in items:
            for row, wanted in self._pieces(item, counts):
                # The first token has nothing before it, so it cannot be learned.
                if all(label == -100 for label in wanted[1:]):
                    counts["dropped"] += 1
                    continue
                ids.append(row)
                labels.append(wanted)
        return {"input_ids": ids, "labels": labels}, counts

    def _pieces(self, item: Item, counts: Counter[str]) -> list[tuple[list[int], list[int]]]:
        row, wanted = self._written(item)
        counts["tokens"] += len(row)
        if len(row) <= self.max_length:
            return [(row, wanted)]
        if self.pretraining:  # a long text is learned in pieces: none of it is lost
            counts["split"] += 1
            cuts = range(0, len(row), self.max_length)
            return [(row[at : at + self.max_length], wanted[at : at + self.max_length]) for at in cuts]
        counts["cut"] += 1
        return [(row[: self.max_length], wanted[: self.max_length])]

    def _written(self, item: Item) -> tuple[list[int], list[int]]:
        if self.writer is None or "text" in item.value:
            row = list(self.tokenizer(plain(item.value))["input_ids"])
            end = self.tokenizer.eos_token_id
            if end is not None and row[-1:] != [end]:
                row.append(end)
            return row, list(row)
        try:
            return self.writer.tokens(item.value["messages"], item.value.get("tools"))
        except Unlearnable as error:
            raise TrainError(f"{item.where}: {error}.") from error


def tokenize(
    items: Sequence[Item], work: Tokenizing | Comparing, workers: int, tick: Tick
) -> tuple[Dataset, Counter[str]]:
    """A table of tokens, and the counts. Stops early, with what is there, when `tick` says so."""
    batches = [items[at : at + BATCH] for at in range(0, len(items), BATCH)]
    counts, tables = Counter[str](), []
    pool = multiprocessing.get_context("fork").Pool(workers) if workers > 1 and len(batches) > 1 else None
    try:
        for done, (columns, more) in enumerate(pool.imap(work, batches) if pool else map(work, batches), 1):
            counts += more
            tables.append(Dataset.from_dict(columns))
            if not tick(min(done * BATCH, len(items)), len(items)):
                break
    finally:
        if pool:
            pool.terminate()
            pool.join()
    return concatenate_datasets([t for t in tables if len(t)] or tables[:1]), counts


def work_of(spec: RunSpec, tokenizer: Any, items: Sequence[Item]) -> Tokenizing | Comparing:
    """How rows of `spec` are tokenized. Raises TrainError."""
    if spec.train.stage in registry.COMPARING:
        return Comparing(Writer.of(tokenizer, True), spec.train.stage, spec.data.max_length)
    pretraining = spec.train.stage == "pretraining"
    plain = pretraining or (bool(items) and "text" in items[0].value)
    writer = None if plain else Writer.of(tokenizer, spec.data.loss_on == "all_tokens")
    return Tokenizing(tokenizer, writer, pretraining, spec.data.max_length)


def prepare(spec: RunSpec, tokenizer: Any, tick: Tick, say: Callable[[str], None]) -> Prepared:
    """Read and tokenize all rows. Raises TrainError."""
    train, held = collect(spec)
    work = work_of(spec, tokenizer, train)
    if isinstance(work, Tokenizing) and work.writer and not work.writer.stops:
        say(
            "The chat template's marks end before the end of an answer: the model may not learn to stop (data.loss_on)."
        )
    table, counts = tokenize(train, work, spec.data.dataset_num_proc, tick)
    say(f"{len(train):,} rows to learn from, {counts['tokens']:,} tokens{_notes(counts, spec)}.")
    if not tick(len(train), len(train)):
        return Prepared(table, None)  # on the way to a stop
    if not len(table):
        raise TrainError(
            f"No row has anything left to learn within {spec.data.max_length} tokens: raise data.max_length."
        )
    validation = None
    if held and spec.eval.strategy != "no":
        validation, counts = tokenize(held, work, spec.data.dataset_num_proc, tick)
        say(f"{len(held):,} rows to validate, {counts['tokens']:,} tokens{_notes(counts, spec)}.")
        validation = validation if len(validation) else None
    table = finished(table, spec)
    if validation is not None:
        validation = finished(validation, spec)
    answered = _answered(held)[: spec.eval.num_generations]
    return Prepared(table, validation, answered if registry.STAGES[spec.train.stage].answers else [])


def _answered(held: Sequence[Item]) -> list[Item]:
    """Held-out rows as conversations with the answer that is wanted."""
    compared = ((i, question(i.value) if "prompt" in i.value else i.value) for i in held)
    return [Item(item.where, value) for item, value in compared if value and "messages" in value]


def _notes(counts: Counter[str], spec: RunSpec) -> str:
    words = {
        "cut": f"cut at {spec.data.max_length} tokens",
        "split": f"split into pieces of {spec.data.max_length} tokens",
        "long": f"longer than {spec.data.max_length} tokens dropped",
        "dropped": "with nothing left to learn dropped",
    }
    return "".join(f"; {counts[key]:,} {text}" for key, text in words.items() if counts[key])


def save(prepared: Prepared, folder: Path) -> None:
    """Write the tables for the other ranks, which map them instead of tokenizing once more."""
    shutil.rmtree(folder, ignore_errors=True)
    prepared.train.save_to_disk(folder / "train")
    if prepared.validation is not None:
        prepared.validation.save_to_disk(folder / "validation")
    held = [[item.where, item.value] for item in prepared.held_out]
    (folder / "held_out.json").write_text(json.dumps(held), encoding="utf-8")


def load(folder: Path) -> Prepared:
    """What `save` wrote."""
    validation = folder / "validation"
    held = json.loads((folder / "held_out.json").read_text(encoding="utf-8"))
    return Prepared(
        load_from_disk(folder / "train"),
        load_from_disk(validation) if validation.exists() else None,
        [Item(where, value) for where, value in held],
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
