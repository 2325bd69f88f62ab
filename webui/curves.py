"""The curves of a run: values of each metric by step, downsampled for a chart, over steps, epochs, tokens or seconds.

A run may have a million points, so each point is read once, and NumPy works on blocks of them.
"""

from __future__ import annotations

import io
import math
import sys
import threading
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from backend.runs import files
from backend.runs.metrics import ALL_TOKENS, Gaps, Point, complete_length, parse

AXES = ("step", "epoch", "tokens", "seconds")  # the axes over which curves can be drawn
NOT_METRICS = ("step", "time", "epoch", "tokens")
MAX_MEANS = 400
BLOCK = 2**20  # bytes per read
END_BYTES = 64  # the last bytes that were read are kept, to notice a replaced file
MAX = sys.float_info.max
LIMIT = 1e300  # larger values are replaced by this, so that sums and differences are finite
NUMBERS = {int, float}


class Column:
    """Finite values by step, in order of steps."""

    def __init__(self, *first: float) -> None:
        """`first`: the step and the value of the first point, if there is one."""
        self.steps, self.values = array("d", first[:1]), array("d", first[1:])

    def cut(self, step: float) -> None:
        """Drop the values after `step`."""
        keep = bisect_right(self.steps, step)
        del self.steps[keep:], self.values[keep:]

    def add(self, steps: np.ndarray, values: np.ndarray) -> None:
        """Append values of increasing steps. If they begin before the last step, the run has resumed from there."""
        if self.steps and self.steps[-1] > steps[0]:
            self.cut(steps[0])
        self.steps.frombytes(steps.tobytes())
        self.values.frombytes(values.tobytes())

    def extremes(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """(step, value) of the smallest and of the largest value; of equal values, the first."""
        values = np.frombuffer(self.values)
        low, high = int(values.argmin()), int(values.argmax())
        return (_whole(self.steps[low]), self.values[low]), (_whole(self.steps[high]), self.values[high])

    def buckets(self, count: int, low: float, high: float) -> tuple[list[float], list[float]]:
        """About `count` points from `low` to `high`: the minimum and maximum of each bucket of 2^k steps.

        Buckets are aligned at step 0, so that points stay in place while a run grows. The last point is always
        included, and so is one point beyond each end, so that lines leave the chart at the right height.
        """
        i, j = bisect_left(self.steps, low), bisect_right(self.steps, high)
        width, max_buckets = 1, max(1, count // 2)
        while j - i > count and (self.steps[j - 1] - self.steps[i]) / width > max_buckets:
            width *= 2
        chosen = [i - 1] if i else []
        chosen += range(i, j) if j - i <= count else self._extremes(i, j, width)
        chosen += [j] if j < len(self.steps) else []
        steps = [self.steps[k] for k in chosen]
        return [_whole(step) for step in steps], [self.values[k] for k in chosen]

    def means(self) -> tuple[list[float], list[float]]:
        """At most MAX_MEANS means of 2^k values each, at the step of their last value: the input of smoothing. They
        cover the whole column, so that a smoothed curve has the same values in every zoom."""
        width = 2 ** max(0, math.ceil(math.log2(len(self.steps) / MAX_MEANS)))
        values, begins = np.frombuffer(self.values), np.arange(0, len(self.steps), width)
        counts = np.diff(begins, append=len(values))
        steps = np.frombuffer(self.steps)[begins + counts - 1]
        return [_whole(step) for step in steps.tolist()], (np.add.reduceat(values, begins) / counts).tolist()

    def _extremes(self, i: int, j: int, width: int) -> list[int]:
        edges = np.arange(self.steps[i] // width + 1, self.steps[j - 1] // width + 1) * width
        begins = np.unique(np.searchsorted(np.frombuffer(self.steps)[i:j], edges))
        chosen = []
        for part in np.split(np.frombuffer(self.values)[i:j], begins):
            chosen += sorted({i + int(part.argmin()), i + int(part.argmax())})
            i += len(part)
        return chosen if chosen[-1] == j - 1 else [*chosen, j - 1]


class Axes:
    """Epochs, tokens and seconds of training by step, over all starts of a run.

    In earlier versions, each start counted its tokens from 0. Seconds leave out the time between two starts; the first
    logging interval has no point at its beginning, so its length is its tokens divided by its throughput.
    """

    def __init__(self) -> None:
        self.columns = {name: Column(0, 0) for name in AXES[1:]}
        self._earlier_tokens = self._seconds = 0.0
        self._time: float | None = None  # time of the last point, or of the last start

    def resume(self, step: float, time: Any, counts_on: bool) -> None:
        """Continue after `step`, and drop all later points. `counts_on`: token counts continue those of earlier
        starts."""
        for column in self.columns.values():
            column.cut(max(0, step))
        self._earlier_tokens, self._seconds = (self.columns[name].values[-1] for name in ("tokens", "seconds"))
        self._earlier_tokens *= not counts_on
        self._time = time if type(time) in NUMBERS else None

    def add(self, steps: np.ndarray, points: Sequence[Point]) -> None:
        """Add points of increasing steps. Of several points of one step, the first counts."""
        at, times = numbers("time", steps, points)
        if len(at):
            passed = np.maximum(0, np.diff(times, prepend=times[0] if self._time is None else self._time))
            if self._time is None:
                passed[0] = _seconds(points[0])
            seconds = self._seconds + np.cumsum(passed)
            self._time, self._seconds = float(times[-1]), float(seconds[-1])
            self._extend("seconds", at, seconds)
        for name, earlier in (("epoch", 0.0), ("tokens", self._earlier_tokens)):
            at, values = numbers(name, steps, points)
            self._extend(name, at, earlier + values)

    def _extend(self, name: str, steps: np.ndarray, values: np.ndarray) -> None:
        """Append what continues an axis: later steps, and positions that do not decrease."""
        column = self.columns[name]
        later = np.diff(steps, prepend=column.steps[-1]) > 0
        highest = np.maximum.accumulate(np.append(column.values[-1], values))
        kept = later & (values >= highest[:-1])
        if kept.any():
            column.add(steps[kept], values[kept])

    def known(self, name: str) -> bool:
        """Whether the run has logged positions on this axis."""
        return name == "step" or self.columns[name].values[-1] > 0

    def place(self, name: str, steps: Sequence[float]) -> list[float]:
        """The positions of `steps` on an axis, interpolated between two points."""
        column = self.columns[name]
        return np.interp(steps, column.steps, column.values).round(6).tolist()

    def steps_between(self, name: str, low: float, high: float) -> tuple[float, float]:
        """The steps of a range of an axis."""
        steps, values = self.columns[name].steps, self.columns[name].values
        end = bisect_left(values, high)
        return steps[max(0, bisect_right(values, low) - 1)], steps[end] if end < len(steps) else math.inf


class Curves:
    """A metrics file that is read while it grows. Thread-safe. `columns` has the values of each metric."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns: dict[str, Column] = {}
        self.axes = Axes()
        self.resumed: list[float] = []  # the steps after which the run has continued
        self.gaps = Gaps()
        self.offset = self.size = 0  # bytes that were read, and bytes of the file
        self.start = 0  # how many times the file was replaced
        self._end = b""  # the last bytes that were read
        self._lock = threading.Lock()

    @property
    def etag(self) -> str:
        """Changes whenever `read` finds new lines."""
        return f"{self.start}-{self.offset}"

    def read(self, seconds: float = math.inf) -> bool:
        """Read the complete lines since the last call, for about `seconds`; returns whether there were any."""
        with self._lock:
            before, until = self.etag, time.monotonic() + seconds
            while lines := self._block():
                self._add(_points(lines))
                if time.monotonic() >= until:
                    break
            return self.etag != before

    def series(
        self, count: int = 1000, low: float | None = None, high: float | None = None, axis: str = "step"
    ) -> dict[str, Any]:
        """series: {key: {x: positions on the axis, y: values}}, {} if the run has not logged this axis; means: the
        input of smoothing, in the same form, for each series that is downsampled or long; newest: the step and the
        newest value of each key; min and max of each key, and their steps; resumed: the steps after which the run has
        continued; gaps: the steps between which points are missing; read: how much of the file was read, from 0 to 1.
        `low` and `high` are positions on the axis."""
        with self._lock:
            low, high = -math.inf if low is None else low, math.inf if high is None else high
            if axis != "step":
                low, high = self.axes.steps_between(axis, low, high)
            columns = self.columns if self.axes.known(axis) else {}
            columns = {key: column for key, column in columns.items() if column.steps}
            drawn = {key: column.buckets(count, low, high) for key, column in columns.items()}
            means = {
                key: column.means()
                for key, column in columns.items()
                if len(column.steps) > MAX_MEANS or len(drawn[key][0]) < len(column.steps)
            }
            if axis != "step":
                drawn = {key: (self.axes.place(axis, x), y) for key, (x, y) in drawn.items()}
                means = {key: (self.axes.place(axis, x), y) for key, (x, y) in means.items()}
            extremes = {key: column.extremes() for key, column in columns.items()}
            return {
                "etag": self.etag,
                "series": {key: {"x": x, "y": y} for key, (x, y) in drawn.items()},
                "means": {key: {"x": x, "y": y} for key, (x, y) in means.items()},
                "newest": {key: (_whole(column.steps[-1]), column.values[-1]) for key, column in columns.items()},
                "min": {key: value for key, ((_, value), _) in extremes.items()},
                "max": {key: value for key, (_, (_, value)) in extremes.items()},
                "min_step": {key: step for key, ((step, _), _) in extremes.items()},
                "max_step": {key: step for key, (_, (step, _)) in extremes.items()},
                "resumed": list(dict.fromkeys(self.resumed)),
                "gaps": list(self.gaps.found),
                "read": min(1.0, self.offset / self.size) if self.size else 1.0,
            }

    def _block(self) -> list[bytes]:
        """The next complete lines, of about BLOCK bytes. A replaced file is read from its start."""
        try:
            with files.open_to_read(self.path) as file:
                self.size = file.seek(0, io.SEEK_END)
                file.seek(self.offset - len(self._end))
                if file.read(len(self._end)) != self._end:
                    self.columns, self.axes, self._end = {}, Axes(), b""
                    self.resumed, self.gaps = [], Gaps()
                    self.offset, self.start = file.seek(0), self.start + 1
                data = file.read(BLOCK)
                if len(data) == BLOCK:
                    data += file.readline()
                at_end = file.tell() >= self.size
        except FileNotFoundError:
            return []
        if data := data[: complete_length(data)]:
            self.offset, self._end = self.offset + len(data), data[-END_BYTES:]
        if at_end:
            self.size = self.offset
        return data.splitlines()

    def _add(self, points: Sequence[Point]) -> None:
        """Add points, together as long as their steps do not decrease."""
        steps: list[float] = []
        together: list[Point] = []
        for point in points:
            step: Any = point.get("step")
            if type(step) not in NUMBERS or not -LIMIT <= step <= LIMIT:
                continue
            if steps and ("event" in point or step < steps[-1]):
                self._add_together(np.array(steps, float), together)
                steps, together = [], []
            if point.get("event") == "resumed":
                self.axes.resume(step, point.get("time"), bool(point.get(ALL_TOKENS)))
                self.resumed.append(step)
                self.gaps.resume(step)
                for column in self.columns.values():
                    column.cut(step)
            if "event" not in point:
                steps.append(step)
                together.append(point)
        if steps:
            self._add_together(np.array(steps, float), together)

    def _add_together(self, steps: np.ndarray, points: Sequence[Point]) -> None:
        self.axes.add(steps, points)
        self.gaps.add(float(steps[0]), float(steps[-1]), float(np.diff(steps).max(initial=0)))
        for key in dict.fromkeys(chain.from_iterable(points)):
            if key not in NOT_METRICS:
                at, values = numbers(key, steps, points)
                if len(at):
                    self.columns.setdefault(key, Column()).add(at, values)


def _whole(step: float) -> float:
    """An int if the step is one, for shorter JSON."""
    return int(step) if step.is_integer() else step


def _points(lines: Sequence[bytes]) -> Sequence[Point]:
    """The JSON objects among the lines. orjson is four times as fast as json, but it refuses NaN."""
    try:
        points = orjson.loads(b"[" + b",".join(lines) + b"]")
    except ValueError:
        return parse(lines)
    return [point for point in points if isinstance(point, dict)]


def numbers(key: str, steps: np.ndarray, points: Sequence[Point]) -> tuple[np.ndarray, np.ndarray]:
    """The steps that have a finite number under `key`, and these numbers."""
    values: list[Any] = [point.get(key) for point in points]
    if not (set(map(type, values)) <= NUMBERS and min(values) >= -MAX and max(values) <= MAX):
        kept = [i for i, v in enumerate(values) if type(v) in NUMBERS and -MAX <= v <= MAX]
        steps, values = steps[kept], [values[i] for i in kept]
    return steps, np.array(values, float).clip(-LIMIT, LIMIT)


def _seconds(point: Point) -> float:
    """How long the first logging interval took: its tokens divided by its throughput; 0 if they are unknown."""
    tokens: Any = point.get("tokens")
    speed: Any = point.get("tokens_per_second")
    return tokens / speed if {type(tokens), type(speed)} <= NUMBERS and speed else 0.0
