"""When waiting runs start, and when a sweep ends."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from backend.__main__ import main
from backend.runs import LOCK, PROGRESS, STATE, STOP, SWEEP, Plan, processes, queue, schedule, sweeps
from backend.runs.folder import Run
from backend.runs.schedule import Span

NOW = 1_000_000.0
Make = Callable[..., Run]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes runs that are alive and need the CPU: one with `progress` trains on it since 1000 seconds, others wait."""
    monkeypatch.setenv(queue.FOLDER, str(tmp_path / "queue"))
    monkeypatch.delenv(queue.CPU_SLOTS, raising=False)
    locks: list[int] = []
    order: list[queue.Entry] = []

    def made(
        name: str,
        seconds: tuple[float, float] | None,
        progress: Any = None,
        sweep: str = "",
        limit: int = 0,
        **more: Any,
    ) -> Run:
        low, high = seconds or (0, 0)
        time = {"run": {"low_seconds": low, "high_seconds": high, "steps": 100}} if seconds else {"unknown": "no"}
        files = {SWEEP: sweeps.Member(sweep, {}).to_json()} if sweep else {}
        run = Run.create(
            tmp_path, name, Plan(("true",), {}, files), datetime(2026, 1, 1), None, {"time": time, "time_limit": limit}
        )
        lock = processes.acquire_lock(run.path)
        assert lock is not None
        locks.append(lock)
        (run.path / LOCK).write_text("supervisor\n")
        if progress is None:
            (run.path / STATE).write_text(json.dumps({"queued": NOW, "waiting": "Another run is ahead."}))
            order.append(queue.Entry(str(run.path), {"cpu": "the CPU"}, **more))
            (queue.folder() / queue.ORDER).write_text(json.dumps([asdict(entry) for entry in order]))
        else:
            (run.path / STATE).write_text(json.dumps({"started": NOW - 1000, "files_before": {}}))
            os.utime(run.path / LOCK, (NOW - 1000, NOW - 1000))
            (run.path / PROGRESS).write_text(json.dumps({"max_steps": 100, "time": NOW, **progress}))
            (queue.folder() / queue.DEVICES).mkdir(exist_ok=True)
            (queue.folder() / queue.DEVICES / "cpu").write_text(f"{run.path}\n")
        return run

    yield made
    for lock in locks:
        processes.release(lock)


TRAINS = {"phase": "training", "step": 40, "step_seconds": 40.0, "evaluations_left": 0}


def sentences() -> list[str]:
    return [times.sentence for times in schedule.waiting(NOW).values()]


def test_runs_start_one_after_the_other(make: Make) -> None:
    make("a", (600, 900), TRAINS)
    make("b", (3600, 7200))
    make("c", None)
    make("d", (60, 120))
    starts = sentences()
    assert starts[:2] == ["Starts in 35 min to 45 min.", "Starts in 1 h 30 min to 3 h."]  # 60 steps of 40 s are left
    assert starts[2] == "When it starts is not known: the time of 2026-01-01_000000_c is not predicted."


def test_runs_after_the_same_run(make: Make, tmp_path: Path) -> None:
    """They need the device that this run uses, so they start one after the other."""
    first = make("a", (600, 900), TRAINS)
    for name in "bcd":
        make(name, (3600, 3700), after=str(first.path), sweep="s")
    make("e", (3600, 3700))
    assert sentences() == [
        "Starts in 35 min to 45 min.", "Starts in 1 h 30 min to 2 h.", "Starts in 2 h 30 min to 3 h.",
        "Starts in 3 h 30 min to 4 h.",
    ]  # fmt: skip
    text = schedule.sweep_text(tmp_path, "s", NOW)
    assert text == "The remaining 3 runs of the sweep will end in 3 h 30 min to 4 h."


def test_a_run_that_stops_ends_soon(make: Make) -> None:
    run = make("a", (600, 9000), {**TRAINS, "step": 1})
    (run.path / STOP).write_text("save\n")
    make("b", (3600, 7200))
    assert run.state == "stopping" and sentences() == ["Starts within 1 min."]


