"""data.streaming: training examples that are read and tokenized while the model trains.

The files are read pass after pass. A pass is cut into blocks of SHARE examples for each data-parallel rank. Each rank
reads all examples, tokenizes its own ones of a block, packs them, and shuffles the sequences. A sequence says where the
stream continues after it. A checkpoint has this place for each rank, so that a resumed run continues with the next
sequence: it reads the pass up to that block, and tokenizes the block again.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain, count, islice
from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import DataLoader, IterableDataset

from backend.config import RunSpec
from backend.runs.resume_point import STREAM_PLACES
from backend.train import loss_weights, rehearsal
from backend.train.context import TrainContext
from backend.train.data import SKIPPED, TRAIN, Tokenizer, tell_counts, tokenize, tokenizer_for
from backend.train.examples import REASONS, ConvertedExample, Part, streamed, training_rows
from backend.train.run_log import TrainError

SHARE = 1000  # examples of a rank in a block, whose tokens are in memory together
AHEAD = 8  # batches that a worker process prepares, in shared memory: those of the next block take a second or more
PACKING = "bfd"  # whole examples with their own positions, which do not attend to each other
EXAMPLES = "examples"  # a count
NEXT = "next"  # of a sequence: the place after it, or the error that ends the stream


@dataclass(frozen=True)
class Place:
    """Where a rank's stream continues: with the sequence `row` of the block that begins with the example `start` of a
    pass. `counts`: what has become of this rank's examples, with those of this block unless `row` is 0."""

    number: int = 0  # of the pass
    start: int = 0
    row: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)


class Stream(IterableDataset[dict[str, Any]]):
    """The sequences of a data-parallel rank, without an end. `place`: where the stream continues."""

    def __init__(self, spec: RunSpec, tokenizer: Any, rank: int = 0, ranks: int = 1) -> None:
        self.spec, self.rank, self.ranks, self.place = spec, rank, ranks, Place()
        self._tokenizer = copy.deepcopy(tokenizer)  # as for the prepared examples, whatever training changes
        self._to_columns: Tokenizer | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        place = self.place
        row, counts = place.row, Counter(place.counts)
        try:
            for number in count(place.number):
                for start, block, more in self._blocks(number, place.start if number == place.number else 0):
                    if not row:
                        _add(counts, more)
                    order = list(range(len(block)))
                    random.Random(f"{self.spec.train.seed} {number} {start}").shuffle(order)
                    for n in range(row, len(block)):
                        yield {**block[order[n]], NEXT: Place(number, start, n + 1, dict(counts))}
                    row = 0
        except TrainError as error:  # a worker process would raise it with a traceback in its message
            yield {NEXT: str(error)}

    def _blocks(self, number: int, start: int) -> Iterator[tuple[int, Dataset, Counter[str]]]:
        """(first example, this rank's sequences, counts) of the blocks of a pass from the example `start`."""
        rows = training_rows(self.spec, number)
        examples, size = streamed(self.spec, rows), SHARE * self.ranks
        next(islice(examples, start, start), None)  # reads up to there
        rows.skipped.clear()
        own = (self.rank - number) % self.ranks  # so that each rank gets some, even of few examples
        for first in examples:
            block = chain([first], islice(examples, size - 1))
            mine = [example for n, example in enumerate(block) if n % self.ranks == own]
            self._to_columns = self._to_columns or tokenizer_for(self.spec, self._tokenizer, first)
            sequences, counts = self._sequences(mine, self._to_columns)
            if not self.rank:  # all ranks have read the same examples
                reasons = {f"{SKIPPED} {reason}": 1 for reason in rows.skipped}
                _add(counts, {SKIPPED: len(rows.skipped), **reasons})
            rows.skipped.clear()
            yield start, sequences, counts
            start += size

    def _sequences(self, examples: Sequence[ConvertedExample], to_columns: Tokenizer) -> tuple[Dataset, Counter[str]]:
        data = self.spec.data
        part = Part(examples, range(len(examples)), skips=data.on_bad_example == "skip")
        sequences, counts = tokenize(part, to_columns, 1, lambda done, of: True)
        if data.packing and len(sequences):
            sequences = loss_weights.pack(sequences, data.max_length, PACKING)
        return sequences, counts + Counter({EXAMPLES: len(examples) - counts[SKIPPED]})


