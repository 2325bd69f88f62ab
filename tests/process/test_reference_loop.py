"""Losses, gradient norms, learning rates and final weights of the trainer are those of `reference_loop`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import architectures
import pytest
import reference_loop
import torch
from fork_server import ForkServer
from parameters import soak_except
from reference_loop import LoRA, Settings, Trained
from safetensors.torch import load_file
from training_runs import log_text, make_spec, read_metrics
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from backend import registry

# Both sides are fp32 on the CPU and differ in the order of sums only: batches have other shapes, and gradients are
# summed over ranks. These tolerances are relative. Measured over all cases: losses differ by 3.3e-6 at most, gradient
# norms by 2e-5 (torch's clipping divides by the norm plus 1e-6), weights by 1e-4 of the largest update.
LOSS_TOLERANCE = 1e-5  # also absolute: a loss can be near 0
NORM_TOLERANCE = 1e-4
WEIGHT_TOLERANCE = 1e-3
# AdamW divides by sqrt(v) + epsilon: with the usual epsilon of 1e-8, the rounding error of a gradient near 0 becomes an
# update of the size of the learning rate. With this one it does not, so that weights can be compared; and the epsilon
# makes the updates depend on the scale of the gradients, which AdamW would hide otherwise.
EPSILON = 1e-4
SIZES = {
    # Odd sizes, so that the shards of ZeRO and FSDP2 differ in size.
    "odd": {"hidden_size": 42, "intermediate_size": 71, "num_attention_heads": 3, "num_key_value_heads": 1},
    # Sizes that 2 and 3 ranks of tensor or sequence parallelism can split.
    "even": {"hidden_size": 48, "intermediate_size": 78, "num_attention_heads": 6, "num_key_value_heads": 6},
}
VOCABULARY = {"odd": 2051, "even": 2052}


def make_models(tiny: Path, root: Path) -> None:
    """Random Llamas with biases."""
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    torch.manual_seed(7)
    for name, sizes in SIZES.items():
        more = {
            "attention_bias": True,
            "mlp_bias": True,
            "num_hidden_layers": 2,
            "pad_token_id": tokenizer.pad_token_id,
        }
        config = LlamaConfig(**sizes, **more, vocab_size=VOCABULARY[name], max_position_embeddings=512)
        model: Any = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():  # biases and norms too, so that decay would change them
            with torch.no_grad():
                parameter += torch.randn_like(parameter) * 0.05
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)


@pytest.fixture(scope="module")
def models(tiny: Path, root: Path) -> Path:
    """A folder with models."""
    make_models(tiny, root / "models")
    return root / "models"


def words(count: int, salt: int) -> str:
    names = ("RB", "IC", "NJ", "to", "from", "at", "Bern", "Ghent")
    return " ".join(f"{names[(salt * 7 + n * n) % 8]}{(salt + n) % 9}" for n in range(count))


def message(role: str, count: int, salt: int) -> dict[str, str]:
    return {"role": role, "content": words(count, salt)}


def conversations(count: int, offset: int = 0) -> list[dict[str, Any]]:
    """Conversations with 1 to 40 words in a turn of the assistant; every third has a system prompt and two turns."""
    rows = []
    for n in range(offset, offset + count):
        turns = [message("user", 3 + n % 4, n), message("assistant", (1, 40, 5, 17, 2)[n % 5], n + 1)]
        if n % 3 == 2:
            turns = [message("system", 4, n), *turns, message("user", 2, n + 2), message("assistant", 9, n + 3)]
        rows.append({"messages": turns})
    return rows


WEIGHTS = (0.25, 3, 1, 0, 0.002, 40)


def weighted(count: int, offset: int = 0) -> list[dict[str, Any]]:
    """The conversations, some of whose assistant turns have a weight."""
    rows = conversations(count, offset)
    turns = [turn for row in rows for turn in row["messages"] if turn["role"] == "assistant"]
    for n, turn in enumerate(turns):
        if n % 7 < len(WEIGHTS):
            turn["weight"] = WEIGHTS[n % 7]
    return rows


def texts(count: int) -> list[dict[str, Any]]:
    return [{"text": words((12, 90, 3, 33, 60)[n % 5], n)} for n in range(count)]


def pairs(count: int) -> list[dict[str, Any]]:
    return [
        {
            "prompt": [message("user", 3 + n % 4, n)],
            "chosen": [message("assistant", (4, 25, 9)[n % 3], n + 1)],
            "rejected": [message("assistant", (11, 3, 20, 6)[n % 4], n + 2)],
        }
        for n in range(count)
    ]


def labeled(count: int) -> list[dict[str, Any]]:
    sides = ("rejected", "chosen", "chosen")
    return [
        {"prompt": pair["prompt"], "completion": pair[sides[n % 3]], "label": n % 3 > 0}
        for n, pair in enumerate(pairs(count))
    ]


def make_settings(models: Path, model: str = "odd", **changes: Any) -> Settings:
    """Settings whose learning rate, weight decay and clipping have a large effect."""
    more = {"learning_rate": 5e-3, "epsilon": EPSILON, "weight_decay": 0.1, "max_grad_norm": 2.0, **changes}
    if changes.get("stage") in ("kto",):
        more.setdefault("loss_type", "kto")
    return Settings(models / model, **{"rows": conversations(7), **more})


OPTIONS = {
    "data.max_length": "max_length",
    "train.stage": "stage",
    "train.per_device_train_batch_size": "batch_size",
    "train.gradient_accumulation_steps": "accumulation",
    "train.max_steps": "steps",
    "train.seed": "seed",
    "train.learning_rate": "learning_rate",
    "train.lr_scheduler_type": "schedule",
    "train.warmup_steps": "warmup_steps",
    "train.weight_decay": "weight_decay",
    "train.adam_epsilon": "epsilon",
    "train.max_grad_norm": "max_grad_norm",
}
PREFERENCE = {
    "dpo": {
        "preference.beta": "beta",
        "preference.dpo_loss_type": "loss_type",
        "preference.label_smoothing": "label_smoothing",
        "preference.sft_loss_weight": "sft_loss_weight",
    },
    "kto": {
        "preference.beta": "beta",
        "preference.kto_loss_type": "loss_type",
        "preference.desirable_weight": "desirable_weight",
        "preference.undesirable_weight": "undesirable_weight",
    },
    "orpo": {"preference.beta": "beta"},
    "reward": {"preference.center_rewards_coefficient": "center_rewards_coefficient"},
    "sft": {"data.loss_on": "loss_on"},
}


def write_rows(path: Path, rows: Sequence[Any]) -> tuple[str]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return (str(path),)


@dataclass
class Comparison:
    """Trains a run with Footplate and the same with the reference loop."""

    root: Path
    models: Path
    fork_server: ForkServer

    def train(self, name: str, settings: Settings, ranks: int, options: Mapping[str, Any]) -> Path:
        """The folder of a run that trains as `settings` say."""
        named = {**OPTIONS, **PREFERENCE.get(settings.stage, {})}
        made = {key: getattr(settings, field) for key, field in named.items()}
        made |= {"model.source": "path", "model.path": str(settings.model), "data.source": "files"}
        made |= {"data.files": write_rows(self.root / f"{name}.jsonl", settings.rows), "data.max_samples": 0}
        made |= {"data.validation": "none", "method.kind": "full", "save.final_model": True}
        if settings.eval_rows:
            made["data.validation"] = "files"
            made["data.validation_files"] = write_rows(self.root / f"{name}-eval.jsonl", settings.eval_rows)
            made |= {"eval.strategy": "steps", "eval.steps": settings.steps}
            made["eval.per_device_eval_batch_size"] = settings.eval_batch_size
        spec = make_spec({**made, "launch.nproc_per_node": max(ranks, 1), **options})
        return self.fork_server.train(self.root / name, spec, ranks)

    def check(self, name: str, ranks: int = 0, options: Mapping[str, Any] = {}, **changes: Any) -> None:
        """Train both and compare all losses, gradient norms, learning rates, weights, and the eval loss."""
        settings = make_settings(self.models, **changes)
        folder, expected = self.train(name, settings, ranks, options), reference_loop.train(settings)
        compare_steps(folder, expected)
        initial = reference_loop.load(settings).state_dict()
        compare_weights(load_file(folder / "model/model.safetensors"), expected.model.state_dict(), initial)
        if settings.eval_rows:
            (loss,) = [point["eval_loss"] for point in read_metrics(folder) if "eval_loss" in point]
            assert loss == pytest.approx(expected.eval_loss, rel=LOSS_TOLERANCE)


def compare_steps(folder: Path, expected: Trained) -> None:
    points = [point for point in read_metrics(folder) if "loss" in point]
    losses = [point["loss"] for point in points]
    assert losses == pytest.approx(expected.losses, rel=LOSS_TOLERANCE, abs=LOSS_TOLERANCE)
    assert len(points) == 1 or len({round(loss, 4) for loss in losses}) > 1, "the losses of the steps must differ"
    assert [point["learning_rate"] for point in points] == pytest.approx(expected.learning_rates, rel=1e-9)
    if expected.tokens:
        assert [point["tokens"] for point in points] == expected.tokens
    if "grad_norm" in points[0]:  # DeepSpeed's ZeRO-0 reports none
        assert [point["grad_norm"] for point in points] == pytest.approx(expected.grad_norms, rel=NORM_TOLERANCE)


def compare_weights(found: Mapping[str, Any], expected: Mapping[str, Any], initial: Mapping[str, Any]) -> None:
    assert found.keys() == expected.keys()
    largest = max(float((expected[name] - initial[name]).abs().max()) for name in expected)
    assert largest > 1e-3, "the training must change the weights"
    difference = {name: float((found[name] - expected[name]).abs().max()) / largest for name in expected}
    assert not {name: value for name, value in difference.items() if value > WEIGHT_TOLERANCE}


@pytest.fixture(scope="module")
def comparison(root: Path, models: Path, fork_server: ForkServer) -> Comparison:
    return Comparison(root, models, fork_server)


# Cases: changes of the settings and more options. A batch of 7 or more is the whole dataset, so that the order of the
# examples does not matter; in smaller batches, the number of trained tokens differs by a factor of up to 20.
PACKING = {"data.packing": True}
PACKED_ROWS = {**PACKING, "train.per_device_train_batch_size": 1, "train.gradient_accumulation_steps": 64}
ONE_PROCESS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "sft": ({"batch_size": 7}, {}),
    "sft-order": ({"steps": 9, "seed": 3}, {}),
    "sft-all-tokens": ({"batch_size": 7, "loss_on": "all_tokens"}, {}),
    "sft-accumulation": ({"accumulation": 3, "steps": 5}, {}),  # 4 batches in an epoch: 3, and 1 with 1 example
    "sft-truncated": ({"batch_size": 7, "max_length": 60}, {}),
    "sft-unclipped": ({"batch_size": 7, "max_grad_norm": 0.0, "schedule": "linear"}, {}),
    "sft-warmup": ({"batch_size": 7, "steps": 5, "warmup_steps": 0.3}, {}),
    "sft-constant": ({"batch_size": 7, "warmup_steps": 2, "steps": 4, "schedule": "constant_with_warmup"}, {}),
    "sft-betas": (
        {"batch_size": 7, "betas": (0.8, 0.9), "weight_decay": 0.5},
        {"train.adam_beta1": 0.8, "train.adam_beta2": 0.9},
    ),
    "freeze": (
        {"batch_size": 7, "trainable": r"layers\.1\."},
        {"method.kind": "freeze", "method.freeze_trainable_layers": 1},
    ),
    "pretraining": ({"stage": "pretraining", "rows": texts(5), "max_length": 64, "accumulation": 2, "steps": 4}, {}),
    "packing": ({"batch_size": 9, "rows": conversations(9)}, {**PACKING}),
    "packing-accumulation": ({"batch_size": 9, "rows": conversations(9)}, PACKED_ROWS),
    "packing-all-tokens": ({"batch_size": 9, "rows": conversations(9), "loss_on": "all_tokens"}, PACKED_ROWS),
    "packing-pretraining": (
        {"stage": "pretraining", "rows": texts(9), "batch_size": 99, "max_length": 200},
        PACKED_ROWS,
    ),
    "eval": ({"batch_size": 7, "eval_rows": conversations(7, 50)}, {}),
    "weights": (
        {"rows": weighted(7), "accumulation": 2, "batch_size": 1, "eval_rows": weighted(7, 50), "steps": 6},
        {},
    ),
    "weights-all-tokens": ({"rows": weighted(7), "batch_size": 7, "loss_on": "all_tokens"}, {}),
    "weights-packing": ({"rows": weighted(9), "batch_size": 9, "eval_rows": weighted(7, 50)}, PACKING),
    "eval-packing": ({"batch_size": 7, "eval_rows": conversations(7, 50)}, PACKING),
    "dpo": ({"stage": "dpo", "rows": pairs(5), "batch_size": 2, "steps": 4}, {}),
    "dpo-precomputed": (
        {"stage": "dpo", "rows": pairs(5), "batch_size": 5},
        {"preference.precompute_ref_log_probs": True},
    ),
    "dpo-sft": ({"stage": "dpo", "rows": pairs(5), "accumulation": 2, "steps": 4, "sft_loss_weight": 0.7}, {}),
    "dpo-eval": ({"stage": "dpo", "rows": pairs(5), "batch_size": 5, "eval_rows": pairs(7)}, {}),
    "kto": (
        {"stage": "kto", "rows": labeled(9), "accumulation": 2, "steps": 5, "desirable_weight": 1.5, "beta": 0.3},
        {},
    ),
    "kto-apo": (
        {
            "stage": "kto",
            "rows": labeled(5),
            "batch_size": 5,
            "undesirable_weight": 0.7,
            "loss_type": "apo_zero_unpaired",
        },
        {},
    ),
    "orpo": ({"stage": "orpo", "rows": pairs(5), "batch_size": 5, "beta": 0.5}, {}),
    "orpo-accumulation": ({"stage": "orpo", "rows": pairs(5), "accumulation": 2, "steps": 4}, {}),
    "reward": ({"stage": "reward", "rows": pairs(5), "steps": 4, "center_rewards_coefficient": 0.1}, {}),
}
QUICK = {"sft-accumulation", "sft-truncated", "freeze", "pretraining", "packing-all-tokens", "weights"}
QUICK |= {"dpo-sft", "kto", "orpo-accumulation", "reward"}


@pytest.mark.parametrize("name", soak_except(ONE_PROCESS, QUICK))
def test_one_process(comparison: Comparison, name: str) -> None:
    changes, options = ONE_PROCESS[name]
    comparison.check(name, 0, options, **changes)


def test_micro_batches_of_a_model_with_a_vision_tower(comparison: Comparison, tiny: Path) -> None:
    """Its class says that its own loss takes no number of tokens; the Trainer would rely on that."""
    model = architectures.build("gemma4_unified")
    assert model.accepts_loss_kwargs is False
    architectures.save(model, tiny, comparison.models / "gemma4_unified")
    settings = make_settings(comparison.models, "gemma4_unified", batch_size=1, accumulation=3, steps=2)
    compare_steps(comparison.train("vision-tower", settings, 0, {}), reference_loop.train(settings))


SMOOTHED = ("robust", "exo_pair", "aot", "aot_unpaired")


@pytest.mark.parametrize("loss_type", soak_except(registry.DPO_LOSSES, {"robust"}))
def test_dpo_losses(comparison: Comparison, loss_type: str) -> None:
    changes = {"beta": 0.3, "label_smoothing": 0.1 if loss_type in SMOOTHED else 0.0, "loss_type": loss_type}
    comparison.check(f"dpo-{loss_type}", stage="dpo", rows=pairs(5), batch_size=5, **changes)


def strategy(name: str, **parallel: Any) -> dict[str, Any]:
    return {"parallel.strategy": name, **{f"parallel.{key}": value for key, value in parallel.items()}}


DATA_PARALLEL = {
    "ddp": strategy("ddp"),
    "zero0": strategy("zero0"),
    "zero1": strategy("zero1"),
    "zero2": strategy("zero2"),
    "zero2-offload": strategy("zero2", offload_optimizer="cpu"),
    "zero3": strategy("zero3"),
    "zero3-offload": strategy("zero3", offload_optimizer="cpu", offload_param="cpu"),
    "fsdp2": strategy("fsdp2"),
    "fsdp2-offload": strategy("fsdp2", cpu_offload=True),
    "fsdp2-no-reshard": strategy("fsdp2", reshard_after_forward=False),
}
QUICK_DATA_PARALLEL = {("zero3", 2), ("fsdp2", 3)}


@pytest.mark.parametrize(("name", "ranks"), soak_except(product(DATA_PARALLEL, (2, 3)), QUICK_DATA_PARALLEL))
def test_data_parallel(comparison: Comparison, name: str, ranks: int) -> None:
    """Seven examples on 2 or 3 ranks, with micro-batches of unequal numbers of trained tokens, and an eval loss."""
    changes = {"batch_size": 1, "accumulation": 2, "data_parallel": ranks, "steps": 4}
    changes |= {"eval_rows": conversations(7, 50), "eval_batch_size": 2}
    comparison.check(f"{name}-{ranks}", ranks, DATA_PARALLEL[name], **changes)
    assert "WARNING" not in log_text(comparison.root / f"{name}-{ranks}")  # of accelerate, about the accumulation


@pytest.mark.parametrize(("name", "ranks"), soak_except(product(DATA_PARALLEL, (2, 3)), {("ddp", 2)}))
def test_loss_weights_on_ranks(comparison: Comparison, name: str, ranks: int) -> None:
    """The sum of the weights is that of all micro-batches on all ranks; without it, losses are off by a factor."""
    changes = {"rows": weighted(7), "batch_size": 1, "accumulation": 2, "data_parallel": ranks, "steps": 4}
    changes |= {"eval_rows": weighted(7, 50), "eval_batch_size": 2}
    comparison.check(f"weights-{name}-{ranks}", ranks, DATA_PARALLEL[name], **changes)


@pytest.mark.soak
def test_loss_weights_with_tensor_parallelism(comparison: Comparison) -> None:
    changes = {"rows": weighted(6), "eval_rows": weighted(7, 50), "accumulation": 2, "batch_size": 1, "steps": 3}
    comparison.check("weights-tensor", 2, strategy("tensor"), model="even", **changes)


@pytest.mark.soak
def test_hsdp(comparison: Comparison) -> None:
    comparison.check("hsdp", 4, strategy("fsdp2", replicate_size=2), batch_size=1, data_parallel=4)


@pytest.mark.soak
@pytest.mark.parametrize("stage", ["pretraining", "dpo", "kto", "orpo", "reward"])
@pytest.mark.parametrize("name", ["ddp", "zero3", "fsdp2"])
def test_stages_on_two_ranks(comparison: Comparison, name: str, stage: str) -> None:
    """KTO's 8 examples fill the last batches of an epoch: see KNOWN_DEFECTS."""
    rows = {"pretraining": texts(5), "kto": labeled(8)}.get(stage, pairs(5))
    comparison.check(f"{stage}-{name}", 2, DATA_PARALLEL[name], stage=stage, rows=rows, data_parallel=2)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["ddp", "zero2"])
