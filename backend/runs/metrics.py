"""Incremental reading of the log and the metrics of a run while they grow.

Offsets are in bytes, so that each reader gets every line once. Both files are only appended to; an incomplete last line
is not returned until it is complete.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, takewhile
from pathlib import Path
from typing import Any

from backend.runs import files, json_values

ALL_TOKENS = "all_tokens"  # in the point that marks a resume: later points count the tokens of all starts
TAIL_BYTES = 64 * 1024
SINCE_BYTES = 256 * 1024

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
        with files.open_to_read(path) as file:
            size = file.seek(0, io.SEEK_END)
            end = size if offset is None else min(offset, size)
            start = file.seek(max(0, end - cap))
            data = file.read(end - start)
    except FileNotFoundError:
        return LogChunk("", 0, 0, False)
    if offset is None and not ended:
        data = data[: complete_length(data)]
    if start:
        first = data.find(b"\n") + 1
        # A line longer than the chunk is split, but not inside a character.
        skip = first if 0 < first < len(data) else _character(data)
        start, data = start + skip, data[skip:]
    return LogChunk(_text(data, rank), start, start + len(data), start > 0)


def since(path: Path, offset: int, ended: bool = False, cap: int = SINCE_BYTES, rank: int | None = None) -> LogChunk:
    """The complete lines after `offset`, the end of an earlier chunk. `rank` selects the lines of one rank."""
    try:
        with files.open_to_read(path) as file:
            size = file.seek(0, io.SEEK_END)
            start = file.seek(offset if 0 <= offset <= size else 0)  # beyond the end: the file was replaced
            data = file.read(cap)
    except FileNotFoundError:
        return LogChunk("", 0, 0, False)
    last = start + len(data) >= size
    if not (last and ended):
        complete = complete_length(data)
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


def complete_length(data: bytes) -> int:
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
    """The text as a terminal shows it: for a line that was overwritten (a progress bar), the last state.

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


Point = dict[str, Any]


def read_points(path: Path) -> list[Point]:
    """The points of the complete lines, each step once: `{"event": "resumed", "step": k}` removes those after step k,
    which are repeated."""
    return _kept_points(_complete_lines(path))


def stream_points(path: Path) -> Iterator[Point]:
    """The points that `read_points` returns, one at a time: a run may have millions of them."""
    resumes: list[tuple[int, float]] = []  # (end of a line, step after which this line removes points)
    with contextlib.suppress(FileNotFoundError), files.open_to_read(path) as file:
        offset = 0
        for line in file:
            offset += len(line)
            if b'"event"' in line and line.endswith(b"\n"):
                found = [p for p in parse([line]) if p.get("event") == "resumed"]
                resumes += [(offset, p["step"]) for p in found if isinstance(p.get("step"), int | float)]
    # A point counts if none of the later resumes removes it: the smallest of their steps decides.
    steps = [step for _, step in reversed(resumes)]
    limits = list(accumulate(steps, min))[::-1]
    with contextlib.suppress(FileNotFoundError), files.open_to_read(path) as file:
        offset = passed = 0
        for line in takewhile(lambda line: line.endswith(b"\n"), file):
            offset += len(line)
            while passed < len(resumes) and resumes[passed][0] <= offset:
                passed += 1
            for point in parse([line]):
                step = point.get("step")
                if "event" in point or not isinstance(step, int | float):
                    continue
                if passed == len(resumes) or step <= limits[passed]:
                    yield point


def points_with(path: Path, key: str) -> list[Point]:
    """The points with `key`, each step once. The other lines are not parsed, which is ten times as fast."""
    name = f'"{key}"'.encode()
    points = _kept_points(line for line in _complete_lines(path) if name in line or b'"event"' in line)
    return [point for point in points if point.get(key) is not None]


def resumes(path: Path) -> list[Point]:
    """The points that mark where a start of the run resumed (step 0: it began again), in order."""
    found = parse(line for line in _complete_lines(path) if b'"event"' in line)
    return [p for p in found if p.get("event") == "resumed" and isinstance(p.get("step"), int | float)]


def first_point(path: Path) -> Point:
    """The first point or event; empty if there is none."""
    try:
        with files.open_to_read(path) as file:
            found = parse([file.readline()])
    except FileNotFoundError:
        return {}
    return found[0] if found else {}


def _complete_lines(path: Path) -> list[bytes]:
    try:
        data = files.read_bytes(path)
    except FileNotFoundError:
        return []
    return data[: complete_length(data)].splitlines()


def _kept_points(lines: Iterable[bytes]) -> list[Point]:
    """The points with a step, without those of steps that a resumed run repeats."""
    found: list[Point] = []
    for point in parse(lines):
        step = point.get("step")
        if not isinstance(step, int | float):
            continue
        if point.get("event") == "resumed":
            found = [p for p in found if p["step"] <= step]
        if "event" not in point:
            found.append(point)
    return found


