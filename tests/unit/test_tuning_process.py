"""Candidates of real specs, and the process of a tuning with a program in place of the trainer."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small import client

from backend import presets
from backend.cli import tune as command
from backend.config import RunSpec
from backend.config.options import edit, effective
from backend.machine import Machine
from backend.preflight import Report, preflight, report_on
from backend.rules import RULES, Case, examine
from backend.rules.examples import DEMO, H100, INSTALLED, LAPTOP, MOE
from backend.runs import STOP, processes
from backend.runs.folder import RunError, runs
from backend.runs.scratch import OUTCOME
from backend.tasks.tuning import candidates, runner
from backend.tasks.tuning.runner import Runner, tolerance
from backend.tasks.tuning.search import Row
from backend.tasks.tuning.trial import STEPS
from backend.tasks.tuning.tuning import FOLDER, Tuning, earlier, key, trial_spec, tune

TRAINER = """
import json, os, pathlib, time, yaml
spec = yaml.safe_load(open("spec.yaml")) or {}
train, attention = spec.get("train", {}), spec.get("model", {}).get("attn_implementation")
if train.get("activation_checkpointing"):
    raise SystemExit("backend.train.run_log.TrainError: no memory.")
if attention == "eager" and os.path.exists("../stops"):
    pathlib.Path("../stop").touch()
    time.sleep(60)
now, tokens, seconds = 1000.0, 0, 0.5 if attention == "eager" else 1.0
with open("metrics.jsonl", "w") as file:
    for step in range(1, train["max_steps"] + 1):
        now, tokens = now + seconds, tokens + 100
        loss = 5 - step / 100 + ("fused" in train.get("optim", ""))
        point = {"step": step, "time": now, "loss": loss, "tokens": tokens, "tokens_per_second": 100 / seconds}
        file.write(json.dumps(point) + "\\n")