def test_packing_on_two_ranks(comparison: Comparison, name: str) -> None:
    """12 conversations fill 4 packed sequences, two on each rank."""
    options = {**DATA_PARALLEL[name], **PACKED_ROWS}
    comparison.check(f"packing-{name}", 2, options, rows=conversations(12), batch_size=12)


# The ranks share each example.
SPLIT = {"tensor": lambda ranks: strategy("tensor", tensor_parallel_size=ranks)}
SPLIT |= {"zero3-sequence": lambda ranks: strategy("zero3", sequence_parallel_size=ranks)}


@pytest.mark.parametrize(("name", "ranks"), soak_except(product(SPLIT, (2, 3)), set()))
def test_shared_examples(comparison: Comparison, name: str, ranks: int) -> None:
    rows = conversations(6)  # DeepSpeed's loader reads one batch for each rank
    comparison.check(f"{name}-{ranks}", ranks, SPLIT[name](ranks), model="even", rows=rows, batch_size=1, steps=6)


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 3])
def test_tensor_parallel_with_accumulation(comparison: Comparison, ranks: int) -> None:
    comparison.check(
        f"tensor-accumulation-{ranks}", ranks, SPLIT["tensor"](ranks), model="even", accumulation=3, steps=4
    )


SEQUENCE = {"model": "even", "rows": conversations(8), "max_grad_norm": 0.0}


