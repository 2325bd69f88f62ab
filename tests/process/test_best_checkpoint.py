"""load_best_model_at_end loads the checkpoint with the lowest eval loss, also if another step has a lower one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from backend.config import RunSpec
from backend.train import disk_space
from backend.train.callbacks import EarlyStopping, ProgressCallback
from backend.train.device import ProcessGroup
from backend.train.run_log import RunLog
from backend.train.trl_trainers import TrainerMixin

NAN = math.nan


def make_model() -> Any:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes))


def weight_of(model: Any) -> float:
    return float(model.lm_head.weight.detach().double().sum())


class ScriptedTrainer(TrainerMixin, Trainer):
    """A trainer whose eval losses are given, by step."""

    spec = RunSpec()
    eval_losses: dict[int, float]

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        metrics = {"eval_loss": self.eval_losses[self.state.global_step]}
        self.log(metrics)
        return metrics


class Weights(TrainerCallback):
    """The sum of some weights after each step."""

    def __init__(self) -> None:
        self.after: dict[int, float] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.after[state.global_step] = weight_of(model)


def make_trainer(folder: Path, losses: list[float], seen: Weights) -> ScriptedTrainer:
    arguments = TrainingArguments(
        str(folder / "checkpoints"), use_cpu=True, report_to=[], max_steps=len(losses), learning_rate=0.1,
        per_device_train_batch_size=1, lr_scheduler_type="constant", eval_strategy="steps", eval_steps=1,
        save_strategy="steps", save_steps=2, load_best_model_at_end=True, metric_for_best_model="eval_loss",
        greater_is_better=False, disable_tqdm=True, logging_strategy="no", save_only_model=False,
    )  # fmt: skip
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 8
    trainer = ScriptedTrainer(make_model(), arguments, train_dataset=rows, eval_dataset=rows, callbacks=[seen])  # type: ignore[arg-type]
    trainer.eval_losses = dict(enumerate(losses, start=1))
    trainer.context = SimpleNamespace(  # type: ignore[assignment]
        folder=folder,
        group=ProcessGroup(),
        run_log=RunLog(folder),
        run=SimpleNamespace(zero_stage=0),
        use_cache=None,
        spec=RunSpec(),
    )
    return trainer


@pytest.fixture(autouse=True)
def _room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_space, "save_checkpoint", lambda context, folder, write: write())


# Checkpoints are saved at steps 2, 4 and 6, and all steps are evaluated.
@pytest.mark.parametrize(
    ("losses", "best"),
    [
        ([9, 8, 5, 6, 9, 9], 4),  # step 3 has a lower loss, and no checkpoint
        ([9, 8, 6, 6, 9, 9], 4),  # as low as step 3
        ([1, 8, 9, 7, 9, 8], 4),  # the first evaluation is the lowest of all
        ([9, 5, 1, 6, 9, 7], 2),
        ([9, 5, 9, 5, 9, 5], 2),  # of equal losses, the earlier
        ([9, NAN, 9, 7, 9, NAN], 4),
        ([9, 8, 7, 6, 5, 4], 6),
    ],
)
def test_best_checkpoint_is_the_one_with_the_lowest_eval_loss(tmp_path: Path, losses: list[float], best: int) -> None:
    seen = Weights()
    trainer = make_trainer(tmp_path, losses, seen)
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoints/checkpoint-{best}")
    assert weight_of(trainer.model) == pytest.approx(seen.after[best]), "weights of the best checkpoint"


@pytest.mark.parametrize("step", [5, 6])
def test_nothing_ends_a_training_early_after_its_last_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], step: int
) -> None:
    """The log and the page would say that it ended early, although it has all of its steps, and a stop request would
    end the generation of outputs: the run would have no result."""
    state, control = TrainerState(global_step=step, max_steps=6, best_metric=1.0), TrainerControl()
    asked: list[int] = []
    run_log, monitor = RunLog(tmp_path), SimpleNamespace(add=lambda point, step: {}, stops=True)
    run_log.compare_with_sweep = asked.append  # type: ignore[method-assign]
    config: Any = SimpleNamespace(metric_for_best_model="eval_loss", greater_is_better=False)
    progress = ProgressCallback(run_log, monitor)  # type: ignore[arg-type]
    progress.on_log(config, state, control, {"eval_loss": 2.0})
    assert asked == ([step] if step < 6 else []) and monitor.stops == (step < 6)
    EarlyStopping(1, 0.0, run_log).on_evaluate(config, state, control, {"eval_loss": 2.0})
    assert ("Stopping early after step 5" in capsys.readouterr().out) == (step < 6)
    progress.on_log(config, state, control, {"loss": 2.0})
    assert not monitor.stops, "early stopping has ended it"


def test_an_evaluation_that_comes_after_a_resume_can_make_its_checkpoint_the_best_one(tmp_path: Path) -> None:
    losses = [9.0, 8.0, 7.0, 1.0, 5.0, 5.0]
    make_trainer(tmp_path, losses[:4], Weights()).train()
    start = tmp_path / "checkpoints/checkpoint-4"
    state = json.loads((start / "trainer_state.json").read_text())
    state["log_history"] = [point for point in state["log_history"] if point["step"] < 4]
    state |= {"best_metric": 8.0, "best_global_step": 2, "best_model_checkpoint": str(start.with_name("checkpoint-2"))}
    (start / "trainer_state.json").write_text(json.dumps(state))
    trainer = make_trainer(tmp_path, losses, Weights())
    trainer.start = start
    trainer.train(resume_from_checkpoint=str(start))
    assert trainer.state.best_model_checkpoint == str(start)


def test_resumed_run_knows_the_best_checkpoint(tmp_path: Path) -> None:
    """The checkpoint's trainer_state.json names the best one too."""
    losses = [9, 8, 5, 6, 9, 9]
    make_trainer(tmp_path, losses[:4], Weights()).train()
    trainer = make_trainer(tmp_path, losses, Weights())
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoints/checkpoint-4"))
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoints/checkpoint-4")
