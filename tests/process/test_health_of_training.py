"""Health of real trainings: a spike that stops the run, a rank that is slowed down, and what is measured meanwhile."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fork_server import ForkServer, write_run
from training_runs import log_text, losses, make_spec, read_metrics

from backend.__main__ import main
from backend.runs import CHECKPOINTS, MONITOR, RESULT, STOP, events, health, processes
from backend.runs.folder import ALIVE, runs
from backend.train.monitor import KEPT_DURATIONS, Monitor, StepTimes

SCRIPT = """
import os, signal, time
from backend.train import __main__ as main, callbacks, monitor
monitor.FIRST_SECONDS = monitor.MEASURE_SECONDS = {pause}
begin_step, begin = callbacks.ProgressCallback.on_step_begin, callbacks.ProgressCallback.on_train_begin
{more}
main.main()
"""
SPIKE = """
def damage(self, args, state, control, model=None, **more):
    if state.global_step == 30:
        for weight in model.parameters():
            weight.data.mul_(5)
    begin_step(self, args, state, control, model=model, **more)
callbacks.ProgressCallback.on_step_begin = damage
"""
SLOW = """
def slow_down(self, args, state, control, **more):
    parent = os.getpid()
    if os.environ["RANK"] == "1" and not os.fork():  # stops this rank most of the time
        try:
            while os.getppid() == parent:
                for number, seconds in ((signal.SIGSTOP, 0.03), (signal.SIGCONT, 0.01)):
                    os.kill(parent, number)
                    time.sleep(seconds)
        finally:
            os._exit(0)
    begin(self, args, state, control, **more)
