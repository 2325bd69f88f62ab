"""Incremental reading of log and metrics: every line once, incomplete lines later, buckets that keep the extremes."""

from __future__ import annotations

import json
import random
import tracemalloc
from pathlib import Path

import pytest

from backend.runs import metrics
from backend.runs.metrics import before, gaps, last_points, since, tail
from webui.curves import Curves


def log(folder: Path, data: bytes) -> Path:
    path = folder / "log.txt"
    path.write_bytes(data)
    return path


def test_a_missing_log_is_empty(tmp_path: Path) -> None:
    empty = metrics.LogChunk("", 0, 0, False)
    assert tail(tmp_path / "no") == since(tmp_path / "no", 5) == before(tmp_path / "no", 5) == empty


def test_tail_omits_an_incomplete_line_until_the_end(tmp_path: Path) -> None:
    path = log(tmp_path, b"one\ntwo\nthr")
    assert tail(path) == metrics.LogChunk("one\ntwo\n", 0, 8, False)
    assert since(path, 8) == metrics.LogChunk("", 8, 8, False)
    assert since(path, 8, ended=True) == metrics.LogChunk("thr", 8, 11, False)
    assert tail(path, ended=True).text == "one\ntwo\nthr"


def test_tail_and_before_are_contiguous(tmp_path: Path) -> None:
    data = "".join(f"line {i} \u00e4\u20ac\U0001f682\n" for i in range(500))
    path = log(tmp_path, data.encode())
    piece = tail(path, cap=700)
    text = piece.text
    while piece.more:
        earlier = before(path, piece.start, cap=700)
        assert earlier.end == piece.start
        assert earlier.text.startswith("line") and earlier.text.endswith("\n")
        piece, text = earlier, earlier.text + text
    assert text == data


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.soak) for n in range(2, 20))])
def test_since_returns_every_line_once_while_the_log_grows(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    data = "".join(rng.choice(["x" * rng.randrange(60), "\u20ac\U0001f682", "\n", "\n"]) for _ in range(300)).encode()
    path, written, offset, text = log(tmp_path, b""), 0, 0, ""
    while True:
        piece = since(path, offset, ended=written == len(data), cap=64)
        assert piece.start == offset
        offset, text = piece.end, text + piece.text
        if offset == len(data):
            break
        if not piece.more:
            step = rng.randrange(1, 90)
            path.write_bytes(data[: written + step])
            written = min(len(data), written + step)
    assert text.encode() == data


def test_a_line_longer_than_a_chunk_is_returned_in_parts(tmp_path: Path) -> None:
    path = log(tmp_path, "\u20ac".encode() * 100 + b"\nend\n")
    text, offset = "", 0
    while (piece := since(path, offset, cap=64)).end > offset:
        text, offset = text + piece.text, piece.end
    assert text == "\u20ac" * 100 + "\nend\n"
    assert "\ufffd" not in tail(path, cap=64).text + before(path, 198, cap=64).text


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (b"  1%\r 50%\r100%\n", "100%\n"),
        (b"a\r\nb\r\n", "a\nb\n"),
        (b" 50%\r100%\r\n", "100%\n"),
        (b"[default1]: 1%\r 9%\nx\n", "[default1]: 9%\nx\n"),
        (b"\xff ok\n", "\ufffd ok\n"),
    ],
)
def test_progress_bars_and_invalid_utf8(tmp_path: Path, raw: bytes, shown: str) -> None:
    piece = tail(log(tmp_path, raw))
    assert (piece.text, piece.end) == (shown, len(raw))


def test_one_rank_of_the_log(tmp_path: Path) -> None:
    path = log(tmp_path, b"[default0]:a\nlauncher\n[default1]:b\n[default0]:c\n")
    assert tail(path, rank=0).text == "a\nc\n"
    assert since(path, 0, rank=1) == metrics.LogChunk("b\n", 0, path.stat().st_size, False)


def test_a_replaced_log_is_read_from_its_start(tmp_path: Path) -> None:
    assert since(log(tmp_path, b"new\n"), 1000).text == "new\n"


