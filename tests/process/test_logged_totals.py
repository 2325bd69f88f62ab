"""Tokens and mean loss of a result cover every step, whatever the logging interval is."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fork_server import ForkServer
from parameters import soak_except
from training_runs import losses, make_spec, read_metrics, result, same_losses

from backend.train import lost_points
from backend.train.trl_trainers import TokenCountMixin, _add_sums, _loss_of_rank, _sums
from webui.curves import Curves

STEPS, INTERVAL = 5, 3
COMMON = {
    "train.duration": "steps", "train.max_steps": STEPS, "train.learning_rate": 1e-2, "train.warmup_steps": 0,
    "eval.strategy": "no", "save.strategy": "no", "save.final_model": False,
}  # fmt: skip
MEASURED = {"data_wait", "memory_gb"}  # from time to time, whichever point is next
# Stops after the second evaluation: the loss never falls by the threshold.
STOPPED = {
    "eval.strategy": "steps", "eval.steps": 2, "eval.early_stopping_patience": 1, "eval.early_stopping_threshold": 100,
}  # fmt: skip


def run(fork_server: ForkServer, folder: Path, **changes: Any) -> tuple[dict[int, float], dict[str, Any]]:
    """(step -> logged loss, the result) of a run."""
    done = fork_server.train(folder, make_spec({**COMMON, **changes}))
    return {point["step"]: point["loss"] for point in read_metrics(done) if "loss" in point}, result(done)


def test_last_step(fork_server: ForkServer, tmp_path: Path) -> None:
    each, expected = run(fork_server, tmp_path / "each", **{"logging.steps": 1})
    some, found = run(fork_server, tmp_path / "some", **{"logging.steps": INTERVAL})
    assert list(each) == [1, 2, 3, 4, 5] and list(some) == [1, 3, 5]
    means = {1: each[1], 3: (each[2] + each[3]) / 2, 5: (each[4] + each[5]) / 2}
    assert some == same_losses(means)
    assert found["train_loss"] == same_losses(sum(each.values()) / STEPS) == expected["train_loss"]
    assert found["tokens"] == expected["tokens"]


@pytest.mark.parametrize(
    ("saved", "ranks", "expected"), [([1.0, 4.0], 2, [1.0, 4.0]), ([1.0, 4.0], 1, [2.5]), (2.5, 2, [2.5, 2.5])]
)
def test_the_loss_since_the_last_point_is_that_of_each_rank(
    saved: list[float] | float, ranks: int, expected: list[float]
) -> None:
    """With another number of ranks, and from an earlier version's checkpoint, it is the mean."""
    assert [_loss_of_rank(saved, rank, ranks) for rank in range(ranks)] == expected


def tokens_by_step(folder: Path) -> list[tuple[float, float]]:
    curves = Curves(folder / "metrics.jsonl")
    curves.read()
    tokens = curves.series(axis="tokens")["series"]["loss"]["x"]
    return list(zip(losses(folder), tokens, strict=True))


def margins_by_step(folder: Path) -> dict[int, float]:
    """Step -> mean reward margin of the last point of this step."""
    return {point["step"]: point["reward_margin"] for point in read_metrics(folder) if "loss" in point}


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.soak)])
def test_resumed_between_two_points(fork_server: ForkServer, tmp_path: Path, ranks: int) -> None:
    """The next point is the mean of all steps since the one before the checkpoint, also of TRL's metrics; tokens and
    seconds are those of all starts."""
    changes = {**COMMON, "train.max_steps": 8, "logging.steps": 4, "save.strategy": "steps", "save.steps": 3}
    changes |= {"train.stage": "dpo", "data.builtin": "train-pairs"}
    changes |= {"save.total_limit": 0} | ({"parallel.strategy": "ddp", "launch.nproc_per_node": 2} if ranks else {})
    folder = fork_server.train(tmp_path / "run", make_spec(changes), ranks)
    points, before, margins = losses(folder), result(folder), margins_by_step(folder)
    tokens = tokens_by_step(folder)
    until = json.loads((folder / "checkpoints/checkpoint-6/trainer_state.json").read_text())
    fork_server.resume(folder, 6, ranks)
    assert losses(folder) == same_losses(points) and list(points) == [1, 4, 8]
    assert margins_by_step(folder) == same_losses(margins) and len(margins) == 3
    after = result(folder)
    assert after["train_loss"] == same_losses(before["train_loss"])
    assert after["tokens"] == before["tokens"] == tokens[-1][1] and tokens_by_step(folder) == tokens
    assert after["seconds"] > until["stateful_callbacks"]["unlogged"]["seconds"]


