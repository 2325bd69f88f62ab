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
from training_runs import environment, make_spec
from waiting import wait_for

from backend import presets, registry
from backend.config import RunSpec
from backend.config.options import edit
from backend.inspect import resolve_paths
from backend.machine import Machine, probe
from backend.preflight import preflight
from backend.runs import RUN_MARKER, processes
from backend.runs.folder import RunError, runs
from backend.tasks.tuning import candidates, runner
from backend.tasks.tuning import tuning as tuning_module
from backend.tasks.tuning.runner import Runner
from backend.tasks.tuning.tuning import Tuning, tune
from backend.train import deepspeed_ops

STEPS = 6  # of a trial, to save time
QUICK = {"launch.launcher": "python", "launch.omp_num_threads": 1, "data.max_length": 64}
SOAKED, DRAWN_AXES = 50, 4  # random specs, and the axes that each is tuned along
MINUTES = 10.0  # each: no trial may end at the limit, also on a busy machine


def start(root: Path, machine: Machine, **changes: object) -> Tuning:
    report = preflight(make_spec({**QUICK, **changes}), machine, root)
    _, tuning = tune(root / "runs", report, root, machine)
    assert tuning
    return tuning


def in_this_process(root: Path, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Let `Runner.run` of this process run trials of a few steps, whose ranks are forked, and compare all losses. The
    machine to tune on."""
    for name, value in environment(root, fork_server.cache).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(RUN_MARKER)
    machine = replace(probe(root), python=str(fork_server.python))
    monkeypatch.setattr(runner, "probe", lambda _: machine)
    monkeypatch.setattr(runner, "warmed", lambda plan: plan)  # the fork server has imported the libraries already
    monkeypatch.setattr(runner.WarmProcess, "start", lambda *_: None)
    monkeypatch.setattr(runner, "is_clearly_slower", lambda *_: False)
    monkeypatch.setattr(tuning_module, "STEPS", STEPS)
    monkeypatch.setattr(runner, "STEPS", STEPS)
    monkeypatch.setattr(Tuning, "start", lambda self: None)
    return machine


def spec_of_preset(rng: random.Random) -> RunSpec:
    """A preset for the tiny model, a few examples, and processes on this CPU."""
    preset = rng.choice(presets.presets()).spec
    tiny = {"model.source": "builtin", "model.builtin": "tiny-llama", "data.max_samples": 16, "data.max_length": 256}
    processes = {"launch.nproc_per_node": rng.choice((1, 2)), "launch.devices": (), "launch.omp_num_threads": 1}
    spec = edit(preset, {**tiny, **processes, "launch.device": "cpu", "launch.place": "local", "launch.nnodes": 1})
    if preset.data.source == "hub":
        spec = edit(spec, {"data.source": "builtin"})
    changes = {
        "train.per_device_train_batch_size": rng.choice((1, 2, 4)),
        "train.gradient_accumulation_steps": rng.choice((1, 2)),
        "parallel.strategy": rng.choice((spec.parallel.strategy, *registry.STRATEGIES)),
        "method.quantization": rng.choice((spec.method.quantization, "none")),
        "precision.compute": rng.choice((spec.precision.compute, "bf16", "fp32")),
    }
    return edit(spec, changes)


def test_settings_that_do_not_change_the_result_have_the_same_losses(
    root: Path, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = in_this_process(root, fork_server, monkeypatch)
    monkeypatch.setattr(candidates, "AXES", {"batch": candidates.AXES["batch"]})
    tuning = start(root, machine, **{"train.per_device_train_batch_size": 4, "train.gradient_accumulation_steps": 2})
    Runner(tuning).run()
    status = tuning.status()
    assert status["state"] == "done", status
    rows = [row for row in status["rows"] if row["state"] != "skipped"]
    assert deepspeed_ops.PHASE == runner.BUILDING, "its time does not count"
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
def test_random_specs_are_measured_without_a_refused_or_failed_row(
    root: Path, tiny: Path, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of specs that pass the checks; FOOTPLATE_TUNED_SPECS of them, from the seed FOOTPLATE_TUNED_SEED."""
    inputs, rng = root / "inputs", random.Random(int(os.environ.get("FOOTPLATE_TUNED_SEED", 7)))
    inputs.mkdir()
    write_inputs(inputs, tiny)
    machine, problems, measured, trials = in_this_process(inputs, fork_server, monkeypatch), [], 0, 0
    all_axes = dict(candidates.AXES)
    while measured < int(os.environ.get("FOOTPLATE_TUNED_SPECS", SOAKED)):
        spec = resolve_paths(random_spec(rng) if rng.random() < 0.6 else spec_of_preset(rng), inputs)
        report = preflight(spec, machine, inputs, wait_seconds=60)
        if not report.can_run:
            continue
        try:
            trial, tuning = tune(root / "runs", report, inputs, machine, MINUTES, changes_result=measured % 2 == 1)
        except RunError:
            continue
        assert tuning, (report.spec, [f.title for f in trial.findings if f.level == "error"])
        drawn = rng.sample(sorted(all_axes), DRAWN_AXES)
        monkeypatch.setattr(candidates, "AXES", {name: all_axes[name] for name in drawn})
        Runner(tuning).run()
        status = tuning.status()
        measured, trials = measured + 1, trials + sum(row["state"] != "skipped" for row in status["rows"])
        wrong = [row for row in status["rows"] if row["state"] in ("refused", "failed")]
        unequal = [note for note in status["notes"] if note.startswith("Two trials with the current settings")]
        if wrong or unequal or status["state"] != "done":
            problems.append(json.dumps([tuning.request()["spec"], status["failure"], wrong, status["notes"]]))
        print(measured, [f"{row['label']}: {row['state']}" for row in status["rows"]], *problems[-1:], flush=True)
        assert not runs(tuning.path) and not processes.run_processes(tuning.path)
    assert not problems, "\n".join(problems)
    assert trials > 2 * measured, "specs without other settings prove nothing"
