"""progress.json while a run generates, evaluates and saves: the phase, what is done of it, and since when."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from backend.runs import LOCK, PROGRESS, STOP
from backend.train import generation_eval, time_limit
from backend.train.callbacks import ProgressCallback, evaluations_left, show_checkpoint
from backend.train.context import TrainContext
from backend.train.generation_eval import EvalPrompt, Generated, GenerationEvalCallback, Generator
from backend.train.run_log import RunLog
from backend.train.trl_trainers import TrainerMixin

STATE = SimpleNamespace(global_step=20, max_steps=40)


class Recorder(RunLog):
    """Remembers what progress.json would have."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.seen: list[dict[str, Any]] = []

    def progress(self, phase: str, text: str = "", fraction: float | None = None, **more: Any) -> None:
        super().progress(phase, text, fraction, **more)
        self.seen.append(dict(self._progress))


def test_generation_counts_its_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_log, group = (
        Recorder(tmp_path),
        SimpleNamespace(rank=0, world=1, gather=lambda value: [value], agree=lambda *_: 0),
    )
    context = TrainContext(None, tmp_path, False, group, run_log, None, None)  # type: ignore[arg-type]
    monkeypatch.setattr(generation_eval, "unsharded_model", lambda _, trainer: contextlib.nullcontext(trainer))

    def batch(
        _: Generator, model: object, texts: list[str], count: Callable[[int], bool], seeds: object
    ) -> list[Generated]:
        assert count(1) and count(3)
        return [Generated("out")] * len(texts)

    monkeypatch.setattr(Generator, "_batch", batch)
    generator = Generator(None, group, 2, 8, None)  # type: ignore[arg-type]
    callback = GenerationEvalCallback(context, generator, [EvalPrompt("a", "a", "out", "a")] * 5)
    config = LlamaConfig()
    callback.trainer = SimpleNamespace(training=True, eval=lambda: None, train=lambda _: None, config=config)
    assert callback._generate("before", "before training") == ["out"] * 5
    assert [(p["done"], p["total"], p["unit"]) for p in run_log.seen[1:]] == [
        (done, 40, "token") for done in (0, 2, 6, 16, 18, 22, 32, 33, 35, 40)
    ]
    assert {p["phase"] for p in run_log.seen} == {"generating before"} and len({p["since"] for p in run_log.seen}) == 1


def test_prompts_are_not_padded_where_padding_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """RWKV reads padding as if it was text."""
    sizes: list[int] = []

    def batch(_: Generator, model: object, texts: list[str], count: object, seeds: object) -> list[Generated]:
        sizes.append(len(texts))
        return [Generated(text) for text in texts]

    monkeypatch.setattr(Generator, "_batch", batch)
    group: Any = SimpleNamespace(rank=0, world=1, gather=lambda value: [value], agree=lambda *_: 0)
    prompts = [EvalPrompt(text, text, "", text) for text in ("b", "aa")]
    for kind in ("rwkv", "llama"):
        model = SimpleNamespace(training=True, eval=lambda: None, train=lambda _: None)
        model.config = SimpleNamespace(model_type=kind)
        generator = Generator(None, group, 2, 8, torch.float32)
        assert [output.text for output in generator.generate(model, prompts, lambda *_: True)] == ["b", "aa"]
    assert sizes == [1, 1, 2]


def test_evaluations_and_checkpoints_are_phases(tmp_path: Path) -> None:
    run_log, at = Recorder(tmp_path), {"args": None, "state": STATE, "control": None}
    callback = ProgressCallback(run_log, None)  # type: ignore[arg-type]

    class Evaluates:
        def evaluate(self) -> None:
            batches = [1, 2]
            for _ in batches:
                callback.on_prediction_step(**at, eval_dataloader=batches)
            callback.on_evaluate(**at)

    class Trainer(TrainerMixin, Evaluates):
        context, state, model = SimpleNamespace(run_log=run_log), STATE, nn.Module()  # type: ignore[assignment]

    Trainer().evaluate()
    show_checkpoint(run_log, STATE)
    texts = [(p["phase"], p["text"], p.get("done")) for p in run_log.seen]
    evaluating = "Evaluating after step 20"
    assert texts[:3] == [("evaluating", evaluating, done) for done in (None, 1, 2)]
    assert texts[3:] == [("training", "Step 20 of 40", None), ("checkpoint", "Saving checkpoint-20", None)]
    kept = json.loads((tmp_path / PROGRESS).read_text())
    assert kept["phase"] == "checkpoint" and kept["evaluation_seconds"] >= 0


def test_a_time_limit_waits_for_an_evaluation_and_counts_earlier_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that torchrun has started again does not begin with a new limit."""
    monkeypatch.setattr(time_limit, "POLL_SECONDS", 0.01)
    (tmp_path / LOCK).touch()
    (tmp_path / PROGRESS).write_text(json.dumps({"elapsed": 7200.0}))
    hours = 3.0 + (time.time() - psutil.Process().create_time()) / 3600  # the tests of this process take time, too
    run_log = RunLog(tmp_path)
    thread = time_limit.watch(hours, False, run_log)
    assert thread and 7200 < run_log.elapsed < 3600 * hours
    run_log.progress("evaluating")
    run_log.earlier_seconds += 3600
    thread.join(0.1)
    assert thread.is_alive() and not (tmp_path / STOP).exists()
    run_log.progress("training")
    thread.join(10)
    request = (tmp_path / STOP).read_text()
    assert request.startswith("save\nThe run reached its max run time of 3 h") and "Resume" not in request
    assert time_limit.watch(hours, False, RunLog(tmp_path, rank=1)) is None


@pytest.mark.parametrize(
    ("strategy", "step", "left"), [("steps", 19, 3), ("steps", 20, 2), ("steps", 45, 0), ("epoch", 24, 2), ("no", 1, 0)]
)
def test_evaluations_that_are_left(strategy: str, step: int, left: int) -> None:
    """Every 10 steps of 45, or after each of 3 epochs of 15 steps: at step 24, the second one is not over."""
    state = SimpleNamespace(global_step=step, max_steps=45, eval_steps=10, epoch=step / 15, num_train_epochs=3)
    assert evaluations_left(SimpleNamespace(eval_strategy=strategy), state) == left
