"""Trials of a tuning with the real trainer: their losses, and that a stop in one leaves no process."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
from fork_server import ForkServer
from random_specs import random_spec, write_inputs
from training_runs import make_spec
from waiting import wait_for

from backend.inspect import resolve_paths
from backend.machine import Machine, probe
from backend.preflight import preflight
from backend.runs import processes
from backend.runs.folder import RunError, runs
from backend.tasks.tuning import candidates, runner
from backend.tasks.tuning import tuning as tuning_module
from backend.tasks.tuning.runner import Runner
from backend.tasks.tuning.tuning import Tuning, tune

STEPS = 6  # of a trial, to save time
QUICK = {"launch.launcher": "python", "launch.omp_num_threads": 1, "data.max_length": 64}
SOAKED = 50  # random specs
MINUTES = 2.0  # each


def start(root: Path, machine: Machine, **changes: object) -> Tuning:
    report = preflight(make_spec({**QUICK, **changes}), machine, root)
    _, tuning = tune(root / "runs", report, root, machine)
    assert tuning
    return tuning


def test_settings_that_do_not_change_the_result_have_the_same_losses(
    root: Path, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = replace(probe(root), python=str(fork_server.python))
    monkeypatch.setattr(runner, "probe", lambda _: machine)
    monkeypatch.setattr(runner, "warmed", lambda plan: plan)  # the fork server has imported the libraries already
    monkeypatch.setattr(runner.WarmProcess, "start", lambda *_: None)
    monkeypatch.setattr(runner, "is_clearly_slower", lambda *_: False)  # all losses are compared
    monkeypatch.setattr(candidates, "AXES", {"batch": candidates.AXES["batch"]})
    monkeypatch.setattr(tuning_module, "STEPS", STEPS)
    monkeypatch.setattr(runner, "STEPS", STEPS)
    monkeypatch.setattr(Tuning, "start", lambda self: None)
    tuning = start(root, machine, **{"train.per_device_train_batch_size": 4, "train.gradient_accumulation_steps": 2})
    Runner(tuning).run()
    status = tuning.status()
    assert status["state"] == "done", status
    rows = [row for row in status["rows"] if row["state"] != "skipped"]
    names = " ".join(row["label"] for row in rows)
    assert "Batch size 8" in names and "Batch size 2" in names
    for row in rows:
        assert row["state"] in ("base", "faster", "same", "slower", "repeated"), row
        assert row["losses"] == pytest.approx(rows[0]["losses"], abs=1e-4) and len(row["losses"]) == STEPS
        assert row["tokens_per_second"] > 0 and row["peak_bytes"] > 2**27, row
    assert rows[-1]["state"] == "repeated" and not runs(tuning.path)
    assert (tuning.path / "log.txt").read_text().count("Training for 6 steps.") == len(rows)


def test_a_stop_in_the_middle_leaves_no_process(root: Path, cache: Path) -> None:
    tuning = start(root, probe(root))
    wait_for(lambda: any(processes.run_processes(run.path) for run in runs(tuning.path)))
    (run,) = runs(tuning.path)
    assert tuning.status()["state"] == "running"
    tuning.stop()
    wait_for(lambda: not processes.is_locked(tuning.path))
    assert tuning.status()["state"] == "stopped"
    assert not runs(tuning.path) and not processes.run_processes(run.path)
    assert not processes.run_processes(tuning.path), "the process that imports the libraries for all trials"
    assert {path.name for path in tuning.path.iterdir()} == {"lock", "log.txt", "outcome.json", "stop", "tuning.json"}


@pytest.mark.soak
def test_random_specs_are_measured_without_a_refused_or_failed_row(root: Path, tiny: Path) -> None:
    """Of specs that pass the checks; FOOTPLATE_TUNED_SPECS of them."""
    inputs, rng, measured = root / "inputs", random.Random(7), 0
    inputs.mkdir()
    write_inputs(inputs, tiny)
    machine, problems = probe(inputs), []
    while measured < int(os.environ.get("FOOTPLATE_TUNED_SPECS", SOAKED)):
        spec = resolve_paths(random_spec(rng), inputs)
        report = preflight(spec, machine, inputs, wait_seconds=60)
        if not report.can_run:
            continue
        try:
            trial, tuning = tune(root / "runs", report, inputs, machine, MINUTES, changes_result=measured % 2 == 1)
        except RunError:
            continue
        assert tuning, (report.spec, [f.title for f in trial.findings if f.level == "error"])
        measured += 1
        wait_for(lambda tuning=tuning: not processes.is_locked(tuning.path), 60 * MINUTES + 120)
        status = tuning.status()
        wrong = [row for row in status["rows"] if row["state"] in ("refused", "failed")]
        if wrong or status["state"] != "done":
            problems.append(json.dumps([tuning.request()["spec"], status["failure"], wrong, status["notes"]]))
        assert not runs(tuning.path) and not processes.run_processes(tuning.path)
    assert not problems, "\n".join(problems)
