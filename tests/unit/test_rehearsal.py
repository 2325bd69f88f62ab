"""The spec of a rehearsal, and the driver of its runs with programs in place of the trainer."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small import client
from waiting import wait_for

from backend import presets, registry
from backend.config import RunSpec
from backend.config.options import changes, edit, effective
from backend.inspect import InputFacts, inspect_inputs
from backend.machine import Machine
from backend.preflight import report_on
from backend.rules import RULES, Case, Rule, examine
from backend.rules.examples import DEMO, LAPTOP
from backend.runs import Plan, processes, rehearsals
from backend.runs.folder import Run, runs
from backend.runs.rehearsals import FOLDER, Driver, Rehearsal, delete_old, find_rehearsal, new_folder
from backend.runs.scratch import SCRATCH
from backend.tasks.rehearsal import differences, on_cpu, rehearsal_spec, replacements, run_plans

RECORD = """
import json, os, signal, sys, time
def phase(name):
    line = {"phase": name, "seconds": 0.5, "time": time.time(), "peak_bytes": 1000}
    open("rehearsed.jsonl", "a").write(json.dumps(line) + "\\n")
resumed = os.path.exists("rehearsed.jsonl")
phase("starting")
"""
CRASHES_ONCE = RECORD + (
    "phase('loading model')\n"
    "if not resumed:\n    phase('step 1'); phase('killed'); os.kill(os.getpid(), signal.SIGKILL)\n"
    "phase('step 2')\nopen('result.json', 'w').write(json.dumps({'peak_bytes': [2000, 3000]}))\n"
)
CRASHES_ALWAYS = RECORD + "phase('killed'); os.kill(os.getpid(), signal.SIGKILL)\n"
FAILS = RECORD + (
    "open('progress.json', 'w').write(json.dumps({'phase': 'preparing data'}))\n"
    "raise SystemExit('backend.train.run_log.TrainError: bad data.')\n"
)
SLEEPS = RECORD + "open('progress.json', 'w').write(json.dumps({'phase': 'loading model'}))\ntime.sleep(60)\n"
SHRINKS = (
    "import json, os\nos.makedirs('../scratch/model')\n"
    "open('result.json', 'w').write(json.dumps({'seconds': 0.1, 'peak_bytes': 9000, 'text': 'It was small.'}))\n"
)
LOADS = "open('result.json', 'w').write('{\"seconds\": 0.1, \"peak_bytes\": 7}')\n"


def errors(spec: RunSpec, machine: Machine, facts: InputFacts) -> list[str]:
    return [f.code for f in examine(Case(effective(spec), machine, facts)) if f.level == "error"]


@pytest.mark.parametrize("preset", presets.presets(), ids=lambda preset: preset.name)
def test_the_spec_of_a_rehearsal_passes_the_checks_of_a_preset(preset: Any, tmp_path: Path) -> None:
    facts = inspect_inputs(preset.spec, tmp_path)
    assert errors(rehearsal_spec(preset.spec), preset.machine, facts) == []


# By their numbers, so that a new rule changes no other choice; FSDP1 passes on GPUs only, which few examples have.
QUICK_RULES = [
    rule for rule in RULES if rule.code.endswith(("1", "5")) or rule.passes_on.patch.get("parallel.strategy") == "fsdp1"
]


@pytest.mark.parametrize("rules", [QUICK_RULES, pytest.param(RULES, marks=pytest.mark.soak)], ids=("few", "all"))
def test_the_spec_of_a_rehearsal_passes_the_checks_that_the_spec_passes(rules: Sequence[Rule]) -> None:
    """The passing examples of rules, and every stage with every strategy."""
    cases = [(rule.passes_on.patch, rule.passes_on.machine, rule.passes_on.facts) for rule in rules]
    pairs = {"data.builtin": "train-pairs"}
    for stage, strategy in itertools.product(registry.STAGES, registry.STRATEGIES):
        data = pairs if stage in registry.PREFERENCE_STAGES else {}
        cases.append(({"train.stage": stage, "parallel.strategy": strategy, **data}, None, None))
        cases.append(({**cases[-1][0], "method.kind": "full", "save.strategy": "no"}, None, None))
    passing = set()
    for patch, machine, facts in cases:
        spec, machine, facts = edit(RunSpec(), patch), machine or LAPTOP, facts or DEMO
        if not errors(spec, machine, facts):
            assert errors(rehearsal_spec(spec), machine, facts) == [], patch
            passing.add((spec.train.stage, spec.parallel.strategy))
    assert {stage for stage, _ in passing} == set(registry.STAGES)
    assert {strategy for _, strategy in passing} == set(registry.STRATEGIES)


def test_what_is_planned_for_another_machine_is_rehearsed_on_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Presets and passing examples of rules that need GPUs."""
    monkeypatch.setattr("backend.preflight.inspect_inputs", lambda spec, base: DEMO)
    cases = [(preset.spec, preset.machine) for preset in presets.presets() if preset.machine.gpus]
    cases += [(edit(RunSpec(), r.passes_on.patch), r.passes_on.machine) for r in RULES if _has_gpus(r.passes_on)]
    assert len(cases) > 60
    here, ranks = replace(LAPTOP, ram_free_bytes=20 * 2**30), set()
    for spec, machine in cases:
        report = report_on(Case(effective(spec), machine, DEMO))
        small = on_cpu(report, here, tmp_path, tmp_path / "folder")
        errors = [finding for finding in small.findings if finding.level == "error"]
        if report.can_run:
            assert not errors, (spec, [(f.slug, f.message) for f in errors])
            assert small.run.device == "cpu" and small.run.nnodes == 1
            assert small.spec.model.path == str(tmp_path / "folder" / SCRATCH / "model")
            ranks.add((report.run.world_size, small.run.world_size))
    assert {(1, 1), (2, 2), (16, 8)} <= ranks


