"""Which measurement of the CPU counts: the last calm one, while a run trains or other programs use the CPU."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from backend.inspect import cpu_speed
from backend.inspect.cpu_speed import CpuSpeeds
from backend.runs import RUN_MARKER

RATES = {"matmul": 1e11, "small": 1e11, "attention": 1e11, "activations": 1e10, "memory": 1e10, "logit": 1e-9}
REQUEST = {"threads": 2, "processes": 1, "dtype": "fp32"}


class Measured(CpuSpeeds):
    """Answers with `now` instead of asking a worker process."""

    now: Any = None
    asked = 0

    def _ask(self, key: str, request: Any) -> Any:
        self.asked += 1
        return self.now


def result(layer: float, busy: float = 0.0, training: str = "", age: float = 0.0) -> dict[str, Any]:
    found = {"format": cpu_speed.FORMAT, "time": time.time() - age, "busy": busy, "training": training}
    return found if training else {**found, "rates": {**RATES, "layer": layer}}


def get(speeds: Measured, now: Any) -> dict[str, Any]:
    """What a check that waits gets, if the worker measures `now`."""
    speeds.now = now
    speeds._known.clear()  # as if some minutes had passed
    return speeds.get(REQUEST, True, 5)


@pytest.fixture
def speeds(tmp_path: Path) -> Measured:
    return Measured(tmp_path)


def test_a_measurement_is_kept_for_a_while(speeds: Measured, tmp_path: Path) -> None:
    assert get(speeds, result(0.001))["cpu"].layer == 0.001
    assert get(speeds, result(0.002))["cpu"].layer == 0.001 and speeds.asked == 1
    assert Measured(tmp_path).get(REQUEST, False)["cpu"].layer == 0.001  # another process
    assert not any(Measured(tmp_path).get({**REQUEST, "threads": 1}, False))


def test_an_old_measurement_counts_until_there_is_a_new_one(speeds: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what uses the CPU now."""
    monkeypatch.setattr(cpu_speed.os, "getloadavg", lambda: (0.6, 9.0, 9.0))
    get(speeds, result(0.001, busy=1.4, age=1500))
    speeds._known.clear()
    found = speeds.get(REQUEST, False)["cpu"]
    assert (found.layer, found.busy, found.note) == (0.001, 0, "The CPU speed was measured 25 min ago.")
    monkeypatch.setattr(cpu_speed.os, "getloadavg", lambda: (99.0, 0.0, 0.0))
    assert speeds.get(REQUEST, False)["cpu"].busy == cpu_speed._cores()
    monkeypatch.setattr(cpu_speed.os, "cpu_count", lambda: cpu_speed._cores() + 1)  # of the host of a container
    assert speeds.get(REQUEST, False)["cpu"].busy == 0
    assert get(speeds, result(0.002))["cpu"].layer == 0.002


@pytest.mark.parametrize(
    ("now", "why"),
    [
        ({"training": "/runs/one", "busy": 2.0}, "the run one in /runs trains"),
        ({"busy": 1.4}, "other programs use the CPU"),
    ],
)
def test_the_last_calm_measurement_counts(speeds: Measured, now: dict[str, Any], why: str) -> None:
    get(speeds, result(0.001, age=1500))
    found = get(speeds, result(0.009, **now))["cpu"]
    assert found.layer == 0.001 and found.busy == now["busy"]
    assert found.note == f"The CPU speed was measured 25 min ago; it cannot be measured again while {why}."
    assert get(speeds, result(0.002))["cpu"].note == ""


def test_without_a_calm_measurement(speeds: Measured) -> None:
    assert (
        "cannot be measured while the run one in /runs trains"
        in get(speeds, result(0, training="/runs/one"))["cpu_unknown"]
    )
    assert get(speeds, result(0.009, busy=1.4))["cpu"].is_busy
    assert get(Measured(speeds.cache_folder / "x"), "torch is missing")["cpu_unknown"].endswith("torch is missing")
    assert Measured(speeds.cache_folder / "y", command=("sleep", "9")).get(REQUEST, True) == {
        "cpu_unknown": cpu_speed.PENDING,
        "cpu_pending": True,
    }


def test_it_is_asked_again_after_a_run_has_trained(speeds: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not while the run has a process. Until it is answered, the reason stays the same."""
    reason = get(speeds, result(0, training="/runs/one"))["cpu_unknown"]
    speeds.now = result(0.002)
    assert speeds.get(REQUEST, True, 5)["cpu_unknown"] == reason
    monkeypatch.setattr(cpu_speed, "ASK_AGAIN_SECONDS", 0.0)  # as if that time had passed
    rank = subprocess.Popen(["sleep", "99"], env={**os.environ, RUN_MARKER: "/runs/one"})
    assert speeds.get(REQUEST, True, 5)["cpu_unknown"] == reason
    rank.kill()
    rank.wait()
    with monkeypatch.context() as patch:
        patch.setattr(speeds, "_request", lambda *_: None)
        assert speeds.get(REQUEST, True, 0) == {"cpu_unknown": reason, "cpu_pending": True}
    assert speeds.get(REQUEST, True, 5)["cpu"].layer == 0.002
