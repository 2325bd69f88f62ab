"""The curves of a run: read while the file grows, downsampled without losing extremes, over several axes."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from backend.runs.metrics import last_points, read_points
from webui.curves import AXES, Curves


def points(path: Path, *rows: object, end: str = "\n") -> None:
    with path.open("a") as file:
        file.write("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + end)


def test_complete_lines_only(tmp_path: Path) -> None:
    curves = Curves(tmp_path / "m")
    points(curves.path, {"step": 1, "loss": 2.0}, '{"step": 2, "lo', end="")
    assert curves.read() and curves.series()["newest"] == {"loss": (1, 2.0)}
    etag = curves.etag
    assert not curves.read() and curves.etag == etag
    points(curves.path, 'ss": 1.5}')
    assert curves.read() and curves.series()["newest"] == {"loss": (2, 1.5)} and curves.etag != etag


def test_a_missing_file_is_empty(tmp_path: Path) -> None:
    curves = Curves(tmp_path / "m")
    assert not curves.read() and curves.series()["series"] == {} and curves.series()["read"] == 1


def test_invalid_lines_are_skipped_and_nonfinite_values_are_null(tmp_path: Path) -> None:
    curves = Curves(tmp_path / "m")
    points(curves.path, "rubbish", "[1]", {"step": 1, "loss": float("nan")}, {"step": 2, "loss": 1.0, "note": "x"})
    points(curves.path, '{"step": 3, "lo{"step": 4, "loss": 0.5}')
    curves.read()
    assert [p["step"] for p in read_points(curves.path)] == [1, 2, 4] and read_points(curves.path)[0]["loss"] is None
    assert curves.series()["series"] == {"loss": {"x": [2, 4], "y": [1.0, 0.5]}}


def test_a_resume_removes_the_steps_that_are_repeated(tmp_path: Path) -> None:
    curves = Curves(tmp_path / "m")
    points(curves.path, *({"step": s, "loss": float(s), "time": s} for s in range(1, 8)))
    points(curves.path, {"event": "resumed", "step": 4, "time": 90}, {"step": 5, "loss": 50.0, "time": 91})
    curves.read()
    assert curves.series()["series"]["loss"] == {"x": [1, 2, 3, 4, 5], "y": [1.0, 2.0, 3.0, 4.0, 50.0]}
    assert [p["loss"] for p in read_points(curves.path)] == [1.0, 2.0, 3.0, 4.0, 50.0]
    assert [p["step"] for p in last_points(curves.path)] == [1, 2, 3, 4, 5]


def test_a_replaced_metrics_file_is_read_from_its_start(tmp_path: Path) -> None:
    curves = Curves(tmp_path / "m")
    points(curves.path, {"step": 1, "loss": 1.0}, {"step": 2, "loss": 1.0})
    curves.read()
    etag = curves.etag
    for steps in ([9], [3, 4, 5, 6]):  # the second file is longer than what was read
        curves.path.write_text("")
        points(curves.path, *({"step": step, "loss": 3.0} for step in steps))
        assert curves.read() and curves.etag != etag
        etag = curves.etag
        assert curves.series()["series"]["loss"]["x"] == steps


def test_buckets_keep_the_extremes_and_their_steps(tmp_path: Path) -> None:
    rng = random.Random(0)
    curves = Curves(tmp_path / "m")
    values = [rng.random() for _ in range(20_000)]
    values[777], values[12_345] = 99.0, -99.0
    few = [{"eval_loss": v} if i % 100 == 0 else {} for i, v in enumerate(values)]
    points(curves.path, *({"step": i, "loss": v, **few[i]} for i, v in enumerate(values)))
    curves.read()
    drawn = curves.series(500)
    loss = drawn["series"]["loss"]
    assert len(loss["x"]) <= 502 and loss["x"] == sorted(loss["x"]) and loss["x"][-1] == 19_999
    assert loss["y"][loss["x"].index(777)] == 99.0 and loss["y"][loss["x"].index(12_345)] == -99.0
    assert drawn["min"]["loss"] == -99.0 and drawn["max"]["loss"] == 99.0
    assert len(drawn["series"]["eval_loss"]["x"]) == 200, "what is few is drawn whole"
    zoomed = curves.series(500, 700, 800)["series"]["loss"]
    assert zoomed["x"] == list(range(699, 802)), "with a neighbour on each side"
    points(curves.path, {"step": 20_000, "loss": 0.5})
    curves.read()
    grown = curves.series(500)["series"]["loss"]
    settled = [x for x in loss["x"] if x < 19_900]
    assert grown["x"][: len(settled)] == settled, "a longer run moves no older point"


def test_what_is_smoothed_does_not_depend_on_the_zoom(tmp_path):
    curves = Curves(tmp_path / "m")
    points(curves.path, *({"step": i, "loss": float(i % 2), "few": i} for i in range(800)))
    curves.read()
    means = curves.series(300)["means"]["loss"]
    assert (len(means["x"]), means["x"][0], means["x"][-1]) == (400, 1, 799) and means["y"] == [0.5] * 400
    assert curves.series(300, 100, 200)["means"]["loss"] == means
    short = Curves(tmp_path / "short")
    points(short.path, *({"step": i, "loss": i} for i in range(9)))
    short.read()
    assert short.series()["means"] == {}, "the series itself"
    assert short.series(300, 4, 5)["means"]["loss"] == short.series()["series"]["loss"]


def rows_of_a_run(rng: random.Random) -> list[dict[str, Any]]:
    """Points of several starts: some steps twice, some without a value, some values that no chart can show."""
    rows: list[dict[str, Any]] = []
    step, now, tokens = 0, 1e9, 0
    for _ in range(1000):
        if rng.random() < 0.01:
            step, now, tokens = max(0, step - rng.randrange(40)), now + 1000, 0
            rows.append({"event": "resumed", "step": step, "time": now})
        if rng.random() < 0.02:
            rows.append({"event": "checkpoint", "step": step, "time": now})
        step, now, tokens = step + rng.randrange(3), now + rng.random(), tokens + rng.randrange(100)
        row = {"step": step, "time": now, "tokens": tokens, "epoch": step / 7, "loss": rng.gauss(0, 9)}
        row |= rng.choice([{}, {"loss": math.nan}, {"loss": None}, {"eval_loss": rng.random()}, {"loss": True}])
        row |= rng.choice([{}, {}, {"grad_norm": rng.choice([10**400, -(10**400), math.inf, "1", [1], 5])}])
        rows.append(row)
    return rows


def expected(rows: list[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    """The points of a curve, one by one."""
    kept: list[tuple[int, float]] = []
    for row in rows:
        value = row.get(key)
        if row.get("event") == "resumed":
            kept = [point for point in kept if point[0] <= row["step"]]
        elif type(value) in (int, float) and abs(value) <= 1e308:
            kept = [point for point in kept if point[0] <= row["step"]] + [(row["step"], value)]
    return kept


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.soak) for n in range(2, 5))])
def test_blocks_give_what_single_points_give(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr("webui.curves.BLOCK", rng.choice([100, 5000, 2**20]))
    rows = rows_of_a_run(rng)
    one, many = Curves(tmp_path / "one"), Curves(tmp_path / "many")
    points(one.path, *rows)
    one.read()
    while rows:
        part = rng.randrange(1, 200)
        points(many.path, *rows[:part])
        rows = rows[part:]
        while many.read(seconds=0):
            many.series(100)
    rows = [json.loads(line) for line in one.path.read_text().splitlines()]
    for key in ("loss", "eval_loss", "grad_norm"):
        for curves in (one, many):
            drawn = curves.series(10_000)["series"][key]
            assert list(zip(drawn["x"], drawn["y"], strict=True)) == expected(rows, key)
    for axis in AXES:
        assert one.series(300, axis=axis)["series"] == many.series(300, axis=axis)["series"]
        x = one.series(300, axis=axis)["series"]["loss"]["x"]
        assert x == sorted(x)


@pytest.mark.parametrize("seed", range(20))
def test_each_bucket_has_its_extremes(tmp_path: Path, seed: int) -> None:
    """Against buckets of 2^k steps that are built one value at a time, for steps with gaps."""
    rng = random.Random(seed)
    steps = sorted(rng.sample(range(10**6), 3000))
    values = {step: rng.choice([rng.random(), 1.0, 0.0]) for step in steps}
    curves = Curves(tmp_path / "m")
    points(curves.path, *({"step": step, "loss": value} for step, value in values.items()))
    curves.read()
    low, high = sorted(rng.sample(range(10**6), 2)) if seed else (0, 10**6)
    inside = [step for step in steps if low <= step <= high]
    drawn = curves.series(200, low, high)["series"]["loss"]
    assert [values[x] for x in drawn["x"]] == drawn["y"] and len(set(drawn["x"])) == len(drawn["x"])
    if len(inside) <= 200:
        return
    width = 1
    while (inside[-1] - inside[0]) / width > 100:
        width *= 2
    buckets: dict[int, list[int]] = {}
    for step in inside:
        buckets.setdefault(step // width, []).append(step)
    chosen = {pick(part, key=values.__getitem__) for part in buckets.values() for pick in (min, max)} | {inside[-1]}
    assert {x for x in drawn["x"] if low <= x <= high} == chosen


def test_a_long_file_is_read_in_parts(tmp_path: Path) -> None:
    curves = Curves(tmp_path / "m")
    points(curves.path, *({"step": step, "loss": 1.0, "note": "x" * 200} for step in range(12_000)))
    shares, newest = [], []
    while curves.read(seconds=0):
        drawn = curves.series()
        shares.append(drawn["read"])
        newest.append(drawn["series"]["loss"]["x"][-1])
    assert shares == sorted(shares) and len(shares) == 3 and shares[0] < 0.5 and shares[-1] == 1
    assert newest == sorted(set(newest)) and newest[-1] == 11_999
    assert drawn["read"] == 1
    points(curves.path, '{"step": 12000, "lo', end="")
    curves.read(seconds=0)
    assert curves.series()["read"] == 1, "nobody waits for the rest of a line that may never be complete"


def test_columns_that_are_no_numbers_stop_nothing(tmp_path: Path) -> None:
    curves = Curves(tmp_path / "m")
    points(curves.path, {"step": 1, "time": "x", "tokens": "y", "tokens_per_second": None, "loss": 1})
    points(curves.path, {"step": 2, "time": 5, "tokens": [], "tokens_per_second": "z", "loss": 2}, {"step": 10**400})
    points(curves.path, {"step": "3", "loss": 3}, {"event": "resumed", "step": 2, "time": None}, {"event": 5})
    curves.read()
    assert curves.series()["series"] == {"loss": {"x": [1, 2], "y": [1, 2]}}
    assert curves.series(axis="tokens")["series"] == {}


def test_where_the_extremes_are_and_where_the_run_resumed(tmp_path):
    curves = Curves(tmp_path / "m")
    points(curves.path, *({"step": s, "eval_loss": v} for s, v in ((10, 3.0), (20, 1.0), (30, 1.0), (40, 0.5))))
    points(curves.path, {"event": "resumed", "step": 30}, {"step": 40, "eval_loss": 2.0})
    curves.read()
    drawn = curves.series(1000, 35, 50)  # a zoom does not change them
    assert (drawn["min_step"], drawn["min"]) == ({"eval_loss": 20}, {"eval_loss": 1.0}), "the first of equal values"
    assert (drawn["max_step"], drawn["max"]) == ({"eval_loss": 10}, {"eval_loss": 3.0})
    assert drawn["resumed"] == [30]
    points(curves.path, {"step": 45, "loss": 1.0})
    curves.read()
    assert curves.series(1000, 10, 20)["newest"] == {"eval_loss": (40, 2.0), "loss": (45, 1.0)}, "each at its own step"
    curves.path.write_text("")
    points(curves.path, {"step": 1, "eval_loss": 1.0})
    curves.read()
    assert curves.series()["resumed"] == []
