"""Trainings of the tiny model with torchrun and two gloo ranks, compared with one process. Tests share the runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import ForkServer
from training_runs import (
    REORDERING_TOLERANCE,
    TorchrunLaunch,
    last_step,
    log_text,
    losses,
    make_run_folder,
    make_spec,
    read_metrics,
    request_stop,
    result,
    same_losses,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

STEPS = 10
# With dropout, resuming must also restore the random number generators.
RESUMED = {
    "lora.dropout": 0.1,
    "train.max_steps": STEPS,
    "save.strategy": "steps",
    "save.steps": 4,
    "save.total_limit": 0,
    "parallel.strategy": "ddp",
    "logging.run_name": "resumed",
}
EQUAL_BATCH = {"train.max_steps": 3, "train.per_device_train_batch_size": 2, "parallel.strategy": "ddp"}
ONE_PROCESS = {"train.per_device_train_batch_size": 4, "parallel.strategy": "single"}
METHODS: dict[str, dict[str, Any]] = {
    "full": {"method.kind": "full"},
    "lora": {"method.kind": "lora", "lora.r": 4},
    "freeze": {
        "method.kind": "freeze",
        "method.freeze_trainable_layers": 1,
        "method.freeze_extra_modules": ("lm_head",),
    },
}

FULL = {**EQUAL_BATCH, **ONE_PROCESS, **METHODS["full"], "train.learning_rate": 1e-2}
# With dropout, so that a random number that anything else draws changes the losses.
DROPOUT = {**METHODS["lora"], "lora.dropout": 0.5, "train.learning_rate": 1e-2, "save.final_model": True}
# Options that save memory or time without changing the steps.
MEMORY_SAVING = {
    "train.per_device_train_batch_size": 2,
    "train.gradient_accumulation_steps": 2,
    "train.activation_checkpointing": True,
    "train.dataloader_num_workers": 1,
    "data.dataset_num_proc": 2,
}
# Options that change the losses, all in one run. Few tokens, since bf16 is slow on a CPU.
MANY_OPTIONS = {
    "train.max_steps": 6,
    "data.max_length": 64,
    "train.activation_checkpointing": True,
    "train.neftune_noise_alpha": 5.0,
    "train.train_sampling_strategy": "group_by_length",
    "train.optim": "adafactor",
    "train.lr_scheduler_type": "cosine_with_min_lr",
    "lora.modules_to_save": ("lm_head",),
    "precision.compute": "bf16",
    "eval.strategy": "steps",
    "eval.steps": 1,
    "save.load_best_model_at_end": True,
    "save.only_model": False,
}


@pytest.fixture(scope="module")
def cache(root: Path) -> Path:
    """An empty cache: the first run creates the tiny model."""
    return root / "cache"


@pytest.fixture(scope="module")
def uninterrupted(root: Path, cache: Path) -> Path:
    """Ten steps on two ranks, with a saved model and generations. Launched without a stand-in for Python."""
    more = {"save.final_model": True, "eval.num_generations": 3, "eval.max_new_tokens": 4}
    folder = make_run_folder(root, "uninterrupted", {**RESUMED, **more})
    TorchrunLaunch(folder, cache, 2).wait_for_exit()
    return folder


@pytest.fixture(scope="module")
def one_process(root: Path, fork_server: ForkServer) -> dict[str, Path]:
    """Runs of one process: each training method, and the options tested below. The adapter is trained twice."""
    specs = {"full": {**FULL, "save.final_model": True}, "memory_saving": {**FULL, **MEMORY_SAVING}}
    specs["freeze"] = {**EQUAL_BATCH, **ONE_PROCESS, **METHODS["freeze"]}
    specs["lora"] = {**DROPOUT, "save.strategy": "steps", "save.steps": 2}
    specs["merged"] = {**DROPOUT, "save.merge_adapter": True, "eval.strategy": "steps", "eval.steps": 1}
    specs["packed"] = {"data.packing": True, "eval.strategy": "steps", "eval.steps": 3}
    specs["many"] = {**MANY_OPTIONS, "save.strategy": "steps", "save.steps": 2, "save.total_limit": 1}
    folders = {name: fork_server.train(root / name, make_spec(spec)) for name, spec in specs.items()}
    assert fork_server.run(folders["lora"], 0, "--from-scratch") == 0, log_text(folders["lora"])
    return folders


def test_run_writes_result_progress_and_checkpoints(uninterrupted: Path) -> None:
    run_result = result(uninterrupted)
    assert run_result["steps"] == STEPS
    assert run_result["exact_match_before"] == run_result["exact_match_after"] == 0
    assert len(run_result["samples"]) == 3
    assert all(set(s) == {"prompt", "reference", "before", "after"} for s in run_result["samples"])
    assert 0 < run_result["trainable_parameters"] < run_result["parameters"]
    assert len(run_result["peak_bytes"]) == 2
    assert run_result["reserved_bytes"] == run_result["device_bytes"] == [None, None], "a CPU has no device memory"
    assert min(run_result["host_bytes"]) > 2**27
    assert run_result["tokens"] > 0
    assert sorted(losses(uninterrupted)) == list(range(1, STEPS + 1))
    assert all(p["tokens_per_second"] > 0 for p in read_metrics(uninterrupted))
    assert max(p["tokens"] for p in read_metrics(uninterrupted)) == run_result["tokens"]
    progress = json.loads((uninterrupted / "progress.json").read_text())
    assert (progress["phase"], progress["step"], progress["max_steps"]) == ("done", STEPS, STEPS)
    assert progress["first_step_time"] < progress["time"]
    checkpoints = {p.name for p in (uninterrupted / "checkpoints").iterdir()}
    assert checkpoints == {"checkpoint-4", "checkpoint-8", "checkpoint-10"}
    assert all((uninterrupted / "checkpoints" / name / "complete").exists() for name in checkpoints)


def test_log_is_short_and_has_no_warnings(uninterrupted: Path) -> None:
    lines = log_text(uninterrupted).splitlines()
    assert len(lines) < 40, "\n".join(lines)
    assert not [line for line in lines if "Warning" in line or "it/s]" in line]
    assert not [line for line in lines if line.startswith("[default1]")], "only rank 0 logs"


@pytest.fixture(scope="module")
def stopped(root: Path, cache: Path, fork_server: ForkServer) -> Path:
    """Stopped with a checkpoint after some steps, then resumed."""
    folder = make_run_folder(root, "stopped", {**RESUMED, "save.strategy": "no"})
    launch = TorchrunLaunch(folder, cache, 2, python=fork_server.python)
    launch.wait_for(lambda: last_step(folder) >= 3)
    request_stop(folder, "save")
    launch.wait_for_exit()
    assert 3 <= last_step(folder) < STEPS, "the run ended before the stop took effect"
    assert not (folder / "result.json").exists()
    shutil.copy(folder / "metrics.jsonl", folder / "metrics.first")
    (folder / "stop").unlink()
    assert fork_server.run(folder, 2) == 0, log_text(folder)
    return folder


def test_a_stopped_run_continues_with_the_same_losses(uninterrupted: Path, stopped: Path) -> None:
    assert losses(stopped) == same_losses(losses(uninterrupted))
    resumed_at = [p["step"] for p in read_metrics(stopped) if p.get("event") == "resumed"]
    assert resumed_at == [max(json.loads(x)["step"] for x in (stopped / "metrics.first").read_text().splitlines())]
    assert result(stopped)["steps"] == STEPS


@pytest.fixture(scope="module")
def killed(root: Path, cache: Path, fork_server: ForkServer) -> Path:
    """Killed after its first checkpoint, with an incomplete checkpoint and a truncated line of metrics, then
    resumed."""
    folder = make_run_folder(root, "killed", RESUMED)
    launch = TorchrunLaunch(folder, cache, 2, python=fork_server.python)
    launch.wait_for(lambda: (folder / "checkpoints/checkpoint-4/complete").exists())
    launch.kill()
    assert not fork_server.leftover_processes()
    shutil.rmtree(folder / "checkpoints/checkpoint-8", ignore_errors=True)
    shutil.copytree(folder / "checkpoints/checkpoint-4", folder / "checkpoints/checkpoint-9")
    (folder / "checkpoints/checkpoint-9/complete").unlink()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    assert fork_server.run(folder, 2) == 0, log_text(folder)
    return folder


def test_a_killed_run_continues_from_the_last_complete_checkpoint(uninterrupted: Path, killed: Path) -> None:
    lines = (killed / "metrics.jsonl").read_text().splitlines()
    torn = lines.index('{"step": 5, "lo')
    assert json.loads(lines[torn + 1]) == {
        "event": "resumed", "step": 4, "time": json.loads(lines[torn + 1])["time"],
        "all_weights": True, "all_tokens": True,
    }  # fmt: skip
    lines.pop(torn)
    (killed / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert losses(killed) == same_losses(losses(uninterrupted))
    assert not (killed / "checkpoints/checkpoint-9").exists()


def test_a_run_stops_at_its_time_limit(root: Path, fork_server: ForkServer) -> None:
    """All ranks stop at the same step, with a checkpoint, long before the last step."""
    limit = {"train.max_hours": 5 / 3600, "train.max_steps": 5000, "parallel.strategy": "ddp", "logging.steps": 10}
    folder = make_run_folder(root, "limited", limit)
    assert fork_server.run(folder, 2) == 0, log_text(folder)
    progress = json.loads((folder / "progress.json").read_text())
    assert 0 < progress["step"] < 5000 and 5 <= progress["elapsed"] < 60
    assert (folder / f"checkpoints/checkpoint-{progress['step']}/complete").exists()
    reason = "The run reached its max run time of 5 s (train.max_hours). Resume continues the run for up to 5 s more."
    assert (folder / "stop").read_text() == f"save\n{reason}\n" and f"Stopping. {reason}" in log_text(folder)
    assert not (folder / "result.json").exists()


def test_from_scratch_begins_at_step_0(one_process: dict[str, Path]) -> None:
    metrics = read_metrics(one_process["lora"])
    restarts = [n for n, p in enumerate(metrics) if p.get("event") == "resumed"]
    assert [metrics[n]["step"] for n in restarts] == [0]
    first, second = metrics[: restarts[0]], metrics[restarts[0] + 1 :]
    assert [p["loss"] for p in first] == same_losses([p["loss"] for p in second])
    assert [p["step"] for p in second] == [1, 2, 3]


def test_two_ranks_match_one_process(one_process: dict[str, Path], root: Path, fork_server: ForkServer) -> None:
    """With frozen layers, and the same global batch size. test_strategies.py has the other methods."""
    spec = {**EQUAL_BATCH, **METHODS["freeze"], "launch.nproc_per_node": 2}
    two_ranks = fork_server.train(root / "freeze-ddp", make_spec(spec), 2)
    expected, actual = losses(one_process["freeze"]), losses(two_ranks)
    assert len(expected) == 3
    assert len({round(loss, 6) for loss in expected.values()}) == 3, (
        "the losses of the steps must differ for this test to mean anything"
    )
    assert actual == same_losses(expected, REORDERING_TOLERANCE)
    assert result(one_process["freeze"])["trainable_parameters"] == result(two_ranks)["trainable_parameters"]


def test_trainable_parameters_of_each_method(one_process: dict[str, Path]) -> None:
    trained = {name: result(one_process[name])["trainable_parameters"] for name in METHODS}
    parameters = result(one_process["full"])["parameters"]
    layer = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 352 + 2 * 128
    assert trained["full"] == parameters
    assert trained["freeze"] == layer + 2048 * 128
    assert trained["lora"] == 4 * 4 * (2 * (128 + 128) + 2 * (128 + 64) + 3 * (128 + 352))


def test_memory_saving_options_do_not_change_the_losses(one_process: dict[str, Path]) -> None:
    assert losses(one_process["memory_saving"]) == same_losses(losses(one_process["full"]), REORDERING_TOLERANCE)


def test_many_options_at_once(one_process: dict[str, Path]) -> None:
    """Among them bf16, the best checkpoint and modules_to_save; the best and the newest checkpoint are kept."""
    evaluations = [p for p in read_metrics(one_process["many"]) if "eval_loss" in p]
    assert len(evaluations) == 6
    saved = {p["step"]: p["eval_loss"] for p in evaluations if p["step"] % 2 == 0}
    checkpoint_steps = {
        int(p.name.rpartition("-")[2]) for p in (one_process["many"] / "checkpoints").iterdir() if p.is_dir()
    }
    assert checkpoint_steps == {6, min(saved, key=lambda step: saved[step])}
    assert result(one_process["many"])["trainable_parameters"] > 2048 * 128


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = model(torch.arange(3, 20)[None]).logits
    return output


def test_saved_models_load(one_process: dict[str, Path], cache: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(cache / "models/tiny-llama")
    loaded = {
        name: AutoModelForCausalLM.from_pretrained(one_process[name] / "model") for name in ("merged", "full", "lora")
    }
    assert (one_process["lora"] / "model/adapter_model.safetensors").exists()
    assert not (one_process["merged"] / "model/adapter_model.safetensors").exists()
    assert torch.allclose(logits(loaded["merged"]), logits(loaded["lora"]), atol=1e-4)
    for model in loaded.values():
        assert not torch.allclose(logits(base), logits(model), atol=1e-2), "training had no effect"
    for name in loaded:
        chat_template = AutoTokenizer.from_pretrained(one_process[name] / "model").chat_template
        assert chat_template == AutoTokenizer.from_pretrained(cache / "models/tiny-llama").chat_template


@pytest.mark.soak
def test_workers_change_no_random_number(fork_server: ForkServer, tmp_path: Path) -> None:
    """A run with DataLoader workers trains the same as without, even after a resume and into the next epoch: workers
    that live for several epochs would draw their seed once, and after a resume once more."""
    changes = {"lora.dropout": 0.1, "train.max_steps": 6, "data.max_samples": 8, "save.strategy": "steps"}
    changes |= {"save.steps": 3, "save.total_limit": 0}
    without, one = (
        fork_server.train(tmp_path / str(count), make_spec({**changes, "train.dataloader_num_workers": count}))
        for count in (0, 1)
    )
    assert losses(one) == losses(without)
    fork_server.resume(one, 3)
    assert losses(one) == losses(without)


def test_evaluation_does_not_change_training(one_process: dict[str, Path]) -> None:
    assert result(one_process["merged"])["eval_loss"] is not None
    assert losses(one_process["merged"]) == losses(one_process["lora"])


def test_packing_takes_fewer_steps_and_learns(one_process: dict[str, Path]) -> None:
    assert len(losses(one_process["packed"])) == 3
    assert result(one_process["packed"])["eval_loss"] is not None
    assert result(one_process["packed"])["tokens"] > 1.5 * result(one_process["lora"])["tokens"]
