"""Incremental reading of the log and the metrics of a run while they grow.

Imports nothing from Footplate. Offsets are in bytes, so that each reader gets every line once. Both files are only
appended to; an incomplete last line is not returned until it is complete.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import re
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TAIL_BYTES = 64 * 1024
SINCE_BYTES = 256 * 1024
NOT_METRICS = ("step", "time", "epoch", "tokens")
AXES = ("step", "epoch", "tokens", "seconds")  # what curves can be drawn over
Point = dict[str, Any]

# -- the log ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LogChunk:
    """The text of the bytes from `start` to `end`. `more`: the file has more text after `end` (for `before` and `tail`,
    before `start`)."""

    text: str
    start: int
    end: int
    more: bool


def tail(path: Path, ended: bool = False, cap: int = TAIL_BYTES, rank: int | None = None) -> LogChunk:
    """The last complete lines. `ended`: the run has ended, so an incomplete last line is returned too."""
    return before(path, None, ended, cap, rank)


def before(
    path: Path, offset: int | None, ended: bool = True, cap: int = TAIL_BYTES, rank: int | None = None
) -> LogChunk:
    """The complete lines before `offset`, the start of an earlier chunk (None: the end of the file)."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, io.SEEK_END)
            end = size if offset is None else min(offset, size)
            start = file.seek(max(0, end - cap))
            data = file.read(end - start)
    except FileNotFoundError:
        return LogChunk("", 0, 0, False)
    if offset is None and not ended:
        data = data[: _complete_length(data)]
    if start:
        first = data.find(b"\n") + 1
        # A line longer than the chunk is split, but not inside a character.
        skip = first if 0 < first < len(data) else _character(data)
        start, data = start + skip, data[skip:]
    return LogChunk(_text(data, rank), start, start + len(data), start > 0)


def since(path: Path, offset: int, ended: bool = False, cap: int = SINCE_BYTES, rank: int | None = None) -> LogChunk:
    """The complete lines after `offset`, the end of an earlier chunk. `rank` selects the lines of one rank."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, io.SEEK_END)
            start = file.seek(offset if 0 <= offset <= size else 0)  # beyond the end: the file was replaced
            data = file.read(cap)
    except FileNotFoundError:
        return LogChunk("", 0, 0, False)
    last = start + len(data) >= size
    if not (last and ended):
        complete = _complete_length(data)
        if not complete and len(data) == cap:  # one line longer than a chunk: return it in parts
            complete = data.rfind(b"\r") + 1 or len(data) - _incomplete_character(data)
        data = data[:complete]
    end = start + len(data)
    return LogChunk(_text(data, rank), start, end, bool(data) and end < size)


def chunks(path: Path, rank: int | None = None) -> Iterator[LogChunk]:
    """The whole log in chunks, so that a log of gigabytes needs no memory of its size."""
    offset, more = 0, True
    while more:
        chunk = since(path, offset, ended=True, rank=rank)
        yield chunk
        offset, more = chunk.end, chunk.more


def _complete_length(data: bytes) -> int:
    """Length of the complete lines at the start of `data`."""
    return data.rfind(b"\n") + 1


def _character(data: bytes) -> int:
    """Bytes at the start that continue an earlier UTF-8 character."""
    return next((i for i, byte in enumerate(data[:4]) if byte & 0xC0 != 0x80), 0)


def _incomplete_character(data: bytes) -> int:
    """Bytes at the end that begin an incomplete UTF-8 character."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return back if length > back else 0
        if byte < 0x80:
            return 0
    return 0


def _text(data: bytes, rank: int | None) -> str:
    """The text as a terminal shows it: of a line that was overwritten (a progress bar), the last state.

    torchrun's `--tee=3` begins every line of a rank with `[defaultN]:`; with `rank`, only its lines are returned.
    """
    text = data.decode("utf-8", "replace").replace("\r\n", "\n")
    if "\r" in text:
        text = re.sub(r"^[^\n]*\r(?=[^\n])", lambda bar: _prefix(bar[0]), text, flags=re.MULTILINE).replace("\r", "")
    if rank is None:
        return text
    mark = f"[default{rank}]:"
    return "".join(line[len(mark) :] for line in text.splitlines(keepends=True) if line.startswith(mark))


def _prefix(line: str) -> str:
    mark = re.match(r"\[default\d+\]:", line)
    return mark[0] if mark else ""


# -- the metrics -----------------------------------------------------------------------------------------------