@dataclass(frozen=True)
class Batches:
    """The batches of a stream; taking one moves the stream's place after it. A worker process prepares them if there
    are `workers`."""

    stream: Stream
    size: int
    collate: Callable[[Sequence[Any]], Any]
    workers: int

    def __iter__(self) -> Iterator[Any]:
        loader = DataLoader(
            self.stream,
            self.size,
            collate_fn=partial(_collated, self.collate),
            num_workers=min(1, self.workers),
            prefetch_factor=AHEAD if self.workers else None,
            generator=torch.Generator(),  # else the loader draws a random number, which a resumed run would draw again
        )
        for batch, after in loader:
            if isinstance(after, str):
                raise TrainError(after)
            self.stream.place = after
            yield batch


def _collated(collate: Callable[[Sequence[Any]], Any], sequences: Sequence[Mapping[str, Any]]) -> tuple[Any, Any]:
    after = sequences[-1][NEXT]
    return None if isinstance(after, str) else collate(sequences), after


class StreamMixin:
    """Mixin for trainers of next-token stages, which train on a stream if there is one."""

    stream: Stream | None = None
    context: TrainContext

    def get_train_dataloader(self: Any) -> Any:
        """The batches of the stream, of which accelerate would leave out some on each rank."""
        if self.stream is None:
            return super().get_train_dataloader()  # type: ignore[misc]
        return Batches(self.stream, self._train_batch_size, self.data_collator, self.args.dataloader_num_workers)

    def _init_training_state(self: Any, *args: Any, **more: Any) -> Any:
        """Continue where the checkpoint says."""
        trained = super()._init_training_state(*args, **more)  # type: ignore[misc]
        places = [Place(**place) for place in self.state.stateful_callbacks.pop(STREAM_PLACES, ())]
        if self.stream is not None and places:
            self.stream.place = _own_place(places, self.stream, self.context.run_log.info)
        return trained

    def _save_checkpoint(self: Any, *args: Any) -> None:
        if self.stream is not None:
            places = self.context.group.gather(asdict(self.stream.place))
            self.state.stateful_callbacks[STREAM_PLACES] = places[:: self.context.run.tensor_parallel_size]
        super()._save_checkpoint(*args)  # type: ignore[misc]

    def log(self: Any, *args: Any, **more: Any) -> None:
        """Log no epoch: the Trainer's is the share of the steps."""
        if self.stream is not None:
            self.state.epoch = None
        super().log(*args, **more)  # type: ignore[misc]


def _own_place(places: Sequence[Place], stream: Stream, info: Callable[[str], None]) -> Place:
    """The place of this rank. With another number of ranks than before, the block after those that were begun."""
    if len(places) == stream.ranks:
        return places[stream.rank]
    size = SHARE * len(places)
    info(
        f"The checkpoint was saved with {len(places):,} data-parallel processes, and now there are {stream.ranks:,}. "
        f"Training continues with the next block; about {size:,} examples may be left out."
    )
    last = max(places, key=lambda place: (place.number, place.start))
    counts = _total(place.counts for place in places) if not stream.rank else {}
    return Place(last.number, last.start + size, 0, counts)


def create(context: TrainContext, tokenizer: Any) -> Stream | None:
    """The stream of this rank; None without data.streaming."""
    spec, size = context.spec, context.run.tensor_parallel_size  # ranks that train on the same examples
    if not is_streamed(spec):
        return None
    return Stream(spec, tokenizer, context.group.rank // size, context.group.world // size)


def is_streamed(spec: RunSpec) -> bool:
    """Whether this process trains on a stream. A rehearsal trains on the longest of the prepared examples."""
    return spec.data.streaming and not rehearsal.is_rehearsal()


def report(context: TrainContext, stream: Stream) -> None:
    """Log what has become of the examples of all ranks. A collective call."""
    each = context.group.gather(dict(stream.place.counts))[:: context.run.tensor_parallel_size]
    counts = _total(each)
    tell_counts(TRAIN, counts[EXAMPLES], counts, context.spec, context.run_log.info, "Streamed ")


def _total(each: Any) -> Counter[str]:
    total = Counter[str]()
    for counts in each:
        _add(total, counts)
    return total


def _add(total: Counter[str], more: Mapping[str, int]) -> None:
    """Add counts, with the first reasons of skipped examples only."""
    known = sum(key.startswith(f"{SKIPPED} ") for key in total)
    for key, number in more.items():
        is_reason = key.startswith(f"{SKIPPED} ")
        if not is_reason or known < REASONS:
            total[key] += number
            known += is_reason
