"""Exported specs in LLaMA-Factory itself: its parser accepts them or refuses what the export says, and the losses are
those of Footplate. Runs that LLaMA-Factory trains start, stop, resume and fail like others."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_runs import ClusterRun
from llamafactory_env import llamafactory_environment
from random_specs import random_spec, write_inputs
from training_runs import last_step, losses, make_run_folder, make_spec, read_metrics, train_in_one_process

from backend.launch.llamafactory import export
from backend.machine import Machine, probe
from backend.paths import ASSETS
from backend.preflight import preflight
from backend.resolve import resolve
from backend.runs import RUN_MARKER

pytestmark = pytest.mark.soak
EXAMPLES = 16
SPECS = 300
# What depends on this machine: hardware, packages that are not installed, and that the parser runs in one process.
NOT_HERE = (
    "This device does not support",
    "--tf32 requires",
    "distribution was not found",
    "FORCE_TORCHRUN",
    "use_cpu",
)
WITH_LLAMAFACTORY = {
    "launch.trainer": "llamafactory", "parallel.strategy": "ddp", "launch.nproc_per_node": 2, "train.max_steps": 4,
    "launch.omp_num_threads": 1, "eval.num_generations": 0,
}  # fmt: skip
PARSE = """
import json, sys
from llamafactory.hparams import get_train_args
for line in open(sys.argv[1]):
    try:
        get_train_args(json.loads(line))
        print("RESULT ok")
    except Exception as error:
        print("RESULT", " ".join(str(error).split())[:300])
