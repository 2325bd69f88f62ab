"""The predicted time of a run next to the measured one, and what it says about the next similar run."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from failed_runs import ended
from specs import spec

from backend.config.options import edit
from backend.inspect import CpuSpeed, InputFacts
from backend.machine import Machine
from backend.modelspec import from_config
from backend.preflight import Report, report_on
from backend.registry.builtin_models import BUILTIN_MODELS
from backend.rules import Case
from backend.runs import ESTIMATE, METRICS, MONITOR, PROGRESS, RESULT
from backend.runs.folder import Run
from backend.tasks.measured_time import MeasuredStarts, MeasuredTimes, measure_start, measure_time

CPU = CpuSpeed(
    matmul=1e11, small=8e10, attention=5e10, activations=6e9, memory=3e10, logit=2e-9, layer=0.001, cores=2
)  # fmt: skip
FAST = CpuSpeed(
    matmul=1e13, small=8e12, attention=5e12, activations=6e11, memory=3e12, logit=2e-11, layer=0.00001, cores=2
)  # fmt: skip
SHAPE = from_config({**BUILTIN_MODELS["smollm2-135m-instruct"].config})


def report(cpu: CpuSpeed = CPU, **options: Any) -> Report:
    facts = InputFacts(shape=SHAPE, cpu=cpu)
    return report_on(Case(edit(spec(), {"train.duration": "steps", "train.max_steps": 9, **options}), Machine(), facts))


def made(root: Path, planned: Report, ratio: float, day: int = 1, **point: Any) -> Run:
    """A run that has ended, whose steps took `ratio` times the predicted time."""
    run = Run.create(root, "one", planned.plan, datetime(2026, 1, day), planned.about, planned.expected)
    seconds = planned.time.step_seconds * ratio
    ended(run, end="done", exit_code=0, started=1000.0, ended=1090.0)
    progress = {"step": 9, "max_steps": 9, "first_step": 1, "step_seconds": seconds, "phase": "done"}
    (run.path / PROGRESS).write_text(json.dumps(progress))
    (run.path / RESULT).write_text(json.dumps({"steps": 9, "tokens": 9 * planned.time.tokens * point.pop("share", 1)}))
    (run.path / METRICS).write_text(json.dumps({"step": 9, "loss": 1.0, "time": 1080.0, **point}) + "\n")
    return run


def test_a_time_in_the_range(tmp_path: Path) -> None:
    found = measure_time(made(tmp_path, report(), 1.2))
    assert found and found.ratio == pytest.approx(1.2) and not found.is_outside
    assert found.sentence == (
        "The measured time per step is in the predicted range. The predicted time of the whole run does not include: "
        "tokenizing the data."
    )
    rows = {what: (predicted, measured) for what, predicted, measured in found.as_json()["rows"]}
    assert " s (" in rows["Mean time per step"][0] and "1 min 30 s" in (*rows["Whole run"], "1 min 30 s")


@pytest.mark.parametrize(("ratio", "share", "is_named"), [(2.5, 0.1, True), (2.5, 0.9, False), (0.4, 0.1, False)])
def test_processes_that_got_little_of_the_cpu_are_a_cause(
    tmp_path: Path, ratio: float, share: float, is_named: bool
) -> None:
    run = made(tmp_path, report(), ratio)
    threads = int(run.plan().env["OMP_NUM_THREADS"])
    monitor = {"step": 9, "ranks": [{"device": "cpu", "cores": share * threads}]}
    (run.path / MONITOR).write_text(json.dumps(monitor))
    found = measure_time(run)
    assert found and found.was_busy == is_named
    assert (" got only " in found.sentence) == is_named


@pytest.mark.parametrize(
    ("ratio", "point", "cpu", "cause"),
    [
        (2.5, {}, CPU, "The cause is not known: the parts of a step are not measured."),
        (2.5, {"data_wait": 0.3}, CPU, "Steps waited for the data loader 30% of the time"),
        (2.5, {"data_wait": 0.1}, FAST, "The cause is not known"),
        (2.5, {"share": 2}, CPU, " tokens instead of the predicted "),
        (2.5, {}, replace(CPU, busy=1.4), "When the run was checked, other programs used about 1.4 of 2 cores."),
        (0.4, {}, replace(CPU, busy=1.4), "took 40% of the predicted time, which is outside the predicted range. The"),
    ],
)
def test_the_cause_is_only_what_was_measured(
    tmp_path: Path, ratio: float, point: dict[str, Any], cpu: CpuSpeed, cause: str
) -> None:
    found = measure_time(made(tmp_path, report(cpu), ratio, **point))
    assert found and found.is_outside and cause in found.sentence


def test_too_few_steps_or_no_prediction(tmp_path: Path) -> None:
    run = made(tmp_path, report(), 1.2)
    (run.path / PROGRESS).write_text(json.dumps({"step": 2, "first_step": 1, "step_seconds": 1.0}))
    assert measure_time(run) is None
    (run.path / ESTIMATE).write_text(json.dumps({"time": {"unknown": "no"}}))
    assert measure_time(run) is None


def test_the_last_similar_run_scales_the_next_prediction(tmp_path: Path) -> None:
    made(tmp_path, report(), 1.3)
    made(tmp_path, report(replace(CPU, busy=1.4)), 3.0, day=2)
    made(tmp_path, report(**{"data.max_length": 64}), 5.0, day=3)
    times, planned = MeasuredTimes(tmp_path), report()
    found = times.latest(planned)
    assert found and found.run == "2026-01-01_000000_one"
    shown = found.for_next(planned)
    assert shown["ratio"] == pytest.approx(1.3)
    assert (shown["run"], shown["name"]) == ("2026-01-01_000000_one", "one")
    assert shown["sentence"].startswith(
        "In the last similar run (one), steps took 1.30 times as long as predicted. With"
    )
    assert times.latest(report(**{"data.max_length": 128})) is None
    known = replace(planned.time, assumed_length=0)
    assert times.latest(replace(planned, time=known)) is None  # its lengths are known, those of the earlier run not


def test_starts_of_earlier_runs_replace_the_assumed_one(tmp_path: Path) -> None:
    """Also of a run with another batch size: the weights of each model are loaded in addition."""
    planned = report()
    assert planned.time.run and planned.time.run_seconds
    loading = planned.time.run.items[0].seconds - 30
    for day, seconds in enumerate((12.0, 8.0, 9.0), start=1):
        run = made(tmp_path, report(**{"data.max_length": 64}), 1.0, day)
        kept = json.loads((run.path / PROGRESS).read_text())
        first = 1000.0 + seconds + loading + kept["step_seconds"]
        (run.path / PROGRESS).write_text(json.dumps({**kept, "first_step_time": first}))
    found = MeasuredStarts(tmp_path).applied(planned).time
    assert found.run and found.run_seconds and found.run.start_seconds == pytest.approx(9.0)
    assert found.run.seconds == pytest.approx(planned.time.run.seconds - 30 + 9)
    assert found.run.items[0].formula.startswith("9 s (median of 3 earlier runs, including preparing the data), and ")
    assert planned.time.run.items[0].formula.startswith("30 s (assumed, 10 s to 90 s), and ")
    assert found.run_seconds[2] < planned.time.run_seconds[2] - 50 and found.run.not_included == ()
    for other in ({"parallel.strategy": "ddp"}, {"data.max_samples": 9}, {"train.torch_compile": True}):
        changed = report(**other)
        assert MeasuredStarts(tmp_path).applied(changed) is changed, other


def test_a_measured_start_is_not_counted_as_loading(tmp_path: Path) -> None:
    """The estimate of the next run has a measured start already."""
    planned = report()
    assert planned.time.run
    measured = replace(planned, time=replace(planned.time, run=planned.time.run.with_start(9.0, 1)))
    run, loading = made(tmp_path, measured, 1.0), planned.time.run.items[0].seconds - 30
    kept = json.loads((run.path / PROGRESS).read_text())
    first = 1000.0 + 11 + loading + kept["step_seconds"]
    (run.path / PROGRESS).write_text(json.dumps({**kept, "first_step_time": first}))
    assert measure_start(run) == pytest.approx(11)
    (run.path / PROGRESS).write_text(json.dumps(kept))
    assert measure_start(run) is None