@pytest.mark.soak
@pytest.mark.parametrize("name", ["zero0", "zero1", "zero2"])
def test_gradients_of_sequence_parallelism_below_zero3(comparison: Comparison, name: str) -> None:
    """Their norm too, which DeepSpeed 0.19 multiplies by sequence_parallel_size."""
    comparison.check(f"{name}-gradients", 2, strategy(name, sequence_parallel_size=2), **SEQUENCE)


@pytest.mark.soak
def test_eval_loss_of_sequence_parallelism(comparison: Comparison) -> None:
    options = strategy("zero3", sequence_parallel_size=2)
    comparison.check("sequence-eval", 2, options, eval_rows=conversations(7, 50), **SEQUENCE)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_sequence_parallelism_with_accumulation(comparison: Comparison, name: str) -> None:
    """Micro-batches of unequal numbers of trained tokens, of which transformers averages the means."""
    options = strategy(name, sequence_parallel_size=2)
    comparison.check(f"{name}-sequence-accumulation", 2, options, accumulation=2, steps=4, **SEQUENCE)


@pytest.mark.soak
def test_kto_with_an_incomplete_last_step(comparison: Comparison) -> None:
    """The KL estimates of all ranks count where the last batches of an epoch repeat examples."""
    comparison.check("kto-incomplete", 2, strategy("ddp"), stage="kto", rows=labeled(9), data_parallel=2)