def logged_steps(path: Path) -> list[float]:
    """The steps that have points, in order, without those that a resumed run repeats. Reads line by line: a long run
    has a million points."""
    steps: list[float] = []
    with contextlib.suppress(FileNotFoundError), files.open_to_read(path) as file:
        for point in chain.from_iterable(parse([line]) for line in file if line.endswith(b"\n")):
            step = point.get("step")
            if not isinstance(step, int | float):
                continue
            if point.get("event") == "resumed":
                del steps[bisect_right(steps, step) :]
            elif "event" not in point and step not in steps[-1:]:
                steps.append(step)
    return steps


def gaps(path: Path) -> list[tuple[float, float]]:
    """The steps between which points are missing, as of `Gaps`. Reads line by line."""
    found = Gaps()
    with contextlib.suppress(FileNotFoundError), files.open_to_read(path) as file:
        for point in chain.from_iterable(parse([line]) for line in file if line.endswith(b"\n")):
            step = point.get("step")
            if isinstance(step, int | float) and point.get("event") == "resumed":
                found.resume(step)
            elif isinstance(step, int | float) and "event" not in point:
                found.add(step, step)
    return found.found


class Gaps:
    """Finds where points are missing: a run that resumes after step k has logged until there, so the last point before
    the resume is at most one logging interval away. `found`: (step of the last point, step of the resume)."""

    def __init__(self) -> None:
        self.found: list[tuple[float, float]] = []
        self._interval, self._last = 0.0, 0.0
        self._counts = False  # whether there was a point since the last resume, so that its distance is an interval

    def add(self, first: float, last: float, interval: float = 0.0) -> None:
        """Add points from step `first` to step `last`, `interval` apart at most."""
        self._interval = max(self._interval, interval, first - self._last if self._counts else 0)
        self._last, self._counts = last, True

    def resume(self, step: float) -> None:
        """The run has resumed after this step."""
        self.found = [gap for gap in self.found if gap[1] <= step]
        if self._last < step and self._interval and step - self._last >= self._interval:
            self.found.append((self._last, step))
        self._last, self._counts = min(self._last, step), False


def since_points(path: Path, offset: int, cap: int = 20_000) -> tuple[list[Point], int]:
    """The raw points, with events, of at most `cap` complete lines after `offset`, and the next offset."""
    try:
        with files.open_to_read(path) as file:
            file.seek(max(0, offset))
            data = file.read()
    except FileNotFoundError:
        return [], 0
    lines = data[: complete_length(data)].splitlines(keepends=True)[:cap]
    return parse(lines), offset + sum(map(len, lines))


def last_points(path: Path, size: int = 4096) -> list[Point]:
    """The points in the last `size` bytes, in order, without those that a resumed run repeats."""
    chunk = tail(path, cap=size)
    points: list[Point] = []
    for point in parse(line.encode() for line in chunk.text.splitlines()):
        if point.get("event") == "resumed":
            points = [p for p in points if p.get("step", 0) <= point.get("step", 0)]
            for kept in points:
                kept.pop("time", None)  # the time between two starts belongs to no step
        elif "event" not in point and "step" in point:
            points.append(point)
    return points


def last_value(path: Path, key: str) -> Any:
    """The last value of `key` in the last 256 KiB that no resumed run repeats; None if there is none."""
    return last_values(path, [key])[key]


def last_values(path: Path, keys: Sequence[str], first_step: int = 0) -> dict[str, Any]:
    """Same as `last_value`, for each key, without points before `first_step`."""
    names = ('"event"', *(f'"{key}"' for key in keys))
    lines = [line for line in tail(path, cap=256 * 1024).text.splitlines() if any(name in line for name in names)]
    points = [p for p in _kept_points(line.encode() for line in lines) if p.get("step", 0) >= first_step]
    return {key: next((p[key] for p in reversed(points) if p.get(key) is not None), None) for key in keys}


def to_csv(points: Sequence[Point]) -> str:
    """The points as CSV with one column per key; null is empty."""
    keys = dict.fromkeys(key for point in points for key in point)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(keys), lineterminator="\n")
    writer.writeheader()
    writer.writerows(points)
    return text.getvalue()


def parse(lines: Iterable[bytes]) -> list[Point]:
    """The JSON objects among the lines; NaN and infinity become None."""
    texts = [line.decode("utf-8", "replace") for line in lines]
    together = f"[{','.join(texts)}]"
    try:
        found = DECODER.decode(together)  # decoding all lines at once is three times as fast
    except ValueError:
        found = [point for text in texts if (point := _point(text)) is not None]
    return [point for point in json_values.replace_surrogates(found, together) if isinstance(point, dict)]


def _point(text: str) -> Any:
    """The object of one line. If a crash cut the line off and the next start continued it: the second object."""
    for part in (text, text[text.rfind("{") :]):
        with contextlib.suppress(ValueError):
            return DECODER.decode(part)
    return None


DECODER = json.JSONDecoder(parse_constant=lambda _: None)
