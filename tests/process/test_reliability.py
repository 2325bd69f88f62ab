"""Runs that are interrupted, damaged, hung or diverged: what they train, what they keep, and how they end."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from fork_server import ForkServer
from training_runs import log_text, losses, make_spec, result, same_losses

from backend.train import checkpoints

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


def overwrite(offset: int) -> Callable[[Path], object]:
    """Set a byte of a file to zero; a negative offset counts from its end."""

    def change(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
            file.write(b"\0")

    return change


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("weights", lambda path: os.truncate(path, 2**21 - 1), "has 2,097,151 bytes, but 2,097,152 were saved"),
        ("weights", overwrite(0), "content of its file weights is not"),
        ("weights", overwrite(-1), "content of its file weights is not"),
        ("state/rank_0", overwrite(500), "content of its file state/rank_0 is not"),
        ("state/rank_0", Path.unlink, "file state/rank_0 is missing"),
        ("complete", overwrite(0), "file complete cannot be read"),
    ],
)
def test_damaged_files_of_a_checkpoint_are_found(
    tmp_path: Path, name: str, change: Callable[[Path], object], problem: str
) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "weights").write_bytes(b"w" * 2**21)
    (tmp_path / "state/rank_0").write_bytes(b"s" * 1000)
    checkpoints.mark_complete(tmp_path)
    assert not checkpoints.damage(tmp_path)
    change(tmp_path / name)
    assert problem in checkpoints.damage(tmp_path)


def test_a_damaged_checkpoint_is_not_resumed(fork_server: ForkServer, root: Path) -> None:
    """An earlier one is used, and the steps after it are trained again; if there is none, the error says what to do."""
    folder = fork_server.train(root / "damaged", make_spec(SHORT))
    saved, before = folder / "checkpoints", losses(folder)
    os.truncate(saved / "checkpoint-3/optimizer.pt", 100)
    assert fork_server.run(folder) == 0, log_text(folder)
    log = log_text(folder)
    assert "checkpoint-3 is damaged: its file optimizer.pt has 100 bytes" in log
    assert "Resuming from checkpoint-2." in log
    assert losses(folder) == same_losses(before)
    assert sorted(p.name for p in saved.iterdir()) == ["checkpoint-2", "checkpoint-3", "damaged-checkpoint-3"]
    assert not checkpoints.damage(saved / "checkpoint-3")
    for step in (2, 3):
        (saved / f"checkpoint-{step}/optimizer.pt").unlink()
    assert fork_server.run(folder) == 1
    sentence = log_text(folder).splitlines()[-1]
    assert "checkpoint-3 is damaged: its file optimizer.pt is missing" in sentence
    assert "--from-scratch" in sentence
    assert fork_server.run(folder, 0, "--from-scratch") == 0, log_text(folder)