@pytest.mark.parametrize(
    "stage",
    soak_except(("sft", "pretraining", "dpo", "kto", "orpo", "reward"), ("sft",)),
)
def test_early_stopping(fork_server: ForkServer, tmp_path: Path, stage: str) -> None:
    pairs = {"data.builtin": "train-pairs"} if stage not in ("sft", "pretraining") else {}
    stopped = {**STOPPED, **pairs, "train.stage": stage, "data.max_length": 256}
    each, expected = run(fork_server, tmp_path / "each", **stopped, **{"logging.steps": 1})
    some, found = run(fork_server, tmp_path / "some", **stopped, **{"logging.steps": INTERVAL})
    assert list(each) == [1, 2, 3, 4] and list(some) == [1, 3, 4] and some[4] == same_losses(each[4])
    for name in ("tokens", "train_loss"):
        assert found[name] == same_losses(expected[name]) and found[name] > 0
    names = [
        [{*point} - MEASURED for point in read_metrics(tmp_path / each) if point["step"] == 4]
        for each in ("each", "some")
    ]
    assert sorted(map(sorted, names[0])) == sorted(map(sorted, names[1])), "each point once, with metrics of training"


@pytest.mark.parametrize("name", ["_metrics", "_stored_metrics"])
def test_metrics_since_the_last_point(name: str) -> None:
    """KTO's have different numbers of values; those of ORPO have another name."""
    before, after, new = (SimpleNamespace(**{name: defaultdict(lambda: defaultdict(list))}) for _ in range(3))
    getattr(before, name)["train"] |= {"rewards/margins": [1.0, 2.0, 6.0], "count/chosen": [4.0], "empty": []}
    _add_sums(after, json.loads(json.dumps(_sums(before))))
    _add_sums(new, {})
    found = getattr(after, name)["train"]
    assert {key: (sum(values), len(values)) for key, values in found.items()} == {
        "rewards/margins": (9.0, 3), "count/chosen": (4.0, 1),
    }  # fmt: skip


def test_orpo_counts_the_tokens_of_a_tensor_parallel_group_once() -> None:
    """Both ranks of the group train on the same batch."""
    trained = type("Base", (), {"compute_loss": lambda *_, **__: 0.0})
    trainer = type("Trainer", (TokenCountMixin, trained), {})()
    trainer.model, trainer.accelerator = SimpleNamespace(training=True), SimpleNamespace(gather=lambda n: n.repeat(2))
    trainer.context = SimpleNamespace(run=SimpleNamespace(tensor_parallel_size=2))
    masks = {f"{side}_attention_mask": torch.tensor([[1, 1, 1, 0]]) for side in ("chosen", "rejected")}
    trainer.compute_loss(None, masks)
    assert trainer._total_train_tokens == 6


def test_points_restored_from_a_checkpoint_have_the_loss_of_each_dataset(tmp_path: Path) -> None:
    logged = {"step": 2, "eval_loss": 0.5, "eval_loss_1": 0.4, "eval_loss_2": 0.6, "eval_runtime": 1.0}
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2/trainer_state.json").write_text(json.dumps({"log_history": [logged]}))
    (tmp_path / "metrics.jsonl").write_text("")
    found = {name: value for name, value in logged.items() if name != "eval_runtime"}
    assert lost_points.find(tmp_path, tmp_path / "checkpoint-2") == [found]