@pytest.mark.soak
@pytest.mark.parametrize("size", [1, 3])
def test_tensor_parallel_eval_loss(comparison: Comparison, size: int) -> None:
    """All ranks evaluate the same examples, and the last batch is incomplete."""
    changes = {"model": "even", "rows": conversations(8), "eval_rows": conversations(7, 50), "eval_batch_size": size}
    comparison.check(f"tensor-eval-{size}", 2, strategy("tensor"), **changes)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_sequence_parallel_over_several_epochs(comparison: Comparison, ranks: int) -> None:
    """All steps of three epochs are trained."""
    options, rows = strategy("zero3", sequence_parallel_size=ranks), conversations(2 * ranks)
    comparison.check(f"sequence-epochs-{ranks}", ranks, options, model="even", rows=rows, steps=3 * ranks)
    assert "Warning" not in log_text(comparison.root / f"sequence-epochs-{ranks}")  # of torch, about all_gather


LORA_CASES = {
    "lora": (0, {}, {}),
    "lora-rslora-plus": (0, {}, {"lora.use_rslora": True, "lora.loraplus_lr_ratio": 4.0}),
    "lora-dpo": (0, {"stage": "dpo", "rows": pairs(5)}, {}),
    "lora-reward": (0, {"stage": "reward", "rows": pairs(5)}, {}),
    "lora-zero3": (2, {"batch_size": 3, "data_parallel": 2}, strategy("zero3")),
    "lora-fsdp2": (2, {"batch_size": 3, "data_parallel": 2}, strategy("fsdp2")),
}