@dataclass
class Column:
    """Finite values of one metric by step, in order of steps."""

    steps: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def cut(self, step: float) -> None:
        """Drop the values after `step`."""
        keep = bisect_right(self.steps, step)
        del self.steps[keep:], self.values[keep:]

    def add(self, step: float, value: float) -> None:
        """Append a value; a step before the last one means that the run resumed from there."""
        if self.steps and self.steps[-1] > step:
            self.cut(step)
        self.steps.append(step)
        self.values.append(value)

    def buckets(self, count: int, low: float, high: float) -> tuple[list[float], list[float]]:
        """About `count` points from `low` to `high`: the minimum and maximum of each bucket of 2^k steps.

        Buckets are aligned at step 0, so that points stay in place while a run grows. The last point is always
        included, and one neighbor on each side, so that lines leave the chart at the right height.
        """
        i, j = bisect_left(self.steps, low), bisect_right(self.steps, high)
        width, max_buckets = 1, max(1, count // 2)
        while j - i > count and (self.steps[j - 1] - self.steps[i]) / width > max_buckets:
            width *= 2
        chosen = [i - 1] if i else []
        if j - i <= count:
            chosen += range(i, j)
        else:
            chosen += self._extremes(i, j, width)
        chosen += [j] if j < len(self.steps) else []
        steps = [self.steps[k] for k in chosen]
        return [int(s) if s.is_integer() else s for s in steps], [self.values[k] for k in chosen]

    def _extremes(self, i: int, j: int, width: int) -> list[int]:
        chosen = []
        while i < j:
            end = bisect_left(self.steps, (self.steps[i] // width + 1) * width, i, j)
            part = self.values[i:end]
            least, greatest = i + part.index(min(part)), i + part.index(max(part))
            chosen += sorted({least, greatest})
            i = end
        if chosen[-1] != j - 1:
            chosen.append(j - 1)
        return chosen


class Axes:
    """Epochs, tokens and seconds of training by step, over all starts of a run.

    A start counts its tokens from 0. Seconds leave out the time between two starts; the first logging interval, which
    has no point at its begin, is its tokens divided by its throughput.
    """

    def __init__(self) -> None:
        self.columns = {name: Column(array("d", [0]), array("d", [0])) for name in AXES[1:]}
        self._earlier_tokens = self._seconds = 0.0
        self._time: float | None = None  # of the last point, or of the last start

    def resume(self, step: float, time: Any) -> None:
        """Continue after `step`: drop what comes after it."""
        for column in self.columns.values():
            column.cut(max(0, step))
        self._earlier_tokens, self._seconds = (self.columns[name].values[-1] for name in ("tokens", "seconds"))
        self._time = time if isinstance(time, int | float) else None

    def add(self, step: float, point: Point) -> None:
        """Add a point. Of several points of one step, the first counts."""
        epoch, tokens, time = point.get("epoch"), point.get("tokens"), point.get("time")
        if isinstance(time, int | float):
            speed = point.get("tokens_per_second")
            if self._time is not None:
                self._seconds += max(0.0, time - self._time)
            elif tokens and speed:
                self._seconds += tokens / speed
            self._time = time
            self._add("seconds", step, self._seconds)
        if isinstance(epoch, int | float):
            self._add("epoch", step, epoch)
        if isinstance(tokens, int | float):
            self._add("tokens", step, self._earlier_tokens + tokens)

    def _add(self, name: str, step: float, value: float) -> None:
        column = self.columns[name]
        if step > column.steps[-1] and value >= column.values[-1]:
            column.steps.append(step)
            column.values.append(value)

    def known(self, name: str) -> bool:
        """Whether the run has logged this axis."""
        return name == "step" or self.columns[name].values[-1] > 0

    def place(self, name: str, steps: Sequence[float]) -> list[float]:
        """The positions of `steps` on an axis; between two points it is interpolated."""
        known, values, placed = self.columns[name].steps, self.columns[name].values, []
        for step in steps:
            i = min(bisect_left(known, step), len(known) - 1)
            value = values[i]
            if known[i] > step:
                value -= (known[i] - step) / (known[i] - known[i - 1]) * (value - values[i - 1])
            placed.append(round(value, 6))
        return placed

    def steps_between(self, name: str, low: float, high: float) -> tuple[float, float]:
        """The steps of a range of an axis."""
        steps, values = self.columns[name].steps, self.columns[name].values
        end = bisect_left(values, high)
        return steps[max(0, bisect_right(values, low) - 1)], steps[end] if end < len(steps) else math.inf


class Metrics:
    """A metrics file that is read while it grows. Thread-safe. `columns` has the values of each metric."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns: dict[str, Column] = {}
        self.axes = Axes()
        self.last: Point = {}
        self.offset = 0
        self.start = 0  # how often the file was replaced
        self._lock = threading.Lock()

    @property
    def etag(self) -> str:
        """Changes whenever `read` finds new lines."""
        return f"{self.start}-{self.offset}"

    def read(self) -> bool:
        """Read the complete lines since the last call; returns whether there were any."""
        with self._lock:
            lines, offset = self._lines()
            for point in _points(lines):
                self._add(point)
            changed = offset != self.offset
            self.offset = offset
            return changed

    @property
    def points(self) -> list[Point]:
        """The points that were read, each step once: `{"event": "resumed", "step": k}` removes those after step k,
        which are repeated. Parsed on each call, since they take ten times the memory of the columns."""
        try:
            with self.path.open("rb") as file:
                return _kept_points(file.read(self.offset).splitlines())
        except FileNotFoundError:
            return []

    def series(
        self, count: int = 1000, low: float | None = None, high: float | None = None, axis: str = "step"
    ) -> dict[str, Any]:
        """series: {key: {x: positions on the axis, y: values}}, {} if the run has not logged this axis; last: the
        newest value of each key; min and max of each key. `low` and `high` are positions on the axis."""
        with self._lock:
            low, high = -math.inf if low is None else low, math.inf if high is None else high
            if axis != "step":
                low, high = self.axes.steps_between(axis, low, high)
            columns = self.columns if self.axes.known(axis) else {}
            drawn = {key: column.buckets(count, low, high) for key, column in columns.items() if column.steps}
            if axis != "step":
                drawn = {key: (self.axes.place(axis, x), y) for key, (x, y) in drawn.items()}
            return {
                "etag": self.etag,
                "series": {key: {"x": x, "y": y} for key, (x, y) in drawn.items()},
                "last": dict(self.last),
                "min": {key: min(self.columns[key].values) for key in drawn},
                "max": {key: max(self.columns[key].values) for key in drawn},
            }

    def _lines(self) -> tuple[list[bytes], int]:
        try:
            with self.path.open("rb") as file:
                if file.seek(0, io.SEEK_END) < self.offset:
                    self.columns, self.axes, self.last = {}, Axes(), {}
                    self.offset, self.start = 0, self.start + 1
                file.seek(self.offset)
                data = file.read()
        except FileNotFoundError:
            return [], self.offset
        complete = _complete_length(data)
        return data[:complete].splitlines(), self.offset + complete

    def _add(self, point: Point) -> None:
        step = point.get("step")
        if not isinstance(step, int | float):
            return
        if point.get("event") == "resumed":
            self.axes.resume(step, point.get("time"))
            for column in self.columns.values():
                column.cut(step)
        if "event" in point:
            return
        self.last.update(point)
        self.axes.add(step, point)
        for key, value in point.items():
            if (type(value) is float or type(value) is int) and key not in NOT_METRICS and math.isfinite(value):
                column = self.columns.get(key) or self.columns.setdefault(key, Column())
                column.add(step, value)


def points_with(path: Path, key: str) -> list[Point]:
    """The points with `key`, each step once. The other lines are not parsed, which is ten times as fast."""
    name = f'"{key}"'.encode()
    try:
        with path.open("rb") as file:
            data = file.read()
    except FileNotFoundError:
        return []
    lines = data[: _complete_length(data)].splitlines()
    points = _kept_points([line for line in lines if name in line or b'"event"' in line])
    return [point for point in points if point.get(key) is not None]


def _kept_points(lines: Iterable[bytes]) -> list[Point]:
    """The points with a step, without those of steps that a resumed run repeats."""
    found: list[Point] = []
    for point in _points(lines):
        step = point.get("step")
        if not isinstance(step, int | float):
            continue
        if point.get("event") == "resumed":
            found = [p for p in found if p["step"] <= step]
        if "event" not in point:
            found.append(point)
    return found


def since_points(path: Path, offset: int, cap: int = 20_000) -> tuple[list[Point], int]:
    """The raw points, with events, of at most `cap` complete lines after `offset`, and the next offset."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, offset))
            data = file.read()
    except FileNotFoundError:
        return [], 0
    lines = data[: _complete_length(data)].splitlines(keepends=True)[:cap]
    return _points(lines), offset + sum(map(len, lines))


def last_points(path: Path, size: int = 4096) -> list[Point]:
    """The points in the last `size` bytes, in order, without those that a resumed run repeats."""
    chunk = tail(path, cap=size)
    points: list[Point] = []
    for point in _points(line.encode() for line in chunk.text.splitlines()):
        if point.get("event") == "resumed":
            points = [p for p in points if p.get("step", 0) <= point.get("step", 0)]
            for kept in points:
                kept.pop("time", None)  # the time between two starts belongs to no step
        elif "event" not in point and "step" in point:
            points.append(point)
    return points


def last_value(path: Path, key: str, size: int = 256 * 1024) -> Any:
    """The last value of `key` in the last `size` bytes that no resumed run repeats; None if there is none."""
    name = f'"{key}"'
    lines = [line for line in tail(path, cap=size).text.splitlines() if name in line or '"event"' in line]
    points = _kept_points(line.encode() for line in lines)
    return next((p[key] for p in reversed(points) if p.get(key) is not None), None)


def to_csv(points: Sequence[Point]) -> str:
    """The points as CSV with one column per key; null is empty."""
    keys = dict.fromkeys(key for point in points for key in point)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(keys), lineterminator="\n")
    writer.writeheader()
    writer.writerows(points)
    return text.getvalue()


def _points(lines: Iterable[bytes]) -> list[Point]:
    """The JSON objects among the lines; NaN and infinity become None."""
    texts = [line.decode("utf-8", "replace") for line in lines]
    try:
        found = DECODER.decode(f"[{','.join(texts)}]")  # decoding all lines at once is three times as fast
    except ValueError:
        found = [point for text in texts if (point := _point(text)) is not None]
    return [point for point in found if isinstance(point, dict)]


def _point(text: str) -> Any:
    """The object of one line; of a line that a crash cut off and the next start continued, the second object."""
    for part in (text, text[text.rfind("{") :]):
        with contextlib.suppress(ValueError):
            return DECODER.decode(part)
    return None


DECODER = json.JSONDecoder(parse_constant=lambda _: None)