def test_the_order_of_several_slots_and_held_runs(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(queue.CPU_SLOTS, "2")
    make("a", (600, 900), TRAINS)
    make("b", (6 * 3600, 7 * 3600), held=True)
    make("c", (60, 120))
    assert sentences() == [
        "When it starts is not known: it is on hold.",
        "When it starts is not known: another program is using its devices.",  # a slot is free, says the queue
    ]


@pytest.mark.parametrize(
    ("progress", "seconds", "expected"),
    [
        ({"phase": "preparing data"}, (1500, 4000), Span(500, 3000)),
        ({"phase": "preparing data"}, (1500, 900), Span(unknown="{} takes longer than predicted")),
        ({"phase": "preparing data"}, None, Span(unknown="the time of {} is not predicted")),
        ({**TRAINS, "evaluations_left": 2}, None, Span(unknown="the time of {} is not predicted")),
        ({**TRAINS, "evaluations_left": 2}, (500, 9000), Span(2400 / 1.15, 8000)),
        ({**TRAINS, "phase": "evaluating"}, None, Span(2400 / 1.15, 2400 * 1.15 + 60)),
        ({"phase": "saving", "step": 100}, None, Span(0, 60)),
    ],
)
def test_the_remaining_time_of_a_run(make: Make, progress: Any, seconds: Any, expected: Span) -> None:
    run = make("a", seconds, progress)
    found = schedule.remaining(run, NOW)
    assert found.unknown == expected.unknown.format(run.id)
    assert expected.unknown or (found.low, found.high) == pytest.approx((expected.low, expected.high))


def test_a_time_limit_is_an_upper_end(make: Make) -> None:
    """Of a run that has trained for 1000 seconds, and of one that waits; also without a prediction."""
    assert schedule.remaining(make("a", None, TRAINS, limit=1600), NOW) == Span(600, 600)
    assert schedule.remaining(make("b", None, {"phase": "preparing data"}, limit=1600), NOW) == Span(0, 600)
    assert schedule.remaining(make("c", (60, 7200), limit=3600), NOW) == Span(60, 3600)


@pytest.mark.parametrize(
    ("span", "text"),
    [
        (Span(0, 20), "at most 1 min"),
        (Span(580, 610), "about 10 min"),
        (Span(2350, 2450), "about 40 min"),
        (Span(4000, 9000), "1 h to 2 h 30 min"),
        (Span(25 * 3600, 70 * 3600), "1 d 1 h to 3 d"),
    ],
)
def test_texts_are_coarse(span: Span, text: str) -> None:
    assert span.text() == text
    assert span.when() == (f"in {text}" if span.low else "within 1 min")


def test_how_long_a_sweep_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    spans, cpu = [Span(3600, 7200)] * 4, [{"cpu": "the CPU"}] * 4
    monkeypatch.delenv(queue.CPU_SLOTS, raising=False)
    assert schedule.all_runs_text(cpu, spans) == "The 4 runs take 4 h to 8 h, one after the other."
    monkeypatch.setenv(queue.CPU_SLOTS, "2")
    assert schedule.all_runs_text(cpu, spans) == "The 4 runs take 2 h to 4 h, 2 at a time."
    assert schedule.all_runs_text(cpu[:1], spans[:1]) == "The run takes 1 h to 2 h."
    on_cluster = schedule.all_runs_text([{}] * 4, spans)
    assert on_cluster == "Each run takes 1 h to 2 h; how many run at the same time is up to the cluster."
    unknown = [*spans, Span(unknown="the CPU of b is not known")]
    assert schedule.all_runs_text([*cpu, {}], unknown) == (
        "How long the runs take is not known: the CPU of b is not known."
    )


def test_when_a_sweep_ends(make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make("a", (600, 900), TRAINS, sweep="s")
    make("b", (3600, 7200), sweep="s")
    assert schedule.sweep_text(tmp_path, "s", NOW) == "The remaining 2 runs of the sweep will end in 1 h 30 min to 3 h."
    assert schedule.sweep_text(tmp_path, "other") == ""
    make("c", None, sweep="s")
    assert "the time of 2026-01-01_000000_c is not predicted" in schedule.sweep_text(tmp_path, "s", NOW)
    assert main(["queue", "--runs", str(tmp_path)]) == 0
    assert "Starts in " in capsys.readouterr().out
    assert main(["list", "--sweep", "s", "--runs", str(tmp_path)]) == 0
    assert "When the sweep ends is not known: the time of " in capsys.readouterr().out
