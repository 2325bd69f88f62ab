"""The examples of a run: read, converted and selected. They are read again each time, and never kept in memory."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any

from datasets import load_dataset

from backend import registry
from backend.config import RunSpec
from backend.config.data import SYSTEM_COLUMN
from backend.config.options import for_dataset, renamed
from backend.data import (
    FIRST_VALIDATION,
    DataFileError,
    Example,
    InvalidExample,
    convert,
    detect_format,
    detection_problem,
    expand,
    file_patterns,
    is_held_out,
    place,
    read_examples,
    sample,
    split,
    unpair,
    without_padding,
)
from backend.data.copies import Seen
from backend.data.formats import UNKNOWN_COLUMNS
from backend.train.run_log import Stopped, TrainError
from backend.wording import counted

Tick = Callable[[int, int], bool]  # (examples done, examples in total, 0 if not known) -> continue?
ROWS_PER_TICK = 1000
COLUMNS_ADVICE = " Set data.format and its column options."
REASONS = 5  # of skipped examples that are logged
FIRST = 1000  # training examples of a streamed dataset that are prepared before training
FIRST_READ = 100_000  # examples of a streamed dataset in which its first training and validation examples are found


@dataclass(frozen=True)
class ConvertedExample:
    """An example as a conversation, a text or a preference, and its file and line for messages about it."""

    location: str
    value: dict[str, Any]


UNCONVERTED = ConvertedExample("", {})  # stands for an example that is not needed, so that positions stay the same


@dataclass(frozen=True)
class Part:
    """The training examples of a run, or the validation examples. `rows`: those of all files, which may be read any
    number of times; `positions`: where the examples of this part are in them, in the order of the part. With `unpairs`,
    a pair counts as two labeled completions, as in KTO. With `skips`, examples that cannot be rendered are left out."""

    rows: Rows | Sequence[ConvertedExample]
    positions: Sequence[int]
    unpairs: bool = False
    skips: bool = False

    def __len__(self) -> int:
        return len(self.positions)

    def __iter__(self) -> Iterator[tuple[int, ConvertedExample]]:
        """The examples in the order of the files, each with its number in the order of the part. Raises TrainError."""
        numbers = array("q", [-1]) * (1 + max(self.positions, default=-1))
        for number, position in enumerate(self.positions):
            numbers[position] = number
        found = 0
        for position, example in enumerate(islice(self._examples(numbers), len(numbers))):
            if numbers[position] >= 0:
                found += 1
                yield numbers[position], example
        if found < len(self):
            raise TrainError("The data files changed while they were being read. Start again when they are complete.")

    @property
    def is_in_file_order(self) -> bool:
        """Whether the order of the part is that of the files."""
        return all(one < other for one, other in pairwise(self.positions))

    def _examples(self, numbers: Sequence[int]) -> Iterator[ConvertedExample]:
        if self.unpairs:
            for row in self.rows:
                yield from (ConvertedExample(row.location, value) for value in unpair(row.value))
        elif isinstance(self.rows, Rows):
            yield from self.rows.only(lambda position: position < len(numbers) and numbers[position] >= 0)
        else:
            yield from self.rows


@dataclass(frozen=True)
class Rows:
    """The converted examples of files or of a dataset on the Hub. Iterating raises TrainError, except for examples that
    data.on_bad_example skips: those are in `skipped`, as sentences, in the order in which they were found first."""

    spec: RunSpec
    read: Callable[[Callable[[Exception], None] | None], Iterator[tuple[str, Example]]]
    """Gives (location, example as in the file); the argument gets examples that cannot be read, or is None."""
    skipped: dict[str, None] = field(default_factory=dict)

    def __iter__(self) -> Iterator[ConvertedExample]:
        return self.only(lambda position: True)

    def only(self, wanted: Callable[[int], bool]) -> Iterator[ConvertedExample]:
        """The examples, but UNCONVERTED for those at other positions than the `wanted` ones and the first. Positions
        do not count examples that are skipped, so all are converted if some may be."""
        skip = self._skip if self.spec.data.on_bad_example == "skip" else None
        try:
            yield from _converted(self.spec, self.read(skip), skip, wanted)
        except DataFileError as error:
            raise TrainError(f"{error}.") from error

    def _skip(self, error: Exception) -> None:
        self.skipped[f"{error}."] = None


def select(
    spec: RunSpec, info: Callable[[str], None] = lambda line: None, tick: Tick = lambda done, total: True
) -> list[tuple[Part, Part]]:
    """The training and the validation part of each dataset, in an order that train.seed decides; `info` gets log lines.
    Raises TrainError, and Stopped when `tick` returns False."""
    seen = Seen() if spec.data.drop_duplicates else None
    found = []
    for index in datasets(spec):
        with about(spec, index):
            found.append(_Selection(for_dataset(spec, index), seen, telling(spec, index, info), tick))
    parts = []
    for index, selection in enumerate(found):
        with about(spec, index):
            parts.append(selection.parts())  # all training examples are known now
    return parts


def datasets(spec: RunSpec) -> range:
    """The numbers of the datasets, from 0."""
    return range(len(spec.data.datasets))


@contextmanager
def about(spec: RunSpec, index: int) -> Iterator[None]:
    """Errors about one dataset name its options as they are written in the list."""
    try:
        yield
    except TrainError as error:
        where = f"{spec.data.title_of(index)}: " if spec.data.sources else ""
        raise TrainError(where + renamed(str(error), index)) from None  # else the original error would be reported too


def telling(spec: RunSpec, index: int, info: Callable[[str], None]) -> Callable[[str], None]:
    """`info` for lines about one dataset, which is named where there are several."""
    if not spec.data.sources:
        return info
    return lambda line: info(f"{spec.data.title_of(index)}: {line}")


class _Selection:
    """The examples of one dataset. `spec` has no other; `seen`: those of the datasets before."""

    def __init__(self, spec: RunSpec, seen: Seen | None, info: Callable[[str], None], tick: Tick) -> None:
        self.spec, self.seen, self.info, self.tick = spec, seen, info, tick
        self.rows, self.held_out, self.unpairs = training_rows(spec), array("q"), False
        if spec.data.streaming:
            self.train, self.held_out = _first(spec, self.rows, info, tick)
        else:
            self.train, self.unpairs = _positions(self.rows, "training", seen, info, tick)
        if not self.train:
            raise TrainError(
                "data.drop_duplicates: every example of this dataset also occurs in an earlier dataset. Remove the "
                "dataset."
            )
        self._split_and_sample()

    def _split_and_sample(self) -> None:
        """Leave the positions that are trained on in `train`. The others are no reason to drop an example of a later
        dataset."""
        data, seed, positions = self.spec.data, self.spec.train.seed, self.train
        if not data.streaming and data.splits:
            if len(positions) < 2:
                which = "is left after data.drop_duplicates" if data.drop_duplicates else "is in the dataset"
                raise TrainError(
                    f"data.validation: only one example {which}, and it cannot be split. Set it to none, or use "
                    "validation files."
                )
            self.train, self.held_out = (array("q", part) for part in split(positions, data.validation_split, seed))
        # KTO trains in the order of the dataset, and estimates the KL divergence with completions of the neighbors.
        is_kto = self.spec.train.stage == "kto"
        unpairs = self.unpairs and is_kto
        train = _unpaired(self.train, unpairs)
        self.train = array("q", sample(train, data.max_samples, seed, shuffles=is_kto))
        if self.seen and len(self.train) < len(train):
            used = {number // 2 if unpairs else number for number in self.train} | {*self.held_out}
            self.seen.forget_unused([number in used for number in positions])

    def parts(self) -> tuple[Part, Part]:
        """The training and the validation part."""
        spec, data, is_kto = self.spec, self.spec.data, self.spec.train.stage == "kto"
        others, validation, others_unpair = self.rows, self.held_out, self.unpairs
        if data.source == "builtin" or data.validation == "files":
            others = _files(spec, file_patterns(data)[1], "data.validation_files")
            validation, others_unpair = _positions(others, "validation", self.seen, self.info, self.tick)
        unpairs, others_unpair = (each and is_kto for each in (self.unpairs, others_unpair))
        validation = array("q", sample(_unpaired(validation, others_unpair), 0, spec.train.seed, shuffles=is_kto))
        skips = data.on_bad_example == "skip"
        return Part(self.rows, self.train, unpairs, skips), Part(others, validation, others_unpair, skips)


def _unpaired(positions: array[int], unpairs: bool) -> array[int]:
    """The positions of labeled completions, two for each pair."""
    return array("q", (n for p in positions for n in (2 * p, 2 * p + 1))) if unpairs else positions


def _positions(
    rows: Rows, name: str, seen: Seen | None, info: Callable[[str], None], tick: Tick
) -> tuple[array[int], bool]:
    """The positions of the rows, without copies of training examples if there is `seen`, and whether they are pairs."""
    found, dropped, are_pairs = array("q"), 0, False
    checks = seen is not None or name == "validation"  # without evaluations nothing else would convert them
    for position, row in enumerate(rows.only(lambda position: checks)):
        are_pairs = are_pairs or "chosen" in row.value
        if seen and seen.is_copy(row.value, remember=name == "training"):
            dropped += 1
        else:
            found.append(position)
        if position % ROWS_PER_TICK == 0 and not tick(0, 0):
            raise Stopped
    if dropped:
        info(f"{counted(dropped, f'{name} example')} dropped: equal to an earlier training example.")
    tell_skipped(len(rows.skipped), rows.skipped, name, info)
    return found, are_pairs


def _first(spec: RunSpec, rows: Rows, info: Callable[[str], None], tick: Tick) -> tuple[array[int], array[int]]:
    """The positions of the first training examples of a streamed dataset, and of the first ones of its validation
    split."""
    train, validation, data, count = array("q"), array("q"), spec.data, 0
    enough = min(FIRST, data.max_samples or FIRST)
    for position, row in enumerate(islice(rows, FIRST_READ)):
        count = position + 1
        if data.splits and is_held_out(row.value, data.validation_split, spec.train.seed):
            validation.extend([position] if len(validation) < FIRST_VALIDATION else ())
        elif len(train) < enough:
            train.append(position)
        if len(train) == enough and (not data.splits or len(validation) == FIRST_VALIDATION):
            break
        if position % ROWS_PER_TICK == 0 and not tick(0, 0):
            raise Stopped
    if not train or (data.splits and not validation):
        part = "validation" if train else "training"
        raise TrainError(
            f"data.validation_split: none of the first {counted(count, 'example')} is a {part} example. With "
            "data.streaming, a hash decides each example's part. Set another fraction, or use validation files."
        )
    tell_skipped(len(rows.skipped), rows.skipped, "training", info)
    if data.splits:
        found = counted(len(validation), "validation example")
        info(f"The validation set is the {found} in the first {counted(count, 'example')}; later ones are not used.")
    return train, validation


def training_rows(spec: RunSpec, number: int = 0) -> Rows:
    """The rows that the training examples are taken from. A streamed dataset is read in passes: `number` decides the
    order of its files, unless data.max_samples uses the first examples."""
    if spec.data.source == "hub":
        return _hub(spec)
    shuffles = spec.data.streaming and not spec.data.max_samples
    return _files(spec, file_patterns(spec.data)[0], "data.files", f"{spec.train.seed} {number}" if shuffles else "")


def streamed(spec: RunSpec, rows: Rows) -> Iterator[ConvertedExample]:
    """The training examples of a streamed dataset. Raises TrainError."""
    data, seed = spec.data, spec.train.seed
    kept = (row for row in rows if not (data.splits and is_held_out(row.value, data.validation_split, seed)))
    return islice(kept, data.max_samples or None)


def tell_skipped(count: int, reasons: Iterable[str], name: str, info: Callable[[str], None]) -> None:
    """Log how many examples were skipped, and the first reasons."""
    if count:
        info(f"{counted(count, f'{name} example')} skipped (data.on_bad_example), for these reasons:")
    shown = list(islice(reasons, REASONS))
    for reason in shown:
        info(f"  {reason}")
    if count > len(shown) > 0:
        info(f"  and {count - len(shown):,} more")


def _files(spec: RunSpec, files: Sequence[str], option: str, shuffle: str = "") -> Rows:
    """The rows of the files, which the seed `shuffle` orders if there is one."""
    try:
        paths = expand(files)
    except DataFileError as error:
        raise TrainError(f"{option}: {error}.") from error
    if shuffle:
        random.Random(shuffle).shuffle(paths)
    return Rows(
        spec,
        lambda skip: ((place(path, line), row) for path in paths for line, row in read_examples(path, skip=skip)),
    )


def hub_fingerprint(spec: RunSpec) -> str:
    """What identifies the downloaded data of a dataset on the Hub. Raises TrainError."""
    return str(_hub_table(spec)._fingerprint)


def _hub_table(spec: RunSpec) -> Any:
    data = spec.data
    try:
        return load_dataset(data.hub_id, data.hub_config or None, split=data.hub_split, streaming=data.streaming)
    except Exception as error:  # errors of many kinds: network, name, split, configuration
        raise TrainError(f"data.hub_id: {data.hub_id} could not be loaded: {_first_line(error)}") from error


def _hub(spec: RunSpec) -> Rows:
    data, table = spec.data, _hub_table(spec)
    names = table.column_names or ()  # not always known for a streamed dataset
    if names and data.system_column not in ("", SYSTEM_COLUMN, *names) and data.format not in ("auto", "text"):
        columns = ", ".join(names)
        raise TrainError(f"data.system_column: the dataset has no column {data.system_column}; it has {columns}.")
    return Rows(
        spec, lambda _: ((f"{data.hub_id}, row {n}", row) for n, row in enumerate(map(without_padding, table), 1))
    )


def _converted(
    spec: RunSpec,
    located: Iterable[tuple[str, Example]],
    skip: Callable[[Exception], None] | None,
    wanted: Callable[[int], bool],
) -> Iterator[ConvertedExample]:
    """Converted examples, as in `Rows.only`. With data.format auto, the first example decides the format. `skip` gets
    the error of an example that does not match it. Raises TrainError."""
    stage = registry.STAGES[spec.train.stage]
    format, empty = spec.data.format if spec.data.source != "builtin" else "auto", True
    for position, (location, row) in enumerate(located):
        if not skip and position and not wanted(position):
            yield UNCONVERTED
            continue
        if format == "auto":
            format = detect_format(row, stage.formats) or ""
            if not format:
                problem = detection_problem(row, stage.formats)
                advice = COLUMNS_ADVICE if problem.startswith(UNKNOWN_COLUMNS) else ""
                raise TrainError(f"{location}: {problem}.{advice}")
        if format not in stage.formats:
            option = "data.builtin" if spec.data.source == "builtin" else "data.format"
            raise TrainError(
                f"{location}: {option}: {stage.label} needs the format {registry.FORMATS[stage.formats[0]].label}, but "
                f"this example has the format {registry.FORMATS[format].label}."
            )
        try:
            value = convert(row, format, spec.data)
        except InvalidExample as error:
            if not skip:
                raise TrainError(f"{location}: {error}.") from error
            skip(InvalidExample(f"{location}: {error}"))
            continue
        empty = False
        yield ConvertedExample(location, value)
    if empty:
        usable = "usable examples" if skip else "examples"
        raise TrainError(f"The dataset has no {usable}. Check data.files, or data.hub_split.")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
