"""Runs that are interrupted, damaged, hung or diverged: what they train, what they keep, and how they end."""

from __future__ import annotations

from pathlib import Path

from fork_server import ForkServer
from training_runs import losses, make_spec, result

SHORT = {"train.max_steps": 3, "save.strategy": "steps", "save.steps": 2, "save.total_limit": 0}


def test_resuming_at_the_last_step_trains_no_step(fork_server: ForkServer, root: Path) -> None:
    """Only the result is missing, as if the run had been killed while it generated after training."""
    changes = {**SHORT, "method.kind": "full", "train.lr_scheduler_type": "constant", "save.final_model": True}
    changes |= {"eval.strategy": "steps", "eval.steps": 2, "eval.num_generations": 1, "eval.max_new_tokens": 2}
    folder = fork_server.train(root / "last", make_spec(changes))
    weights, before = folder / "model/model.safetensors", result(folder)
    saved = weights.read_bytes()
    (folder / "result.json").unlink()
    weights.unlink()
    fork_server.resume(folder, 3)
    assert weights.read_bytes() == saved
    assert sorted(losses(folder)) == [1, 2, 3]
    after = result(folder)
    assert after["steps"] == 3
    assert after["eval_loss"] == before["eval_loss"]
    assert after["samples"] == before["samples"]
