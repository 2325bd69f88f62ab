"""Inspection of all examples: they are read and converted, and rendered and tokenized with the model's tokenizer and
chat template, by the functions that the run uses.

Called by `backend.train.worker`; what it finds is shown before the run starts. It never downloads anything.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
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
    file_of,
    file_patterns,
    is_held_out,
    llamafactory,
    place,
    read_examples,
    unpair,
)
from backend.data.chat import has_loss_weights, has_other_weights
from backend.data.copies import Seen
from backend.data.preferences import MARGIN
from backend.inspect.examples import FORMAT
from backend.inspect.facts import num_sequences
from backend.train import added_tokens, completion_start, end_tokens, model, templates
from backend.train.data import tokenizer_for
from backend.train.examples import FIRST_READ, ConvertedExample
from backend.train.preference_data import SPECIAL, UNREAD, unread_keys
from backend.train.run_log import TrainError
from backend.train.templates import ChatTokenizer, UnmarkedCompletions, UnsupportedConversation

MAX_ISSUES = 3  # problems listed for a data file; also the most unrenderable examples listed
MAX_LENGTHS = 2000
MAX_LINES = 2**32  # of a file
MAX_PLACES = 50  # of each kind of problem
NOTED = ("truncated", "dropped", "long", "identical", "endless", "weightless")  # counts that are problems of an example
MAX_STARTS = 200  # examples whose generation prompt is rendered, to compare it with their training text
MAX_DIGESTS = 10_000  # training examples that are compared with those of other datasets
MAX_POSITIONS = 100_000  # training examples of which the unusable ones are listed; a check selects from them in 0.1 s
BATCH = 16  # examples between two readings of the clock
REPORT_SECONDS = 0.5  # between two progress reports


def inspect(
    spec: dict[str, Any], base: str, folder: str, report: Callable[[dict[str, Any]], None] = lambda facts: None
) -> dict[str, Any]:
    """Facts about the examples of a spec (sections of a RunSpec; paths are relative to `base`) with the tokenizer in
    `folder`, see ExampleFacts; without a folder they are only read and converted. `report` gets the facts so far."""
    run_spec, found, tokenizer = RunSpec.model_validate(spec), ExampleFacts(report), None
    try:
        if folder:
            tokenizer = model.load_tokenizer(run_spec, model.ModelSource(folder, {"local_files_only": True}))
            found.known_vocabulary, found.vocabulary = added_tokens.sizes(run_spec, tokenizer)
            if run_spec.data.chat_template == "model":
                found.has_chat_template = bool(tokenizer.chat_template)
    except TrainError as error:
        found.problem = str(error)
    _inspect_examples(run_spec, Path(base), tokenizer, found)
    are_compared = run_spec.data.drop_duplicates and found.complete and len(found.seen.examples) <= MAX_DIGESTS
    return {**found.as_json(), "digests": [*found.seen.examples] if are_compared else []}


@dataclass
class ExampleFacts:
    """The result, while it is collected. A location is a file and a line."""

    report: Callable[[dict[str, Any]], None]
    problem: str = ""  # of the tokenizer
    has_chat_template: bool | None = None  # of the tokenizer; None where the run sets another one
    vocabulary: int = 0  # the largest token id + 1
    known_vocabulary: int = 0  # `vocabulary` without the tokens that the spec adds
    num_train: int = 0  # examples that were read
    num_validation: int = 0
    complete: bool = True  # each file was read to its end
    data_issues: list[tuple[bool, str, str, bool]] = field(default_factory=list)  # in training data, location, ...
    invalid: list[int] = field(default_factory=lambda: [0, 0])  # training, validation examples with errors
    tokenized: int = 0
    usable: int = 0  # training examples with a trained token
    unusable: list[int] | None = field(default_factory=list)  # positions of the others; None: too many to report
    held_out: int | None = None  # training examples that the validation split of a streamed dataset takes
    held_out_positions: list[int] = field(default_factory=list)  # of the first of them, counted as in `unusable`
    labels: list[int] = field(default_factory=lambda: [0, 0])  # desirable, undesirable training examples to train on
    usable_validation: int = 0  # validation examples with a trained token
    skipped: list[str] = field(default_factory=list)  # the first examples that the run skips, and why
    unrenderable: list[tuple[bool, str, str]] = field(default_factory=list)  # in training data, location, reason
    num_unrenderable: list[int] = field(default_factory=lambda: [0, 0])  # training, validation examples
    token_lengths: list[int] = field(default_factory=list)  # of the first MAX_LENGTHS training examples
    trained_lengths: list[int] = field(default_factory=list)  # of those of them that have a trained token
    measured: int = 0  # training examples whose length is known
    sequences: int = 0  # of at most max_length tokens, into which these can be split
    longest: int = 0  # of all examples that were tokenized
    longest_trained: int = 0  # of those of them that have a trained token; the run drops the others
    longest_row: int = 0  # where the longest example is
    counts: Counter[str] = field(default_factory=Counter)
    split_markers: list[str] = field(default_factory=list)  # of ChatML, if the run uses it
    start: completion_start.Start | None = None  # how the first such completion begins in generation and in training
    start_kwargs: dict[str, bool] | None = None  # variables of the chat template with which both begin the same way
    places: dict[str, list[int]] = field(default_factory=dict)  # kind of problem -> rows of the files that have it
    row: int = -1  # the row that was read last: 0 is the first of the training files
    seen: Seen = field(default_factory=Seen)
    files: list[str] = field(default_factory=list)  # that were read
    equal_places: dict[str, tuple[str, str]] = field(default_factory=dict)  # kind -> place, earlier
    next_report: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """As the client reads it."""
        inner = ("report", "row", "seen", "files", "next_report")
        facts = {name: value for name, value in vars(self).items() if name not in inner}
        found = {
            "unread": unread_keys(self.counts),
            "special": unread_keys(self.counts, SPECIAL),
            "unknown_ends": unread_keys(self.counts, end_tokens.UNKNOWN),
            "unlike_llamafactory": unread_keys(self.counts, llamafactory.DIFFERENCE),
        }
        return {"format": FORMAT, **facts, "counts": dict(self.counts), **found, "rows": self.row + 1}

    def note(self, *kinds: str) -> None:
        """Remember where problems are, as far as the page lets people walk through them."""
        for kind in kinds:
            places = self.places.setdefault(kind, [])
            if len(places) < MAX_PLACES and self.row not in places[-1:]:
                places.append(self.row)

    def add_tokenized(self, is_training: bool, usable: bool) -> None:
        """Count an example; `usable`: a token of it is trained. The training examples come first."""
        self.tokenized += 1
        if not is_training:
            self.usable_validation += usable
            return
        self.usable += usable
        if self.tokenized > MAX_POSITIONS:
            self.unusable = None
        elif not usable and self.unusable is not None:
            self.unusable.append(self.tokenized - 1)

    def count_label(self, is_training: bool, value: dict[str, Any], count: int = 1) -> None:
        """Count a training example of KTO, or with -1 take one back that is not trained on."""
        if is_training and "label" in value:
            self.labels[not value["label"]] += count

    def hold_out(self, count: int) -> None:
        """Note that the validation split of a streamed dataset takes the next `count` examples, or does not take the
        next one."""
        self.held_out = (self.held_out or 0) + count
        if self.tokenized < MAX_POSITIONS:
            self.held_out_positions.extend(range(self.tokenized, self.tokenized + count))

    def add_start(self, spec: RunSpec, chat: ChatTokenizer | None, value: dict[str, Any]) -> None:
        """Compare how a completion begins in generation and in training, if it is one of the first ones."""
        if chat is None or self.counts["starts"] >= MAX_STARTS or not registry.STAGES[spec.train.stage].generates:
            return
        self.counts["starts"] += 1
        try:
            start = completion_start.difference(chat, value)
            if start and not self.start:
                self.start, self.start_kwargs = start, completion_start.kwargs_without_difference(chat, value)
        except UnsupportedConversation:  # a template without a generation prompt for it
            return
        if start:
            self.counts["different_starts"] += 1
            self.note("different_starts")

    def add_length(self, is_training: bool, is_usable: bool, length: int, limit: int) -> None:
        """Note how many tokens an example has; `limit`: max_length; `is_usable`: one of them is trained."""
        if length > self.longest:
            self.longest, self.longest_row = length, self.row
        self.longest_trained = max(self.longest_trained, length if is_usable else 0)
        if is_training:
            self.measured += 1
            self.sequences += num_sequences(length, limit)
            if len(self.token_lengths) < MAX_LENGTHS:
                self.token_lengths.append(length)
                self.trained_lengths += [length] if is_usable else []

    def is_copy(self, is_training: bool, value: dict[str, Any], line: int) -> bool:
        """Whether an example, in this line of the last file, is equal to a training example before it. Counts copies
        and contradictions."""
        number = (len(self.files) - 1) * MAX_LINES + line
        if self.seen.is_copy(value, is_training, number):
            self._add_repeat("copies" if is_training else "copies_in_validation", line)
            return True
        if is_training and self.seen.contradicts(value, number):
            self._add_repeat("contradictions", line)
        return False

    def _add_repeat(self, kind: str, line: int) -> None:
        self.counts[kind] += 1
        self.note(kind)
        if kind not in self.equal_places:
            file, earlier = divmod(self.seen.earlier, MAX_LINES)
            self.equal_places[kind] = (place(self.files[-1], line), place(self.files[file], earlier))

    def add_unrenderable(self, spec: RunSpec, is_training: bool, location: str, error: TrainError) -> None:
        """Note an example that cannot be tokenized, and why."""
        self.note("unusable")
        if spec.data.on_bad_example == "skip":
            self.counts["skipped_texts"] += 1
            self.skip(error)
            return
        self.counts["unmarked"] += isinstance(error.__cause__, UnmarkedCompletions)
        self.num_unrenderable[not is_training] += 1
        if len(self.unrenderable) < MAX_ISSUES:
            reason = str(error).removeprefix(f"{location}: ").rstrip(".")
            self.unrenderable.append((is_training, location, reason))

    def skip(self, reason: object) -> None:
        """Count an example that the run skips; the reason begins with its place."""
        self.counts["skipped"] += 1
        if len(self.skipped) < MAX_ISSUES:
            self.skipped.append(str(reason).rstrip("."))

    def add_broken_row(self, spec: RunSpec, is_training: bool, error: DataFileError) -> None:
        """Count a row that cannot be read, after which the next can be."""
        self.row += 1
        self.add_invalid(spec, is_training, place(error.path, error.line), error.message)
        if spec.data.on_bad_example != "skip":
            self.add_examples(is_training, 1)

    def add_invalid(self, spec: RunSpec, is_training: bool, location: str, problem: str) -> None:
        """Note an example that the run skips, or because of which it stops."""
        self.note("unusable")
        if spec.data.on_bad_example == "skip":
            self.skip(f"{location}: {problem}")
            return
        self.invalid[not is_training] += 1
        file = file_of(location)
        if sum(is_example and file_of(each) == file for _, each, _, is_example in self.data_issues) < MAX_ISSUES:
            self.data_issues.append((is_training, location, problem, True))

    def add_examples(self, is_training: bool, count: int) -> None:
        """Count examples that were read, and report the progress now and then."""
        if is_training:
            self.num_train += count
        else:
            self.num_validation += count
        if (self.num_train + self.num_validation) % BATCH < count and time.monotonic() > self.next_report:
            self.report({**self.as_json(), "complete": False, "unusable": None})
            self.next_report = time.monotonic() + REPORT_SECONDS


def _inspect_examples(spec: RunSpec, base: Path, tokenizer: Any, found: ExampleFacts) -> None:
    """Fill `found` from the training examples, then from the validation examples."""
    to_columns: Any = None
    for is_training, example in _examples(spec, base, found):
        found.count_label(is_training, example.value)
        if tokenizer is None:
            continue
        if to_columns is None:
            if found.has_chat_template is False and spec.train.stage != "pretraining" and "text" not in example.value:
                tokenizer = None  # the rule about a missing chat template reports it
                continue
            try:
                with _memory_errors_named(spec, example):
                    to_columns = tokenizer_for(spec, tokenizer, example)
            except TrainError as error:
                tokenizer, found.problem = None, str(error)
                continue
            if to_columns.chat is not None and spec.data.chat_template == "chatml":
                found.split_markers = templates.split_markers(tokenizer)
        try:
            with _memory_errors_named(spec, example):
                columns, counts = to_columns(example)
        except TrainError as error:
            found.add_tokenized(is_training, False)
            found.count_label(is_training, example.value, -1)
            found.add_unrenderable(spec, is_training, example.location, error)
            continue
        found.counts += counts
        found.note(
            *(kind for kind in NOTED if counts[kind]),
            *(kind for kind in (UNREAD, SPECIAL) if unread_keys(counts, kind)),
        )
        is_usable = any(len(values) for values in columns.values())
        found.add_tokenized(is_training, is_usable)
        if not is_usable:
            found.count_label(is_training, example.value, -1)
        found.add_start(spec, to_columns.chat, example.value)
        if length := counts["longest_sequences"] or counts["tokens"]:  # for a pair, the longer sequence
            found.add_length(is_training, is_usable, length, spec.data.max_length)


@contextmanager
def _memory_errors_named(spec: RunSpec, example: ConvertedExample) -> Iterator[None]:
    """Let a MemoryError name what takes the memory, as the subject of a sentence."""
    try:
        yield
    except MemoryError:
        template = spec.data.chat_template_file if spec.data.chat_template == "file" else "the chat template"
        raise MemoryError(f"rendering {example.location} with {template}") from None


def _examples(spec: RunSpec, base: Path, found: ExampleFacts) -> Iterator[tuple[bool, ConvertedExample]]:
    """(whether it is a training example, the example), for examples that can be read and converted."""
    data = spec.data
    for is_training, files in zip((True, False), file_patterns(data), strict=True):
        format = "" if data.source == "builtin" or data.format == "auto" else data.format
        for path in expand(files, base):
            format = yield from _converted(spec, path, format, is_training, found)


def _converted(
    spec: RunSpec, path: Path, format: str, is_training: bool, found: ExampleFacts
) -> Generator[tuple[bool, ConvertedExample], None, str]:
    """The examples of one file, up to the first that cannot be read. Invalid examples are added to `found`. Returns the
    format: the first example decides it, also for the next files, as in the run."""
    data, formats = spec.data, registry.STAGES[spec.train.stage].formats
    first: Mapping[str, Any] = {}
    found.files.append(str(path))
    try:
        for line, row in read_examples(path, skip=partial(found.add_broken_row, spec, is_training)):
            found.row += 1
            if is_training and data.streaming and found.row >= FIRST_READ:  # the rest may be of any size
                found.complete = False
                break
            first, format = first or row, format or detect_format(row, formats) or ""
            if format not in formats:  # reported by the inspection of the data files, or by a rule
                found.complete = False
                return ""
            values: list[dict[str, Any]] = []
            try:
                value = convert(row, format, data)
                unlike = llamafactory.difference(row, format, data, first, path)
                found.counts.update([llamafactory.DIFFERENCE + unlike] if unlike else ())
                if found.is_copy(is_training, value, line) and data.drop_duplicates:
                    continue
                found.counts["with_weights"] += has_other_weights(value.get("messages", ()))
                found.counts["weighted"] += has_loss_weights(value.get("messages", ()))
                found.counts["with_margin"] += MARGIN in value
                values = unpair(value) if spec.train.stage == "kto" else [value]
            except InvalidExample as error:
                found.add_invalid(spec, is_training, place(path, line), str(error))
                if data.on_bad_example == "skip":
                    continue
            if is_training and data.streaming and data.splits:
                held_out = bool(values) and is_held_out(value, data.validation_split, spec.train.seed)
                found.hold_out(held_out * len(values))  # both parts of a pair
            found.add_examples(is_training, len(values) or 1)
            yield from ((is_training, ConvertedExample(place(path, line), each)) for each in values)
    except DataFileError as error:
        location = place(path, error.line)
        found.data_issues.append((is_training, location, error.message, error.is_example))
        found.complete = False
    return format
