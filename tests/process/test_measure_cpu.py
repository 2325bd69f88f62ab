"""The measurement of the CPU: its rates, what else uses the cores, and that nothing is measured while a run trains."""

from __future__ import annotations

import json
import math
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from backend.runs import JOB, PLAN, RUN_MARKER
from backend.train import measure_cpu

REQUEST = {
    "threads": 1, "processes": 1, "dtype": "bf16", "hidden": 32, "intermediate": 64, "vocabulary": 256, "heads": 2,
    "head_dim": 16, "tokens": 64, "length": 32, "rank": 4, "kept_bytes": 2**16,
}  # fmt: skip


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Measurements of a moment; the number of threads of this process is as before."""
    monkeypatch.setattr(measure_cpu, "SECONDS", 0.005)
    monkeypatch.setattr(measure_cpu, "BLOCK", 2**16)
    threads = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == threads


def measured(monkeypatch: pytest.MonkeyPatch, busy: float, training: str = "", threads: int = 1) -> Any:
    """What the worker answers if other programs use `busy` cores."""
    monkeypatch.setattr(measure_cpu, "busy_cores", lambda: busy)
    monkeypatch.setattr(measure_cpu, "training_run", lambda: training)
    return measure_cpu.measure({**REQUEST, "threads": threads})


def test_a_calm_cpu_is_measured_with_the_threads_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(monkeypatch, 0.1)
    assert all(math.isfinite(rate) and rate > 0 for rate in found["rates"].values())
    assert found["busy"] == 0.1 and not found["training"]


def test_a_busy_cpu_is_measured_in_cpu_time_of_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    one = {"memory": 8.0, "matmul": 5.0, "logit": 4.0, "layer": 3.0}
    seen: list[int] = []

    def rates(clock: object, **request: Any) -> dict[str, float]:
        seen.append(request["threads"])
        assert clock is time.thread_time
        return dict(one)

    monkeypatch.setattr(measure_cpu, "_with_threads", rates)
    assert measured(monkeypatch, 1.5, threads=2)["rates"] == {"memory": 8.0, "matmul": 10.0, "logit": 2.0, "layer": 3.0}
    assert seen == [1]


@pytest.mark.parametrize("training", ["", "/runs/one"])
def test_what_starts_during_the_measurement_counts(monkeypatch: pytest.MonkeyPatch, training: str) -> None:
    busy, trains, clocks = iter((0.1, 1.5)), iter(("", training)), []
    monkeypatch.setattr(measure_cpu, "busy_cores", lambda: next(busy))
    monkeypatch.setattr(measure_cpu, "training_run", lambda: next(trains))
    monkeypatch.setattr(measure_cpu, "_with_threads", lambda clock, **_: clocks.append(clock) or {"matmul": 5.0})
    found = measure_cpu.measure(REQUEST)
    assert (found["busy"], found["training"], "rates" in found) == (1.5, training, not training)
    assert clocks == [time.perf_counter, time.thread_time][: 2 - bool(training)]


def test_idle_jobs_and_followers_do_not_train(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def trains() -> str:
        process = SimpleNamespace(pid=-1, environ=lambda: {RUN_MARKER: str(tmp_path)})
        monkeypatch.setattr(measure_cpu.psutil, "process_iter", lambda: [process])
        return measure_cpu.training_run()

    (tmp_path / PLAN).write_text(json.dumps({"about": {"kind": "chat"}}))
    assert not trains()
    (tmp_path / PLAN).write_text("{}")
    assert trains() == str(tmp_path)
    (tmp_path / JOB).write_text("{}")
    assert not trains()


def test_a_layer_takes_more_than_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((2.0, 1.0))
    monkeypatch.setattr(measure_cpu, "fastest", lambda *_: next(times))
    assert measure_cpu._layer(time.perf_counter) > 0


def test_nothing_is_measured_while_a_run_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "rates" not in measured(monkeypatch, 2.0, training="/runs/one")
    monkeypatch.undo()
    assert 0 <= measure_cpu.busy_cores(0.05) <= (os.cpu_count() or 1)
    with subprocess.Popen(["sleep", "60"], env={**os.environ, RUN_MARKER: "/runs/one"}) as process:
        try:
            until = time.monotonic() + 60
            while not measure_cpu.training_run():
                assert time.monotonic() < until
        finally:
            process.kill()
