"""Optimizer steps that are skipped because a gradient overflowed: counted, shown, and an error if there was no other.

On a CPU, accelerate refuses fp16, so the tests give its accelerator torch's GradScaler; DeepSpeed checks fp32 gradients
too.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fork_server import ForkServer, write_run
from parameters import soak_except
from safetensors.torch import load_file
from training_runs import log_text, make_spec, read_metrics, result

from backend.config.options import edit
from backend.runs import RESULT, events, health
from backend.train.skipped_steps import SkippedSteps

# What makes the gradients of the given steps infinite: before the optimizer step, or while DeepSpeed takes them over.
SCALER = """
import torch
from accelerate import Accelerator
from backend.train import __main__ as main, callbacks
begin = Accelerator.__init__
def with_scaler(self, *args, **more):
    begin(self, *args, **more)
    self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
def spoil(self, args, state, control, model=None, **more):
    for weight in model.parameters() if state.global_step in {steps} else ():
        if weight.grad is not None:
            weight.grad.mul_(float("inf"))
Accelerator.__init__ = with_scaler
callbacks.ProgressCallback.on_pre_optimizer_step = spoil
main.main()
"""
DEEPSPEED = """
from backend.train import __main__ as main, callbacks
begin = callbacks.ProgressCallback.on_step_begin
def spoil(self, args, state, control, model=None, **more):
    if not hasattr(self, "hooked"):
        self.hooked = True
        for weight in (each for each in model.parameters() if each.requires_grad):
            weight.register_hook(lambda gradient: gradient * float("inf") if state.global_step in {steps} else gradient)
    begin(self, args, state, control, model=model, **more)
callbacks.ProgressCallback.on_step_begin = spoil
main.main()
"""
SCRIPTS = {"single": SCALER, "ddp": SCALER, "fsdp2": SCALER, "zero2": DEEPSPEED, "zero3": DEEPSPEED}


def train(
    server: ForkServer, root: Path, strategy: str, infinite: Collection[int], changes: Mapping[str, Any] = {}
) -> tuple[Path, int]:
    """The folder and the exit code of a run of three steps, with infinite gradients after those numbers of steps."""
    spec = make_spec({"parallel.strategy": strategy, "launch.nproc_per_node": 2, "save.final_model": True})
    spec = edit(spec, changes)
    write_run(root / "run", spec)
    (root / "script.py").write_text(SCRIPTS[strategy].format(steps=tuple(infinite)))
    ranks = 0 if strategy == "single" else 2
    return root / "run", server.run(root / "run", ranks, script=str(root / "script.py"))


@pytest.mark.parametrize("strategy", soak_except(SCRIPTS, ("single",)))
def test_a_run_that_skipped_every_step_fails(strategy: str, fork_server: ForkServer, tmp_path: Path) -> None:
    run, code = train(fork_server, tmp_path, strategy, range(3))
    last = log_text(run).strip().splitlines()[-1]
    assert code == 1 and "all 3 optimizer steps were skipped" in last, log_text(run)
    assert not (run / RESULT).exists() and not (run / "model").exists()
    assert [point["skipped_steps"] for point in read_metrics(run)] == [1, 2, 3]


@pytest.mark.parametrize("strategy", soak_except(SCRIPTS, ("zero2",)))
def test_skipped_steps_are_counted(strategy: str, fork_server: ForkServer, tmp_path: Path) -> None:
    run, code = train(fork_server, tmp_path, strategy, [0])
    assert code == 0, log_text(run)
    skipped = [point.get("skipped_steps") for point in read_metrics(run)]
    assert skipped == [1, 1, 1] and result(run)["skipped_steps"] == 1
    assert "1 step skipped" in log_text(run)


def test_the_count_of_a_checkpoint_is_kept() -> None:
    before, after = (SkippedSteps(SimpleNamespace()) for _ in range(2))  # type: ignore[arg-type]
    before.count = 2
    after.on_train_begin(None, SimpleNamespace(stateful_callbacks={"SkippedSteps": before.state()}), None)
    assert after.count == 2


@pytest.mark.soak
def test_a_resumed_run_counts_on(fork_server: ForkServer, tmp_path: Path) -> None:
    """The count of a checkpoint is kept, and only a run that never stepped fails."""
    changes = {"save.strategy": "steps", "save.steps": 1}
    run, code = train(fork_server, tmp_path, "zero2", [0, 2], changes)
    assert code == 0 and result(run)["skipped_steps"] == 2, log_text(run)
    fork_server.resume(run, 2, 2)
    assert result(run)["skipped_steps"] == 1
    assert load_file(run / "model/adapter_model.safetensors")


def test_many_skipped_steps_are_an_alert(fork_server: ForkServer, tmp_path: Path) -> None:
    run, code = train(fork_server, tmp_path, "zero2", range(12), {"train.max_steps": 13})
    assert code == 0, log_text(run)
    (alert,) = events.alerts(run)
    assert alert["kind"] == health.SKIPPED and alert["step"] == health.MANY_SKIPPED
    assert json.loads((run / RESULT).read_text())["skipped_steps"] == 12