"""


@pytest.fixture(scope="module")
def environment() -> Path:
    return llamafactory_environment()


def test_the_parser_accepts_what_the_export_does_not_refuse(environment, root, tiny, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(root)
    write_inputs(root, tiny)
    rng, machine = random.Random(3), probe(root)
    reports = [preflight(random_spec(rng), machine, root) for _ in range(SPECS)]
    found = [export(report.spec, report.run, report.facts.format) for report in reports if report.can_run]
    assert len(found) > 30
    (root / "deepspeed.json").write_text('{"zero_optimization": {"stage": 2}}')
    tables = [json.dumps({**made.table, "output_dir": f"out-{n}"}) for n, made in enumerate(found)]
    (root / "tables.jsonl").write_text("\n".join(tables) + "\n")
    command = [str(environment / "bin/python"), "-c", PARSE, "tables.jsonl"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=600, check=True)
    answers = [line[7:] for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(answers) == len(found)
    wrong = [
        (answer, made.refused)
        for answer, made in zip(answers, found, strict=True)
        if not any(word in answer for word in NOT_HERE) and (answer == "ok") == bool(made.refused)
    ]
    assert not wrong
    assert answers.count("ok") > 10


@pytest.mark.parametrize("loss_on", ["completions", "all_tokens"])
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("processes", [1, 2])
def test_the_losses_are_those_of_footplate(environment, root, cache, method, processes, loss_on) -> None:  # type: ignore[no-untyped-def]
    """Each step trains on all examples, since both tools draw different orders from the same seed."""
    name = f"{method}-{processes}-{loss_on}"
    data = root / "few.jsonl"
    data.write_text("".join((ASSETS / "trains/train.jsonl").read_text().splitlines(True)[:EXAMPLES]))
    changes = {
        "data.source": "files", "data.files": (str(data),), "data.validation": "none", "data.max_samples": 0,
        "data.loss_on": loss_on, "method.kind": method, "train.max_steps": 6, "train.per_device_train_batch_size": 16,
    }  # fmt: skip
    own = make_run_folder(root, f"own-{name}", changes)
    train_in_one_process(cache, own)
    more = {"parallel.strategy": "ddp", "launch.nproc_per_node": 2, "train.per_device_train_batch_size": 8}
    spec = make_spec({**changes, **(more if processes == 2 else {})})
    made = export(spec, resolve(spec, Machine()), "messages")
    assert made.missing == ["save.final_model: LLaMA-Factory always saves the model"]
    folder = root / f"theirs-{name}"
    folder.mkdir()
    for file, text in made.files.items():
        (folder / file).write_text(text)
    env = {**os.environ, "PATH": f"{environment}/bin:{os.environ['PATH']}", "FOOTPLATE_CACHE": str(cache)}
    env |= {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-c", made.command], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in (folder / "output/trainer_log.jsonl").read_text().splitlines()]
    theirs = [line["loss"] for line in lines if "loss" in line]
    ours = list(losses(own).values())
    assert len(theirs) == len(ours) == 6
    if loss_on == "all_tokens":
        # transformers 5.6 divides by the number of all tokens, although nothing predicts the first one of an example.
        tokens = json.loads((own / "result.json").read_text())["tokens"] / 6
        theirs = [loss * tokens / (tokens - EXAMPLES) for loss in theirs]
    assert theirs == pytest.approx(ours, abs=3e-4)
    assert yaml.safe_load(made.files["train.yaml"])["seed"] == spec.train.seed


@pytest.fixture
def start(environment, root, cache) -> Iterator[Callable[..., ClusterRun]]:  # type: ignore[no-untyped-def]
    runs: list[ClusterRun] = []

    def start_run(changes: Mapping[str, Any]) -> ClusterRun:
        spec = make_spec({**WITH_LLAMAFACTORY, "llamafactory.environment": str(environment), **changes})
        report = preflight(spec, probe(root), root)
        assert report.can_run, report.findings
        runs.append(ClusterRun(root, report.plan, RUN_MARKER))
        return runs[-1]

    yield start_run
    for run in runs:
        run.end()


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_a_run_stops_with_a_checkpoint_and_resumes(start, strategy) -> None:  # type: ignore[no-untyped-def]
    """The losses after the resume are those of a run that was not stopped."""
    whole = start({"parallel.strategy": strategy, "train.max_steps": 30})
    assert whole.wait("done", "failed") == "done", whole.text
    started = start({"parallel.strategy": strategy, "train.max_steps": 30})
    run = started.run
    started.wait_for_step(3)
    assert len([words for words in started.processes().values() if "llamafactory-run.py" in words]) >= 3
    run.stop()
    assert started.wait("stopped", "done", "failed") == "stopped", started.text
    saved = run.checkpoints()
    assert len(saved) == 1 and saved[0] == last_step(run.path) < 30
    assert not started.processes() and not (run.path / "model").exists()
    run.resume()
    assert started.wait("done", "failed") == "done", started.text
    assert [p["step"] for p in read_metrics(run.path) if p.get("event") == "resumed"] == saved
    assert list(losses(run.path).values()) == pytest.approx(list(losses(whole.run.path).values()), abs=1e-3)
    assert (run.path / "model/adapter_model.safetensors").exists()
    assert run.result()["steps"] == 30


def test_a_run_is_stopped_without_a_checkpoint(start) -> None:  # type: ignore[no-untyped-def]
    started = start({"train.max_steps": 10_000})
    started.wait_for_step(2)
    started.run.stop(save=False)
    assert started.wait("stopped", "done", "failed") == "stopped", started.text
    assert not started.run.checkpoints() and not started.processes()


def test_a_failed_rank_has_its_traceback(start) -> None:  # type: ignore[no-untyped-def]
    started = start({"llamafactory.template": "no_such_template"})
    assert started.wait("failed", "done") == "failed"
    assert "no_such_template" in started.run.summary()["sentence"]


def test_extra_arguments_override(start) -> None:  # type: ignore[no-untyped-def]
    started = start({"llamafactory.extra_args": '{"lora_rank": 4, "max_steps": 2}', "train.max_steps": 10})
    assert started.wait("failed", "done") == "done", started.text
    assert json.loads((started.run.path / "model/adapter_config.json").read_text())["r"] == 4
    assert last_step(started.run.path) == 2