def points(path: Path, *rows: object, end: str = "\n") -> None:
    with path.open("a") as file:
        file.write("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + end)


def test_points_are_read_without_invalid_lines_and_repeated_steps(tmp_path: Path) -> None:
    path = tmp_path / "m"
    assert metrics.read_points(path) == []
    points(path, "rubbish", "[1]", {"step": 1, "loss": float("nan")}, {"step": 2, "loss": 1.0}, {"step": 3})
    points(path, {"event": "resumed", "step": 2}, '{"step": 3, "lo{"step": 4, "loss": 0.5}', '{"step": 5, "lo')
    assert metrics.read_points(path)[-1] == {"step": 4, "loss": 0.5}
    assert [p["step"] for p in metrics.read_points(path)] == [1, 2, 4] and metrics.read_points(path)[0]["loss"] is None
    points(path, {"event": "resumed", "step": 1}, {"step": 2})
    assert [p["step"] for p in metrics.read_points(path)] == [1, 2] == [p["step"] for p in last_points(path)]


def test_since_points_and_csv(tmp_path: Path) -> None:
    path = tmp_path / "m"
    points(path, *({"step": s} for s in range(5)))
    first, offset = metrics.since_points(path, 0, cap=3)
    second, end = metrics.since_points(path, offset)
    assert [p["step"] for p in first + second] == [0, 1, 2, 3, 4] and end == path.stat().st_size
    rows = [{"step": 1, "loss": None}, {"step": 2, "eval_loss": 0.5}]
    assert metrics.to_csv(rows) == "step,loss,eval_loss\n1,,\n2,,0.5\n"


def test_a_log_is_read_in_chunks(tmp_path: Path) -> None:
    """Reading 8 MB of one rank's log needs no memory of that size."""
    path = log(tmp_path, b"[default1]:%s\n[default0]:other\n" % (b"x" * 1000) * 8000)
    tracemalloc.start()
    lines = sum(chunk.text.count("\n") for chunk in metrics.chunks(path, 1))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert lines == 8000
    assert peak < 3e6


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([*range(1, 5), ("resumed", 50), 51, 52], [(4, 50)]),
        ([*range(1, 53), ("resumed", 0), *range(1, 5), ("resumed", 50), 51], [(4, 50)]),
        ([*range(1, 5), ("resumed", 50), 51, ("resumed", 2), 3, 4], []),  # the gap was trained again
        ([10, 20, 30, 40, 50, ("resumed", 52), 60, 70], []),  # stopped between two logging steps
        ([10, 20, ("resumed", 50), 60], [(20, 50)]),
        ([10, 20, 30, ("resumed", 27), 30, 40], []),
        ([1, 10, 20, ("resumed", 0), 1, 10], []),
        ([7, ("resumed", 3), 4], []),
        ([("resumed", 50), 51], []),
    ],
)
def test_steps_without_points_are_found(tmp_path: Path, lines: list[object], expected: list[tuple[int, int]]) -> None:
    """Two starts of which the second continued from a checkpoint that the file knows nothing about."""
    rows = [
        {"event": row[0], "step": row[1]} if isinstance(row, tuple) else {"step": row, "loss": 1.0} for row in lines
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert gaps(path) == expected
    curves = Curves(path)
    curves.read()
    assert curves.series()["gaps"] == expected


def test_points_are_streamed_as_they_are_read(tmp_path: Path) -> None:
    """With resumes, other events, lines that were cut off, and steps that come back after a resume."""
    choice, path = random.Random(7), tmp_path / "metrics.jsonl"
    garbage = ['{"event": "saved", "step": 3}', '{"step": "x"}', "7", '{"step": 7, "lo', ""]
    for _ in range(50):
        lines, step = [], 0
        for _ in range(choice.randrange(40)):
            step += 1
            kind = choice.randrange(12)
            if kind == 0:
                step = choice.randrange(step)
                lines.append(json.dumps({"event": "resumed", "step": step}))
            elif kind == 1:
                lines.append(choice.choice(garbage))
            else:
                lines.append(json.dumps({"step": step, "loss": choice.random()}))
        path.write_text("\n".join(lines) + choice.choice(["", "\n"]))
        assert list(metrics.stream_points(path)) == metrics.read_points(path)
    assert list(metrics.stream_points(tmp_path / "missing")) == []


def test_streaming_points_needs_no_memory_of_their_size(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with path.open("w") as file:
        for step in range(10_000):
            file.write(f'{{"step": {step}, "loss": 1.5, "time": 1.0}}\n')
    tracemalloc.start()
    assert sum(1 for _ in metrics.stream_points(path)) == 10_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**18