def _has_gpus(example: Any) -> bool:
    return bool(example.machine and example.machine.gpus and example.facts is None)


def test_what_a_rehearsal_on_cpu_replaces_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backend.preflight.inspect_inputs", lambda spec, base: DEMO)
    patch = {"precision.compute": "fp16", "model.attn_implementation": "flash_attention_2", "data.max_length": 128}
    patch |= {"train.use_liger_kernel": True, "train.per_device_train_batch_size": 1}
    patch |= {"parallel.strategy": "zero3", "launch.nproc_per_node": 8, "lora.adapter_path": "/runs/a/model"}
    report = report_on(Case(effective(edit(RunSpec(), patch)), presets.machines()["8x80gb"], DEMO))
    small = on_cpu(report, LAPTOP, tmp_path, tmp_path / "folder")
    first, changed = replacements(report, small)
    assert first.startswith("Rehearsed with 8 CPU processes of this machine instead of 8 x H100")
    for text in (
        "train.use_liger_kernel is false instead of true",
        "model.attn_implementation is auto instead of flash",
        "lora.adapter_path is empty instead of /runs/a/model",
    ):
        assert text in changed
    assert "precision.compute is auto instead of fp16" in changed and "launch." not in changed


def test_a_rehearsal_changes_only_length_intervals_and_reports() -> None:
    spec = edit(
        RunSpec(), {"train.gradient_accumulation_steps": 64, "train.warmup_steps": 100.0, "data.max_length": 900}
    )
    before, after = changes(spec), changes(rehearsal_spec(spec))
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    assert changed == {
        "train.duration", "train.max_steps", "train.gradient_accumulation_steps", "train.max_nonfinite_steps",
        "train.warmup_steps",
        "eval.max_new_tokens", "eval.strategy", "eval.steps", "save.strategy", "save.steps",
    }  # fmt: skip
    assert rehearsal_spec(edit(spec, {"save.strategy": "no", "eval.strategy": "no"})).save.strategy == "no"
    nodes = edit(spec, {"parallel.strategy": "ddp", "launch.rendezvous": "static", "launch.nnodes": 2})
    assert rehearsal_spec(nodes).launch.rendezvous == "standalone"
    assert "this node" in differences(nodes)[0]


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "runs"
    for path in (tmp_path / "runs" / FOLDER).glob("*"):
        for run in runs(path):
            assert not processes.run_processes(run.path)


def make(root: Path, train: str, load: str = LOADS, **before: str) -> Rehearsal:
    codes = {"train": train, "load": load, **before}
    plans = {part: Plan((sys.executable, "-c", code)) for part, code in codes.items()}
    return Rehearsal.create(new_folder(root), "try", plans, {}, {"measured_bytes": 5000}, ["A note."])