@pytest.mark.parametrize("name", soak_except(LORA_CASES, {"lora"}))
def test_lora(comparison: Comparison, name: str) -> None:
    """During the first step of warmup the learning rate is 0, so checkpoint 1 has the initial adapter."""
    ranks, changes, more = LORA_CASES[name]
    changes = {"batch_size": 7, "warmup_steps": 1, "steps": 4, **changes}
    settings = make_settings(comparison.models, **changes)
    options = {"method.kind": "lora", "lora.r": 4, "lora.alpha": 16.0, "save.strategy": "steps", "save.steps": 1}
    folder = comparison.train(name, settings, ranks, {**options, "save.total_limit": 0, **more})
    initial = load_adapter(folder / "checkpoints/checkpoint-1")
    assert all(tensor.abs().max() > 0 for key, tensor in initial.items() if key.endswith(".lora_a"))
    assert all(tensor.abs().max() == 0 for key, tensor in initial.items() if key.endswith(".lora_b"))
    first = {key.removesuffix(".lora_a"): tensor for key, tensor in initial.items() if key.endswith(".lora_a")}
    lora = LoRA(first, 16.0, more.get("lora.use_rslora", False), more.get("lora.loraplus_lr_ratio", 1.0))
    expected = reference_loop.train(replace(settings, lora=lora))
    compare_steps(folder, expected)
    trained = {key: tensor for key, tensor in expected.model.state_dict().items() if key in initial}
    compare_weights(load_adapter(folder / "model"), trained, initial)


def load_adapter(folder: Path) -> dict[str, Any]:
    """The adapter's tensors under the names that they have in the reference loop."""
    found = {}
    for key, tensor in load_file(folder / "adapter_model.safetensors").items():
        name = key.removeprefix("base_model.model.").replace(".lora_A.weight", ".lora_a")
        found[name.replace(".lora_B.weight", ".lora_b")] = tensor
    return found


def test_reference_is_sensitive(comparison: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    """Classical errors change the results by far more than the tolerances."""
    settings = make_settings(comparison.models, accumulation=3)
    right = reference_loop.train(settings)
    monkeypatch.setattr(reference_loop.NextToken, "averages_batches", True)
    assert abs(reference_loop.train(settings).losses[0] - right.losses[0]) > 1000 * LOSS_TOLERANCE
    monkeypatch.undo()
    monkeypatch.setattr(reference_loop, "decays", lambda parameter: True)
    initial = reference_loop.load(settings).state_dict()
    with pytest.raises(AssertionError, match=r"q_proj\.bias"):
        compare_weights(reference_loop.train(settings).model.state_dict(), right.model.state_dict(), initial)