callbacks.ProgressCallback.on_train_begin = slow_down
"""
LONG = {"train.duration": "steps", "logging.steps": 1, "eval.strategy": "no", "save.strategy": "steps"}
DDP = {**LONG, "parallel.strategy": "ddp", "launch.nproc_per_node": 2, "save.steps": 20}


def train(
    server: ForkServer, folder: Path, changes: dict[str, Any], more: str, pause: float = 0.1, ranks: int = 2
) -> None:
    folder.mkdir()
    write_run(folder / "run", make_spec(changes))
    (folder / "script.py").write_text(SCRIPT.format(more=more, pause=pause))
    assert server.run(folder / "run", ranks, script=str(folder / "script.py")) == 0, log_text(folder / "run")


def test_a_spike_is_reported_and_stops_the_run(fork_server: ForkServer, tmp_path: Path) -> None:
    train(fork_server, tmp_path / "spike", {**DDP, "train.max_steps": 60, "train.stop_on_spike": True}, SPIKE)
    run = tmp_path / "spike" / "run"
    assert re.search(r"[\d,]+ of [\d,]+ parameters are trainable.*: [\d.]+%\.", log_text(run))
    before, after = losses(run)[30], losses(run)[32]
    assert after > 1.5 * before, "the damage shows"
    found = events.read(run)
    (spike,) = (event for event in found if event["kind"] == health.LOSS)
    assert spike["step"] == 32 and f"rose to {after:.4g}" in spike["text"]
    assert (run / STOP).read_text().splitlines() == ["save", spike["text"]]
    assert max(losses(run)) == 33 and not (run / RESULT).exists()
    assert [event["step"] for event in found if event["kind"] == events.SAVED] == [20, 33]
    assert (run / CHECKPOINTS / "checkpoint-33" / "complete").exists()
    measured = json.loads((run / MONITOR).read_text())
    assert len(measured["ranks"]) == 2 and 0 < measured["step_seconds"]["p50"] <= measured["step_seconds"]["p95"]
    for rank in measured["ranks"]:
        assert rank["device"] == "cpu" and rank["probe"] > 0 and 0 <= rank["data"] <= 1 and rank["cores"] > 0
        assert 1e8 < rank["memory"] < 1.1 * rank["peak"] < 1e11, "the kernel counts pages of threads in batches"
    assert any("data_wait" in point and "memory_gb" in point for point in read_metrics(run))


def test_a_short_run_whose_loss_explodes_ends_with_an_alert(fork_server: ForkServer, tmp_path: Path) -> None:
    """Its few points are no spike, and it does not fail."""
    changes = {**LONG, "train.max_steps": 4, "train.stop_on_spike": True}
    more = SPIKE.replace("== 30", "== 1") + "monitor.health.ABOVE_LEAST = (1.1, 0.0)"
    train(fork_server, tmp_path / "rise", changes, more, ranks=1)
    run = tmp_path / "rise" / "run"
    (alert,) = events.alerts(run)
    assert (alert["kind"], alert["step"]) == (health.RISE, 4), losses(run)
    assert re.fullmatch(r"The loss rose from [\d.]+ to [\d,.]+\. Lower the learning rate\.", alert["text"])
    assert f"Warning at step 4: {alert['text']}" in log_text(run)
    assert (run / RESULT).exists() and not (run / STOP).exists()


def test_the_step_times_are_those_of_the_whole_run(tmp_path: Path) -> None:
    """Not only of the steps since the last measurement, and including those after it."""
    train, data = SimpleNamespace(stop_on_spike=False, dataloader_num_workers=0), SimpleNamespace(streaming=False)
    spec = SimpleNamespace(train=train, data=data)
    run = SimpleNamespace(device="cpu", compute_dtype="fp32")
    group = SimpleNamespace(rank=0, gather_on_step=lambda found: [found])
    log = SimpleNamespace(info=lambda text: None, event=lambda *found: None)
    watched = Monitor(SimpleNamespace(group=group, run_log=log, folder=tmp_path, run=run, spec=spec))  # type: ignore[arg-type]
    watched.begin(torch.device("cpu"))
    found = []
    for times in ([0.3] * 30, [1.0] * 5, [0.2] * 40):
        for seconds in times:
            watched.end_step(seconds)
        if times[0] != 0.2:
            watched.measure(1)
        else:
            watched.end(75)
        found.append(json.loads((tmp_path / MONITOR).read_text())["step_seconds"])
    assert found == [{"p50": 0.3, "p95": 0.3}, {"p50": 0.3, "p95": 1.0}, {"p50": 0.2, "p95": 1.0}]


def test_step_times_of_a_long_run_need_bounded_memory() -> None:
    times = StepTimes()
    for step in range(20 * KEPT_DURATIONS):
        times.add(step)
    assert len(times._kept) == KEPT_DURATIONS
    found = times.percentiles()
    assert found["p50"] == pytest.approx(10 * KEPT_DURATIONS, rel=0.1)
    assert found["p95"] == pytest.approx(19 * KEPT_DURATIONS, rel=0.1)


@pytest.mark.soak
def test_a_diverged_run_is_continued_with_half_the_learning_rate(tmp_path: Path) -> None:
    """The learning rate rises until the loss is NaN, in the first run and in the one that continues it."""
    words = [
        f"--set={name}={value}"
        for name, value in {
            **LONG, "model.builtin": "tiny-llama", "method.kind": "full", "train.max_steps": 100, "save.steps": 1,
            "train.learning_rate": 10, "train.warmup_steps": 100, "train.half_lr_retries": 1,
            "eval.num_generations": 0, "train.max_grad_norm": 0, "train.optim": "sgd_momentum", "data.max_length": 64,
        }.items()
    ]  # fmt: skip
    assert main(["run", "first-run", "--runs", str(tmp_path), "--follow", *words]) == 1
    deadline = time.monotonic() + 180
    while len(found := sorted(runs(tmp_path), key=lambda run: run.id)) < 2 or found[1].state in (*ALIVE, "new"):
        assert time.monotonic() < deadline, log_text(found[0].path)
        time.sleep(0.2)
    first, second = found
    assert f"{second.id}\n" in log_text(first.path)
    start = first.checkpoints()[-1]
    assert (first.state, second.state) == ("failed", "failed") and min(losses(second.path)) == start + 1
    rates = [{p["step"]: p["learning_rate"] for p in read_metrics(run.path) if "loss" in p} for run in found]
    assert rates[1][start + 1] == pytest.approx(rates[0][start + 1] / 2)
    while processes.run_processes(second.path):
        time.sleep(0.1)
    assert len(runs(tmp_path)) == 2, "no retry is left"


@pytest.mark.soak
def test_a_slow_rank_is_named(fork_server: ForkServer, tmp_path: Path) -> None:
    train(fork_server, tmp_path / "slow", {**DDP, "train.max_steps": 150}, SLOW, pause=0.5)
    found = events.alerts(tmp_path / "slow" / "run")
    slow = [event["text"] for event in found if event["kind"] == health.SLOW_RANK]
    assert slow and all(text.startswith("Rank 1 (cpu on ") for text in slow), found