def test_a_rehearsal_resumes_after_its_crash_and_leaves_no_run(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rehearsal = make(root, CRASHES_ONCE)
    seen = []
    discard = rehearsals.discard_runs
    monkeypatch.setattr(
        rehearsals, "discard_runs", lambda folder: [discard(folder), seen.append(Rehearsal(folder).status())]
    )
    lock = processes.acquire_lock(rehearsal.path)
    Driver(rehearsal).run()
    status = rehearsal.status()
    assert {**status, "state": "running", "now": "Delete the runs"} == seen[0], "phases never vanish"
    assert lock is not None
    os.close(lock)
    assert status["state"] == "done", status
    assert [phase["phase"] for phase in status["phases"]] == [
        "starting", "loading model", "step 1", "killed", "resume", "step 2", "load",
    ]  # fmt: skip
    assert (status["peak_bytes"], status["estimated_bytes"], status["notes"]) == (3000, 5000, ["A note."])
    assert status["phases"][4]["seconds"] == 1.0  # starting and loading model
    assert not runs(rehearsal.path)
    assert find_rehearsal(root, rehearsal.id).status() == status


@pytest.mark.parametrize(
    ("train", "load", "phase", "sentence"),
    [
        (FAILS, LOADS, "Prepare the longest examples", "bad data."),
        (CRASHES_ALWAYS, LOADS, "Resume from the checkpoint", "did not resume"),
        (CRASHES_ONCE, "raise SystemExit('x')", "Load the saved model and use it", "exited with code 1"),
    ],
)
def test_the_phase_and_the_cause_of_a_failure(root: Path, train: str, load: str, phase: str, sentence: str) -> None:
    rehearsal = make(root, train, load)
    Driver(rehearsal).run()
    failure = rehearsal.status()["failure"]
    assert rehearsal.status()["state"] == "failed"
    assert failure["phase"] == phase
    assert sentence in failure["sentence"], failure
    assert (rehearsal.path / "log.txt").exists() and not runs(rehearsal.path)


def test_a_planned_run_is_rehearsed_with_a_small_model(root: Path) -> None:
    rehearsal = make(root, CRASHES_ONCE, shrink=SHRINKS)
    Driver(rehearsal).run()
    status = rehearsal.status()
    assert [phase["phase"] for phase in status["phases"]][:2] == ["shrink", "starting"], status
    assert (status["state"], status["peak_bytes"]) == ("done", 3000), "the peak is that of the training"
    assert status["notes"] == ["It was small.", "A note."]
    assert not (rehearsal.path / SCRATCH).exists()
    failed = make(root, CRASHES_ONCE, shrink="raise SystemExit('backend.train.run_log.TrainError: no small model.')")
    Driver(failed).run()
    status = failed.status()
    assert (status["state"], status["failure"]["phase"]) == ("failed", "Build a small model")
    assert "no small model." in status["failure"]["sentence"] and not status["phases"]


def test_several_gpus_are_measured_first(root: Path) -> None:
    rehearsal = make(root, CRASHES_ONCE, devices=SHRINKS)
    Driver(rehearsal).run()
    status = rehearsal.status()
    assert status["phases"][0]["label"] == "Measure every device and link", status
    assert (status["state"], status["peak_bytes"], status["notes"][0]) == ("done", 3000, "It was small.")
    failed = make(root, CRASHES_ONCE, devices="raise SystemExit('backend.train.run_log.TrainError: Rank 5 hangs.')")
    Driver(failed).run()
    failure = failed.status()["failure"]
    assert failure["phase"] == "Measure every device and link" and "Rank 5 hangs." in failure["sentence"]


@pytest.mark.parametrize(("name", "gpus", "expected"), [("", 8, True), ("", 1, False), ("8x80gb", 8, False)])
def test_only_gpus_of_this_machine_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, gpus: int, expected: bool
) -> None:
    monkeypatch.setattr("backend.preflight.inspect_inputs", lambda spec, base: DEMO)
    machine = replace(presets.machines()["8x80gb"], name=name)
    spec = edit(RunSpec(), {"parallel.strategy": "ddp" if gpus > 1 else "single", "launch.nproc_per_node": gpus})
    report = report_on(Case(effective(spec), machine, DEMO))
    plans = run_plans(report, report, tmp_path)
    assert ("devices" in plans) is expected and {"train", "load"} <= plans.keys()
    if expected:
        assert "backend.train.device_test" in plans["devices"].argv and plans["devices"].env == report.plan.env


def test_stop_and_a_killed_process(root: Path) -> None:
    stopped = make(root, SLEEPS)
    stopped.start()
    wait_for_training(stopped)
    assert stopped.status()["now"] == "Load the model"
    stopped.stop()
    wait_for(lambda: stopped.status()["state"] == "stopped")
    wait_for(lambda: not processes.is_locked(stopped.path))

    killed = make(root, SLEEPS)
    killed.start()
    run = wait_for_training(killed)
    locker = next(int(p.name) for p in Path("/proc").glob("[0-9]*") if str(killed.path) in command(p))
    os.kill(locker, signal.SIGKILL)
    wait_for(lambda: killed.status()["state"] == "lost")
    assert run.state in ("running", "starting")  # the run has its own supervisor
    delete_old(root)
    assert not killed.path.exists()
    assert stopped.path.exists()
    assert not processes.run_processes(run.path)


def test_the_api_starts_shows_and_stops_a_rehearsal(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o755)
    values = {"model.builtin": "tiny-llama", "launch.launcher": "python", "launch.device": "cpu"}
    with client(tmp_path / "runs", detect_machine=lambda _: Machine(python=str(python))) as api:
        refused = api.post("/api/rehearsals", json={"values": {**values, "data.max_length": "x"}})
        assert (refused.status_code, refused.json()["field"]) == (422, "data.max_length")
        started = api.post("/api/rehearsals", json={"values": values})
        assert started.status_code == 201, started.text
        path = f"/api/rehearsals/{started.json()['id']}"
        assert api.get(path).json()["state"] == "running"
        assert api.get("/api/runs").json()["runs"] == []
        api.post(f"{path}/stop", json={})
        wait_for(lambda: api.get(path).json()["state"] == "stopped")
        assert api.get("/api/rehearsals/..%2Fx").status_code == 404
        assert api.get("/api/rehearsals/123").json() == {"error": "This rehearsal no longer exists."}


def command(process: Path) -> str:
    """The command line of a rehearsal's process."""
    try:
        text = (process / "cmdline").read_bytes().decode()
    except OSError:
        return ""
    return text if "backend.runs.rehearsals" in text else ""


def wait_for_training(rehearsal: Rehearsal) -> Run:
    run = rehearsal.runs()["train"]
    wait_for(lambda: run.progress().get("phase") == "loading model")
    return run
