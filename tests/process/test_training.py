"""Real trainings of a tiny model: torchrun with two gloo ranks, and the same alone. Launches are shared by tests."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import (
    REORDERING_TOLERANCE,
    TorchrunLaunch,
    last_step,
    log_text,
    losses,
    make_run_folder,
    read_metrics,
    request_stop,
    result,
    same_losses,
    train_in_one_process,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

STEPS = 10
# Dropout makes every random number count; rows differ in length; ranks and accumulation share the batch.
RESUMED = {
    "lora.dropout": 0.1,
    "train.max_steps": STEPS,
    "save.strategy": "steps",
    "save.steps": 4,
    "save.total_limit": 0,
    "parallel.strategy": "ddp",
    "logging.run_name": "resumed",
}
EQUAL = {"train.max_steps": 3, "train.per_device_train_batch_size": 2, "parallel.strategy": "ddp"}
ALONE = {"train.per_device_train_batch_size": 4, "parallel.strategy": "single"}
METHODS: dict[str, dict[str, Any]] = {
    "full": {"method.kind": "full"},
    "lora": {"method.kind": "lora", "lora.r": 4},
    "freeze": {
        "method.kind": "freeze",
        "method.freeze_trainable_layers": 1,
        "method.freeze_extra_modules": ("lm_head",),
    },
}

# Other ways to the same steps: half the batch twice, activations computed again, batches made in another process.
FRUGAL = {
    "train.per_device_train_batch_size": 2,
    "train.gradient_accumulation_steps": 2,
    "train.activation_checkpointing": True,
    "train.dataloader_num_workers": 1,
    "data.dataset_num_proc": 2,
}
# What changes the losses, but must work together.
MANY_OPTIONS = {
    "train.max_steps": 6,
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
    """Empty at first: the first launch makes its model itself."""
    return root / "cache"


@pytest.fixture(scope="module")
def uninterrupted(root: Path, cache: Path) -> Path:
    """Ten steps on two ranks, with a saved model and answers."""
    more = {"save.final_model": True, "eval.num_generations": 3, "eval.max_new_tokens": 4}
    folder = make_run_folder(root, "uninterrupted", {**RESUMED, **more})
    TorchrunLaunch(folder, cache, 2).wait_for_exit()
    return folder


@pytest.fixture(scope="module")
def alone(root: Path, cache: Path) -> dict[str, Path]:
    """What one process does, one after another: each method, and what is told below."""
    specs = {name: {**EQUAL, **ALONE, **METHODS[name]} for name in METHODS}
    specs["merged"] = {"save.final_model": True, "save.merge_adapter": True, "train.learning_rate": 1e-2}
    specs["adapter"] = {"save.final_model": True, "train.learning_rate": 1e-2}
    specs["saved"] = {"method.kind": "full", "save.final_model": True, "train.learning_rate": 1e-2}
    specs["packed"] = {"data.packing": True, "eval.strategy": "steps", "eval.steps": 3}
    specs["frugal"] = {**EQUAL, **ALONE, **METHODS["full"], **FRUGAL}
    specs["many"] = {**MANY_OPTIONS, "save.strategy": "steps", "save.steps": 2, "save.total_limit": 1}
    specs["pretraining"] = {"train.stage": "pretraining"}
    specs["from_scratch"] = {"save.strategy": "steps", "save.steps": 2, "train.max_steps": 4}
    folders = {name: make_run_folder(root, name, spec) for name, spec in specs.items()}
    log = train_in_one_process(cache, *folders.values(), f"{folders['from_scratch']}|--from-scratch")
    (root / "log.txt").write_text(log)
    return folders


def test_a_run_leaves_a_result_and_a_model(uninterrupted: Path) -> None:
    found = result(uninterrupted)
    assert found["steps"] == STEPS
    assert found["exact_match_before"] == found["exact_match_after"] == 0
    assert len(found["samples"]) == 3
    assert all(set(s) == {"prompt", "reference", "before", "after"} for s in found["samples"])
    assert 0 < found["trainable_parameters"] < found["parameters"]
    assert len(found["peak_bytes"]) == 2
    assert found["reserved_bytes"] == [None, None], "of a device's memory, and this is a CPU"
    assert found["tokens"] > 0
    assert sorted(losses(uninterrupted)) == list(range(1, STEPS + 1))
    assert all(p["tokens_per_second"] > 0 for p in read_metrics(uninterrupted))
    progress = json.loads((uninterrupted / "progress.json").read_text())
    assert (progress["phase"], progress["step"], progress["max_steps"]) == ("done", STEPS, STEPS)
    assert progress["first_step_time"] < progress["time"]
    kept = {p.name for p in (uninterrupted / "checkpoints").iterdir()}
    assert kept == {"checkpoint-4", "checkpoint-8", "checkpoint-10"}
    assert all((uninterrupted / "checkpoints" / name / "complete").exists() for name in kept)


def test_the_log_is_calm(uninterrupted: Path) -> None:
    lines = log_text(uninterrupted).splitlines()
    assert len(lines) < 40, "\n".join(lines)
    assert not [line for line in lines if "Warning" in line or "it/s]" in line]
    assert not [line for line in lines if line.startswith("[default1]")], "only rank 0 speaks"


@pytest.fixture(scope="module")
def stopped(root: Path, cache: Path) -> Path:
    """Stopped with saving after some steps, then started again."""
    folder = make_run_folder(root, "stopped", {**RESUMED, "save.strategy": "no"})
    launch = TorchrunLaunch(folder, cache, 2)
    launch.wait_for(lambda: last_step(folder) >= 3)
    request_stop(folder, "save")
    launch.wait_for_exit()
    assert 3 <= last_step(folder) < STEPS, "too quick for this test, or never stopped"
    assert not (folder / "result.json").exists()
    shutil.copy(folder / "metrics.jsonl", folder / "metrics.first")
    (folder / "stop").unlink()
    TorchrunLaunch(folder, cache, 2).wait_for_exit()
    return folder


def test_a_stopped_run_continues_with_the_same_losses(uninterrupted: Path, stopped: Path) -> None:
    assert losses(stopped) == same_losses(losses(uninterrupted))
    begun = [p["step"] for p in read_metrics(stopped) if p.get("event") == "resumed"]
    assert begun == [max(json.loads(x)["step"] for x in (stopped / "metrics.first").read_text().splitlines())]
    assert result(stopped)["steps"] == STEPS


@pytest.fixture(scope="module")
def killed(root: Path, cache: Path) -> Path:
    """Killed after its first checkpoint, with a half-written one and a torn line left, then started again."""
    folder = make_run_folder(root, "killed", RESUMED)
    launch = TorchrunLaunch(folder, cache, 2)
    launch.wait_for(lambda: (folder / "checkpoints/checkpoint-4/complete").exists())
    launch.kill()
    shutil.rmtree(folder / "checkpoints/checkpoint-8", ignore_errors=True)
    shutil.copytree(folder / "checkpoints/checkpoint-4", folder / "checkpoints/checkpoint-9")
    (folder / "checkpoints/checkpoint-9/complete").unlink()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    TorchrunLaunch(folder, cache, 2).wait_for_exit()
    return folder


def test_a_killed_run_continues_from_the_last_complete_checkpoint(uninterrupted: Path, killed: Path) -> None:
    lines = (killed / "metrics.jsonl").read_text().splitlines()
    torn = lines.index('{"step": 5, "lo')
    assert json.loads(lines[torn + 1]) == {"event": "resumed", "step": 4, "time": json.loads(lines[torn + 1])["time"]}
    lines.pop(torn)
    (killed / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert losses(killed) == same_losses(losses(uninterrupted))
    assert not (killed / "checkpoints/checkpoint-9").exists()


def test_from_scratch_begins_at_step_0(alone: dict[str, Path]) -> None:
    found = read_metrics(alone["from_scratch"])
    again = [n for n, p in enumerate(found) if p.get("event") == "resumed"]
    assert [found[n]["step"] for n in again] == [0]
    first, second = found[: again[0]], found[again[0] + 1 :]
    assert [p["loss"] for p in first] == same_losses([p["loss"] for p in second])
    assert [p["step"] for p in second] == [1, 2, 3, 4]


@pytest.fixture(scope="module")
def shared(root: Path, cache: Path) -> dict[str, Path]:
    """Each method on two ranks, with the same effective batch as alone."""
    folders = {name: make_run_folder(root, f"{name}-ddp", {**EQUAL, **METHODS[name]}) for name in METHODS}
    for folder in folders.values():
        TorchrunLaunch(folder, cache, 2).wait_for_exit()
    return folders


@pytest.mark.parametrize("name", METHODS)
def test_two_ranks_learn_what_one_learns(alone: dict[str, Path], shared: dict[str, Path], name: str) -> None:
    one, two = losses(alone[name]), losses(shared[name])
    assert len(one) == 3
    assert len({round(loss, 6) for loss in one.values()}) == 3, "rows that are all alike would prove nothing"
    assert two == same_losses(one, REORDERING_TOLERANCE)
    assert result(alone[name])["trainable_parameters"] == result(shared[name])["trainable_parameters"]


def test_methods_train_what_they_say(alone: dict[str, Path]) -> None:
    trained = {name: result(alone[name])["trainable_parameters"] for name in METHODS}
    whole = result(alone["full"])["parameters"]
    layer = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 352 + 2 * 128
    assert trained["full"] == whole
    assert trained["freeze"] == layer + 2048 * 128
    assert trained["lora"] == 4 * 4 * (2 * (128 + 128) + 2 * (128 + 64) + 3 * (128 + 352))


def test_frugal_ways_learn_the_same(alone: dict[str, Path]) -> None:
    assert losses(alone["frugal"]) == same_losses(losses(alone["full"]), REORDERING_TOLERANCE)


def test_many_options_at_once(alone: dict[str, Path]) -> None:
    """bf16, best checkpoint and a wholly trained head among them; the best and the newest checkpoint are kept."""
    found = [p for p in read_metrics(alone["many"]) if "eval_loss" in p]
    assert len(found) == 6
    saved = {p["step"]: p["eval_loss"] for p in found if p["step"] % 2 == 0}
    kept = {int(p.name.rpartition("-")[2]) for p in (alone["many"] / "checkpoints").iterdir() if p.is_dir()}
    assert kept == {6, min(saved, key=lambda step: saved[step])}
    assert result(alone["many"])["trainable_parameters"] > 2048 * 128


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(3, 20)[None]).logits
    return found


def test_saved_models_load(alone: dict[str, Path], cache: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(cache / "models/tiny-llama")
    loaded = {
        name: AutoModelForCausalLM.from_pretrained(alone[name] / "model") for name in ("merged", "saved", "adapter")
    }
    assert (alone["adapter"] / "model/adapter_model.safetensors").exists()
    assert not (alone["merged"] / "model/adapter_model.safetensors").exists()
    assert torch.allclose(logits(loaded["merged"]), logits(loaded["adapter"]), atol=1e-4)
    for model in loaded.values():
        assert not torch.allclose(logits(base), logits(model), atol=1e-2), "nothing was learned"
    for name in loaded:
        kept = AutoTokenizer.from_pretrained(alone[name] / "model").chat_template
        assert kept == AutoTokenizer.from_pretrained(cache / "models/tiny-llama").chat_template


def test_packing_takes_fewer_steps_and_learns(alone: dict[str, Path]) -> None:
    assert len(losses(alone["packed"])) == 3
    assert result(alone["packed"])["eval_loss"] is not None
    assert result(alone["packed"])["tokens"] > 1.5 * result(alone["adapter"])["tokens"]


def test_pretraining_learns_every_token(alone: dict[str, Path]) -> None:
    assert len(losses(alone["pretraining"])) == 3