pathlib.Path("result.json").write_text(json.dumps({"peak_bytes": [2**30, 2**31]}))
"""
VALUES = {"model.builtin": "tiny-llama", "launch.launcher": "python", "launch.device": "cpu"}
LIGER = replace(H100, versions={**INSTALLED, "liger-kernel": "0.8.5"})


def case_of(patch: dict[str, Any], machine: Machine = LIGER) -> Case:
    return Case(effective(edit(RunSpec(), patch)), machine, DEMO)


def proposed(case: Case, changes_result: bool = False) -> dict[str, list[str]]:
    found = candidates.axes(case, changes_result)
    return {axis.name: [fix.label for fix in candidates.propose(axis, case)] for axis in found}


def test_candidates_on_a_gpu_come_in_the_order_of_their_predicted_time() -> None:
    case = case_of({"train.gradient_accumulation_steps": 4, "data.max_length": 2048})
    found = proposed(case)
    assert list(found)[:2] == ["batch", "Liger"] and list(found)[-1] == "torch.compile"
    assert found["batch"] == ["Batch size 16", "Batch size 8", "Batch size 2"]
    assert found["attention"][-1] == "Eager attention" and "threads" in found and not found["threads"]
    assert found["activation checkpointing"] == ["Activation checkpointing"]
    assert not {"precision", "packing", "strategy"} & set(found)
    more = proposed(case, changes_result=True)
    assert (more["strategy"], more["precision"], more["packing"]) == ([], ["fp8 precision"], ["Packing"])
    assert list(more)[:2] == list(found)[:2], "what does not change the result comes first"


def test_strategies_on_several_gpus_and_precisions_of_a_cpu() -> None:
    eight = replace(presets.machines()["8x80gb"], name="")
    found = proposed(case_of({"parallel.strategy": "fsdp2", "launch.nproc_per_node": 8}, eight), changes_result=True)
    assert found["strategy"][0] == "DDP" and "FSDP2" not in found["strategy"]
    assert not any("offload" in label for label in found["strategy"])
    assert found["reshard"] == ["No reshard after forward"]
    found = proposed(case_of({"parallel.strategy": "ddp", "launch.nproc_per_node": 8}, eight))
    assert [fix[:7] for fix in found["buckets"]] == ["Buckets"] and found["reshard"] == []
    found = proposed(case_of({}, LAPTOP), changes_result=True)
    assert "bf16 precision" in found["precision"] and found["threads"] == ["4 CPU threads per process"]


@pytest.mark.parametrize(
    ("patch", "safe"),
    [
        ({}, True),
        ({"train.stage": "pretraining", "method.kind": "full"}, True),
        ({"lora.dropout": 0.1}, False),
        ({"lora.dropout": 0.1, "method.kind": "full"}, True),
        ({"train.neftune_noise_alpha": 5.0}, False),
        ({"train.stage": "dpo", "data.builtin": "train-pairs"}, False),
    ],
)
def test_batches_are_split_only_where_the_gradients_stay_the_same(patch: dict[str, Any], safe: bool) -> None:
    case = case_of({**patch, "train.gradient_accumulation_steps": 2})
    assert candidates.splits_exactly(case) is safe
    assert ("batch" in proposed(case)) is safe
    assert "batch" in proposed(case, changes_result=True)
    assert not candidates.splits_exactly(replace(case, facts=replace(DEMO, shape=MOE)))


def test_no_checkpointing_is_also_tried_with_smaller_batches() -> None:
    found = proposed(case_of({"train.activation_checkpointing": True}))["activation checkpointing"]
    off = "No activation checkpointing"
    assert set(found) == {off, f"{off}, batch size 2", f"{off}, batch size 1"}


def test_losses_have_the_tolerance_of_their_precision() -> None:
    assert tolerance(case_of({}, LAPTOP)) == 1e-4
    assert tolerance(case_of({})) == tolerance(case_of({"precision.compute": "tf32"})) == 0.02
    assert tolerance(case_of({"train.optim": "adamw_bnb_8bit"})) == tolerance(case_of({"method.quantization": "nf4"}))
    assert tolerance(case_of({"method.quantization": "nf4"})) == 0.05


def test_the_spec_of_a_trial_passes_the_checks_that_the_spec_passes() -> None:
    """The presets, and the passing examples of every third rule."""
    cases = [(preset.spec, preset.machine, DEMO) for preset in presets.presets()]
    passing = (rule.passes_on for rule in RULES[::3])
    cases += [(edit(RunSpec(), each.patch), each.machine or LAPTOP, each.facts or DEMO) for each in passing]
    strategies = set()
    for spec, machine, facts in cases:
        report = report_on(Case(effective(spec), machine, facts))
        if report.can_run and report.spec.launch.place == "local" and report.run.nnodes == 1:
            trial = trial_spec(report)
            found = [f for f in examine(Case(trial, machine, facts)) if f.level == "error"]
            assert not found, (spec, [(f.code, f.message) for f in found])
            assert (trial.train.max_steps, trial.eval.strategy, trial.save.strategy) == (STEPS, "no", "no")
            strategies.add(spec.parallel.strategy)
    assert {"single", "ddp", "zero3", "fsdp2"} <= strategies


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    """The report of a spec whose trainer is TRAINER, on a machine with three axes of candidates."""
    (tmp_path / "trainer.py").write_text(TRAINER)
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *warm_server*) exit;; esac\nexec {sys.executable} {tmp_path}/trainer.py\n'
    )
    python.chmod(0o755)
    machine = Machine(python=str(python), cores=2)
    monkeypatch.setattr(runner, "probe", lambda _: machine)
    kept = ("attention", "optimizer", "activation checkpointing")
    monkeypatch.setattr(candidates, "AXES", {name: candidates.AXES[name] for name in kept})
    monkeypatch.setattr(Tuning, "start", lambda self: None)
    monkeypatch.chdir(tmp_path)
    return preflight(edit(RunSpec(), VALUES), machine, tmp_path)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "runs"
    for path in (tmp_path / "runs" / FOLDER).glob("*"):
        assert not runs(path) and not processes.run_processes(path)


def start(root: Path, report: Report, **more: Any) -> Tuning:
    _, tuning = tune(root, report, Path.cwd(), report.machine, **more)
    assert tuning
    return tuning


def test_a_tuning_measures_refuses_and_keeps_its_result(
    root: Path, report: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    assert earlier(root, report, False) is None
    tuning = start(root, report)
    Runner(tuning).run()
    status = tuning.status()
    rows = {row["label"]: row for row in status["rows"]}
    assert status["state"] == "done" and next(iter(rows)) == "Current settings", status
    assert rows["FlexAttention"]["reason"] == "Not tried: This attention implementation needs a GPU."
    best = rows["Eager attention"]
    assert (best["state"], best["patch"], best["peak_bytes"]) == (
        "faster",
        {"model.attn_implementation": "eager"},
        2**31,
    )
    assert best["gain"] == pytest.approx(2) and best["tokens_per_second"] == pytest.approx(200)
    assert status["rows"][status["fastest"]] == best
    refused, failed = rows["Eager attention + AdamW, fused"], rows["Eager attention + Activation checkpointing"]
    assert (refused["state"], failed["state"]) == ("refused", "failed")
    assert refused["reason"].startswith("The loss differs: 5.99 instead of 4.99") and "no memory." in failed["reason"]
    found = earlier(root, report, False)
    assert found and found.id == tuning.id and earlier(root, report, True) is None
    for change in ({"train.per_device_train_batch_size": 8}, {"train.num_train_epochs": 9.0}):
        other = preflight(edit(report.spec, change), report.machine, Path.cwd())
        assert key(other, False) != status["key"]
    saved = preflight(edit(report.spec, {"save.total_limit": 7}), report.machine, Path.cwd())
    assert key(saved, False) == status["key"], "a trial saves nothing"
    longer = replace(report.facts, token_lengths=(9000,) * 10)
    assert key(replace(report, facts=longer), False) != status["key"], "other examples in the same file"
    quiet = preflight(edit(report.spec, {"logging.level": "warning"}), report.machine, Path.cwd())
    assert key(quiet, False) == status["key"], "the level of the log does not matter"
    assert key(replace(report, machine=replace(report.machine, cores=3)), False) != status["key"]
    print("\n".join(command._lines(status, report.spec)))
    assert capsys.readouterr().out.splitlines()[-1] == "--set model.attn_implementation=eager"


def test_a_result_that_reached_its_time_limit_is_not_shown_for_more_minutes(root: Path, report: Report) -> None:
    tuning = start(root, report, minutes=1.0)
    (tuning.path / OUTCOME).write_text(json.dumps({"state": "done", "late": True}))
    assert earlier(root, report, False, 1.0) and earlier(root, report, False, 30.0) is None
    (tuning.path / OUTCOME).write_text(json.dumps({"state": "done", "late": False}))
    assert earlier(root, report, False, 30.0)


def test_the_same_settings_are_not_measured_twice_at_a_time(root: Path, report: Report) -> None:
    tuning = start(root, report)
    lock = processes.acquire_lock(tuning.path)
    found = earlier(root, report, False)
    assert lock is not None and found and found.id == tuning.id, "so that it can be stopped"
    with pytest.raises(RunError, match="being measured already"):
        start(root, report)
    os.close(lock)


def test_a_stop_during_the_check_ends_it(root: Path, report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(*arguments: Any) -> Report:
        tuning.stop()
        arguments[-1]("Checked 100 examples")
        raise AssertionError("the check goes on")

    tuning = start(root, report)
    monkeypatch.setattr(runner, "preflight", check)
    Runner(tuning).run()
    assert tuning.status()["state"] == "stopped" and tuning.status()["rows"] == []


def test_adopting_a_row_gives_what_was_measured(root: Path, report: Report) -> None:
    """Whatever hidden values the form has, and also after another row was adopted."""
    gpus = replace(presets.machines()["2x24gb"], name="")
    form = edit(RunSpec(), {"launch.nproc_per_node": 8, "launch.rendezvous": "static"})
    tuning = start(root, report)
    found = Runner(tuning)
    found.case = Case(effective(form), gpus, DEMO)
    fixes = candidates._strategy(found.case)
    ddp = found.changes(next(fix.patch for fix in fixes if fix.patch["parallel.strategy"] == "ddp"))
    assert (ddp["launch.nproc_per_node"], ddp["launch.rendezvous"]) == (2, "standalone")
    base, eager, both = tuning.settings([{}, {"model.attn_implementation": "eager"}, {"train.optim": "adamw_torch"}])
    assert base["model.attn_implementation"] == both["model.attn_implementation"] == "auto"
    assert eager["train.optim"] == base["train.optim"]
    (whole,) = tuning.settings([{"parallel.strategy": "ddp", "launch.launcher": "torchrun"}])
    assert whole["launch.rendezvous"] == "standalone", "the form may have another value"


def test_packing_is_tried_with_enough_examples(report: Report) -> None:
    least, more = trial_spec(report), trial_spec(report, changes_result=True)
    assert more.data.max_samples == 16 * (least.data.max_samples or 0) > 0


def test_a_stop_in_a_trial_leaves_no_process(root: Path, report: Report) -> None:
    tuning = start(root, report)
    (tuning.path / "stops").touch()
    Runner(tuning).run()
    status = tuning.status()
    assert status["state"] == "stopped" and (tuning.path / STOP).exists()
    assert [row["state"] for row in status["rows"]][-1] == "stopped"
    assert earlier(root, report, False) is None


def test_a_spec_whose_settings_fail_says_why(root: Path, report: Report) -> None:
    fails = preflight(edit(report.spec, {"train.activation_checkpointing": True}), report.machine, Path.cwd())
    tuning = start(root, fails)
    Runner(tuning).run()
    assert tuning.status()["state"] == "failed" and "no memory." in tuning.status()["failure"]


def test_no_time_and_a_killed_process(root: Path, report: Report) -> None:
    tuning = start(root, report, minutes=1e-9)
    assert tuning.status()["state"] == "lost", "nobody holds its lock"
    Runner(tuning).run()
    assert "Allow more minutes" in tuning.status()["failure"]


def test_neither_the_wait_in_the_queue_nor_the_build_of_kernels_takes_allowed_time() -> None:
    assert not runner.counts("queued", {}) and not runner.counts("running", {"phase": "building kernels"})
    assert runner.counts("starting", {}) and runner.counts("running", {"phase": "training"})


def test_the_api_starts_shows_and_stops(report: Report, tmp_path: Path) -> None:
    with client(tmp_path / "runs", detect_machine=lambda _: report.machine) as api:
        refused = api.post("/api/tunings", json={"values": {**VALUES, "data.max_length": "x"}})
        assert (refused.status_code, refused.json()["field"]) == (422, "data.max_length")
        cluster = api.post("/api/tunings", json={"values": VALUES, "machine": "8x80gb"})
        assert cluster.status_code == 409 and "Select This machine." in cluster.json()["error"]
        assert api.post("/api/tunings", json={"values": VALUES, "minutes": 0.0}).status_code == 400
        assert api.post("/api/tunings/earlier", json={"values": VALUES}).json() == {"id": ""}
        id = api.post("/api/tunings", json={"values": VALUES, "minutes": 2.0}).json()["id"]
        tuning = Tuning(tmp_path / "runs" / FOLDER / id)
        assert tuning.request()["minutes"] == 2.0
        row = Row("Threads", {"launch.devices": (0, 1)}, True, "faster").as_json()
        (tuning.path / OUTCOME).write_text(json.dumps({"state": "done", "rows": [row], "fastest": 0}))
        status = api.get(f"/api/tunings/{id}").json()
        assert (status["state"], status["rows"][0]["patch"]["launch.devices"]) == ("done", "0, 1")
        assert api.post("/api/tunings/earlier", json={"values": VALUES}).json() == {"id": id}
        assert api.get("/api/runs").json()["runs"] == []
        api.post(f"/api/tunings/{id}/stop", json={})
        assert (tuning.path / STOP).exists()
        assert api.get("/api/tunings/123").json() == {"error": "This measurement no longer exists."}


@pytest.mark.parametrize(
    ("patch", "machine", "sentence"),
    [
        ({"launch.place": "slurm"}, {}, "Set launch.place to local."),
        ({"launch.trainer": "llamafactory"}, {}, "Set launch.trainer to footplate."),
        ({"parallel.strategy": "ddp", "launch.rendezvous": "static"}, {}, "Set launch.rendezvous to standalone."),
        ({}, {"name": "8x80gb"}, "Select This machine."),
    ],
)
def test_what_cannot_be_measured_names_the_option(
    tmp_path: Path, patch: dict[str, Any], machine: dict[str, Any], sentence: str
) -> None:
    report = report_on(case_of(patch, replace(LAPTOP, **{"name": "", **machine})))
    with pytest.raises(RunError, match=sentence):
        tune(tmp_path, report, tmp_path, LAPTOP)
    with pytest.raises(RunError, match="minutes must be above 0"):
        tune(tmp_path, report, tmp_path, LAPTOP, minutes=0)
    assert os.listdir(tmp_path) == []


def test_the_runs_folder_belongs_to_its_user_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        Tuning.create(tmp_path / "runs", {})
    finally:
        os.umask(before)
    assert (tmp_path / "runs").stat().st_mode & 0o777 == 0o700
