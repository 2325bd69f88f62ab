"""LLaMA-Factory's processes: evaluations of unknown length, which checkpoint a start continues from, and intervals
after a resume."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import traceback
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader, IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainerState

from backend.runs import failure
from backend.train import added_tokens, lora
from backend.train.run_log import TrainError


class Stream(IterableDataset):  # type: ignore[misc]
    """A dataset without a length, as with LLaMA-Factory's `streaming: true`."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


@pytest.fixture
def llamafactory_run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module; LLaMA-Factory itself is not installed."""
    tuner = ModuleType("llamafactory.train.tuner")
    tuner.run_exp = print  # type: ignore[attr-defined]
    for name in ("llamafactory", "llamafactory.train"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "llamafactory.train.tuner", tuner)
    monkeypatch.delitem(sys.modules, "backend.train.llamafactory_run", raising=False)
    return importlib.import_module("backend.train.llamafactory_run")


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (DataLoader(Stream(), batch_size=2), {"text": "Evaluating after step 5", "fraction": 0.5}),
        (DataLoader(range(8), batch_size=2), {"done": 1, "total": 4, "unit": "batch", "fraction": 0.25}),
        (None, {"fraction": 0.5}),
    ],
)
def test_an_evaluation_without_a_known_number_of_batches(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, llamafactory_run: Any, loader: Any, expected: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    state = SimpleNamespace(global_step=5, max_steps=10)
    llamafactory_run.Report().on_prediction_step(None, state, None, eval_dataloader=loader)
    written = json.loads((tmp_path / llamafactory_run.PROGRESS).read_text())
    assert {**written, **expected} == written and ("total" in written) == ("total" in expected)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("from_scratch", "started", "resumed", "kept"),
    [
        (False, 25, "checkpoint-20", {"checkpoint-10", "checkpoint-20", "checkpoint-30"}),
        (True, 40, None, set()),
        (True, 20, "checkpoint-20", {"checkpoint-20"}),  # torchrun has restarted the ranks of a start from scratch
    ],
)
def test_a_start_from_scratch_deletes_the_checkpoints_of_earlier_starts(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, llamafactory_run: Any, rank: int, from_scratch: bool, started: int,
    resumed: str | None, kept: set[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(llamafactory_run, "RANK", rank)
    (tmp_path / "train.yaml").write_text("seed: 1\n")
    (tmp_path / "lock").write_text(f"supervisor\nstart-{started}\n")
    for step in (10, 20, 30):
        (tmp_path / f"checkpoints/checkpoint-{step}").mkdir(parents=True)
        mark = tmp_path / f"checkpoints/checkpoint-{step}/complete"
        if step < 30:  # the last one was cut off
            mark.write_text(json.dumps({"start": f"start-{step}"}))
            os.utime(mark, (10**10 - step,) * 2)  # the clock was set back: times say nothing
    found = llamafactory_run.arguments(from_scratch).get("resume_from_checkpoint")
    assert found == (resumed and f"checkpoints/{resumed}")
    left = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert left == (kept if rank == 0 else {"checkpoint-10", "checkpoint-20", "checkpoint-30"})


def test_a_resumed_run_has_its_own_intervals(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, llamafactory_run: Any
) -> None:
    """transformers restores those of the checkpoint before it calls on_train_begin."""
    monkeypatch.chdir(tmp_path)
    state = TrainerState(global_step=500, max_steps=1000, logging_steps=10, eval_steps=500, save_steps=500)
    arguments = SimpleNamespace(logging_steps=5, eval_steps=100, save_steps=0.02)
    llamafactory_run.Report().on_train_begin(arguments, state, None)
    assert (state.logging_steps, state.eval_steps, state.save_steps) == (5, 100, 20)


def test_best_checkpoint_has_the_lowest_eval_loss_of_all_checkpoints(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, llamafactory_run: Any
) -> None:
    """transformers looks for the lowest eval loss of all steps, and here step 3 has no checkpoint."""
    monkeypatch.chdir(tmp_path)
    for step in (2, 4, 6):
        (tmp_path / f"checkpoint-{step}").mkdir()
    losses = {1: 9.0, 2: 8.0, 3: 5.0, 4: 6.0, 5: 9.0, 6: float("nan")}
    history = [{"step": step, "eval_loss": loss} for step, loss in losses.items()]
    state = TrainerState(global_step=6, max_steps=6, log_history=history, best_model_checkpoint="checkpoint-2")
    llamafactory_run.Report().on_save(SimpleNamespace(output_dir=str(tmp_path)), state, None)
    assert state.best_model_checkpoint == str(tmp_path / "checkpoint-4")
    resumed = TrainerState(global_step=4, max_steps=6, log_history=history[:4], best_model_checkpoint="checkpoint-2")
    arguments = SimpleNamespace(output_dir=str(tmp_path), logging_steps=5, eval_steps=1, save_steps=2)
    llamafactory_run.Report().on_train_begin(arguments, resumed, None)
    assert resumed.best_model_checkpoint == str(tmp_path / "checkpoint-4"), "its state was saved before step 4 counted"


def test_checkpoints_that_are_away_are_not_no_checkpoint(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, llamafactory_run: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.yaml").write_text("seed: 1\n")
    events = [{"kind": "saved", "step": 10}, {"kind": "resumed", "step": 0}, {"kind": "saved", "step": 20}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps({**event, "time": 0}) + "\n" for event in events[:2]))
    assert "resume_from_checkpoint" not in llamafactory_run.arguments(False)
    (tmp_path / "events.jsonl").write_text("".join(json.dumps({**event, "time": 0}) + "\n" for event in events))
    with pytest.raises(SystemExit, match=r"checkpoint-20 is missing .* restart from scratch"):
        llamafactory_run.arguments(False)
    assert "resume_from_checkpoint" not in llamafactory_run.arguments(True)


def test_a_resumed_run_has_its_own_learning_rate(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, llamafactory_run: Any
) -> None:
    """A retry with half the learning rate would diverge again."""
    monkeypatch.chdir(tmp_path)
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in (1e-3, 4e-3)]
    optimizer = torch.optim.AdamW(groups)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    optimizer.step()
    scheduler.step()
    arguments = SimpleNamespace(logging_steps=5, eval_steps=100, save_steps=20, learning_rate=5e-4)
    state = TrainerState(global_step=1, max_steps=10)
    llamafactory_run.Report().on_train_begin(arguments, state, None, optimizer, scheduler)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([2.5e-4, 1e-3])
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == pytest.approx([5e-4 / 3, 2e-3 / 3])


def test_a_run_that_diverges_fails(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, llamafactory_run: Any) -> None:
    """The page shows that as for other runs."""
    monkeypatch.chdir(tmp_path)
    report, state = llamafactory_run.Report(), SimpleNamespace(global_step=7)
    for loss in (float("nan"), float("inf"), 2.0, float("nan"), float("nan")):
        report.on_log(None, state, None, logs={"loss": loss})
    report.on_log(None, state, None, logs={"eval_loss": float("nan")})
    with pytest.raises(llamafactory_run.Diverged) as error:
        report.on_log(None, state, None, logs={"loss": float("nan")})
    points = [json.loads(line) for line in (tmp_path / llamafactory_run.METRICS).read_text().splitlines()]
    assert [point["loss"] for point in points if "loss" in point] == [None, None, 2.0, None, None, None]
    text = "".join(traceback.format_exception(error.value))
    found = next(each for each in failure.KNOWN_FAILURES if re.search(each.pattern, text))
    assert found.kind == failure.DIVERGED


@pytest.mark.parametrize(("stops", "is_due", "logs"), [(True, False, True), (False, True, True), (False, False, False)])
def test_the_last_steps_are_logged(llamafactory_run: Any, stops: bool, is_due: bool, logs: bool) -> None:
    control = SimpleNamespace(should_training_stop=stops, should_log=is_due)
    llamafactory_run.Report().on_epoch_end(None, None, control)
    assert control.should_log == logs


@pytest.mark.parametrize("layerwise", [True, False])
def test_layerwise_optimizers_have_no_gradient_norm(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, llamafactory_run: Any, layerwise: bool
) -> None:
    """LLaMA-Factory logs 0 for it: each gradient is gone when the Trainer computes the norm."""
    monkeypatch.chdir(tmp_path)
    report, state = llamafactory_run.Report(), SimpleNamespace(global_step=1, max_steps=9)
    own = SimpleNamespace(**({"optimizer_dict": {}} if layerwise else {}))
    logs, wrapped = {"loss": 2.0, "grad_norm": 0.0}, SimpleNamespace(optimizer=own)
    report.on_log(SimpleNamespace(optim="adamw_torch"), state, None, logs, optimizer=wrapped)
    report.on_log(SimpleNamespace(optim="adalomo"), state, None, logs, optimizer=wrapped)
    points = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert ["grad_norm" in point for point in points] == [not layerwise, False]


def test_a_result_has_no_nan(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, llamafactory_run: Any) -> None:
    monkeypatch.chdir(tmp_path)
    history = [{"loss": float("nan"), "step": 1}, {"eval_loss": float("inf"), "step": 1}]
    report = llamafactory_run.Report()
    state = SimpleNamespace(global_step=1, max_steps=1, log_history=history)
    report.on_train_end(SimpleNamespace(load_best_model_at_end=False), state, None)
    assert (report.result["train_loss"], report.result["eval_loss"]) == (None, None)


@pytest.mark.parametrize(("best", "points"), [(None, [(2, 4.0), (5, 3.0)]), ("checkpoints/checkpoint-2", [(2, 4.0)])])
def test_the_losses_of_a_result(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, llamafactory_run: Any, best: str | None, points: list[Any]
) -> None:
    """The training loss is that of all steps; the validation loss is that of the saved model, which LLaMA-Factory
    evaluates after the training. If that is the best one, the last step has no such loss."""
    monkeypatch.chdir(tmp_path)
    history = [{"loss": 9.0, "step": 1}, {"loss": 5.0, "step": 3}, {"eval_loss": 4.0, "step": 2}]
    history.append({"loss": 3.0, "step": 5})
    report, arguments = llamafactory_run.Report(), SimpleNamespace(load_best_model_at_end=True)
    state = SimpleNamespace(global_step=2, max_steps=5, log_history=history, best_model_checkpoint=best)
    report.on_log(arguments, state, None, {"eval_loss": 4.0})
    state.global_step = 5
    report.on_train_end(arguments, state, None)
    assert report.result["train_loss"] == (9 + 2 * 5 + 2 * 3) / 5
    assert report.result["eval_loss"] == (4.0 if best else None)
    report.on_log(arguments, state, None, {"eval_loss": 3.0})
    assert (report.result["eval_loss"], report.result["model_step"]) == (3.0, 2 if best else 5)
    written = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert [(point["step"], point["eval_loss"]) for point in written] == points


def test_embeddings_have_the_rows_of_an_adapter(tmp_path: Any) -> None:
    """LLaMA-Factory rounds their number up."""
    model = LlamaForCausalLM(LlamaConfig(vocab_size=9, hidden_size=4, num_hidden_layers=1, num_attention_heads=1))
    added_tokens.fit_to_adapter(model, tmp_path)
    save_file({"base_model.model.model.embed_tokens.weight": torch.ones(64, 4)}, tmp_path / lora.WEIGHTS)
    added_tokens.fit_to_adapter(model, tmp_path)
    assert model.get_input_embeddings().num_embeddings == model.lm_head.out_features == 64
    save_file({"base_model.model.model.embed_tokens.weight": torch.ones(9, 4)}, tmp_path / lora.WEIGHTS)
    added_tokens.fit_to_adapter(model, tmp_path)
    assert model.get_input_embeddings().num_embeddings == 64


def test_random_base_weights_of_another_trainer_are_not_guessed() -> None:
    adapter = {"init_lora_weights": "pissa_niter_16"}
    lora.check_repeatable(adapter, "cpu", "cpu")
    lora.check_repeatable({"init_lora_weights": "pissa"}, "LLaMA-Factory", "cpu")
    with pytest.raises(TrainError, match="its random numbers are not known"):
        lora.check_repeatable(adapter, "LLaMA-Factory", "cpu")


def test_skipped_optimizer_steps(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, llamafactory_run: Any) -> None:
    """They are counted in metrics and result; a run that skipped all of them fails."""
    monkeypatch.chdir(tmp_path)
    arguments, control = SimpleNamespace(device="cpu", load_best_model_at_end=False), SimpleNamespace()
    state = SimpleNamespace(global_step=0, max_steps=2, log_history=[], compute_steps=lambda *_: None)
    report = llamafactory_run.Report()
    report.began -= 1000  # in which model and data were loaded
    report.on_train_begin(arguments, state, control)
    for skipped in (True, False):
        state.global_step += 1
        report.on_step_end(arguments, state, control, optimizer=SimpleNamespace(step_was_skipped=skipped))
        report.on_log(arguments, state, control, logs={"loss": 2.5})
        if state.global_step == 1:
            with pytest.raises(RuntimeError, match="all 1 optimizer steps"):
                report.on_train_end(arguments, state, control)
    report.on_train_end(arguments, state, control)
    assert report.result["skipped_steps"] == 1 and report.result["seconds"] < 1000
    points = [json.loads(line) for line in (tmp_path / llamafactory_run.METRICS).read_text().splitlines()]
    assert [point["skipped_steps"] for point in points] == [1, 1]
