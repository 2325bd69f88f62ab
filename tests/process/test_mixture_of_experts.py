"""Mixture-of-experts models: generation before and after training and from the saved model; quantized, frozen and
trainable bytes match the estimate."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import re
import shutil
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import architectures
import pytest
import torch
from fork_server import ForkServer
from parameters import soak_except
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from training_runs import ROUNDING_TOLERANCE, losses, make_spec, result
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaModel
from untrained_models import memory_context, untrained_model

from backend.memory.estimate import device_peak
from backend.modelspec import from_config
from backend.train import trl_trainers
from backend.train.patches import trl_missing_router
from backend.train.quantized import is_quantized
from backend.train.trainers import router_loss_coefficient

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 2048}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
TOKENS = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2}


def write_mixture(root: Path, kind: str, **sizes: float) -> dict[str, str]:
    """Write a small mixture with the tokenizer of the tiny model; returns the options that select it."""
    folder = root / "-".join(["model", kind, *sizes])
    shutil.copytree(root / "cache/models/tiny-llama", folder)
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **{**SIZES, **HEADS, **EXPERTS, **TOKENS, **sizes})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return {"model.source": "path", "model.path": str(folder)}


@pytest.fixture(scope="module")
def mixtures(root: Path, fork_server: ForkServer) -> Mapping[str, dict[str, str]]:
    return {kind: write_mixture(root, kind) for kind in ("qwen3_moe", "mixtral")}


@pytest.mark.parametrize("kind", soak_except(("qwen3_moe", "mixtral"), ("qwen3_moe",)))
def test_generates_before_and_after_training_and_when_saved(
    root: Path, fork_server: ForkServer, mixtures: Mapping[str, dict[str, str]], kind: str
) -> None:
    """The router's auxiliary loss needs complete sequences, so it must be off during generation and in the saved
    config."""
    outputs = {"save.final_model": True, "eval.num_generations": 2, "eval.max_new_tokens": 4}
    folder = fork_server.train(root / f"run-{kind}", make_spec({**mixtures[kind], **outputs, "method.kind": "full"}))
    assert len(result(folder)["samples"]) == 2
    assert losses(folder)
    assert not json.loads((folder / "model/config.json").read_text()).get("output_router_logits")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    input_ids = torch.arange(3, 40)[None]
    assert (
        model.generate(input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=4).shape[1]
        > input_ids.shape[1]
    )


def test_validation_loss_is_independent_of_batches_and_processes(root: Path, fork_server: ForkServer) -> None:
    """It does not include the router's auxiliary loss, which is computed for whole batches; the training loss does.
    TRL leaves out examples without labels, such as those that complete the last batches, if training is packed."""
    changes = {**write_mixture(root, "qwen3_moe", router_aux_loss_coef=1.0), "method.kind": "full"}
    changes |= {"train.learning_rate": 1e-12, "train.max_steps": 1}
    changes |= {"eval.strategy": "steps", "eval.steps": 1, "data.max_length": 64, "data.max_samples": 5}
    found = []
    for size, ranks in ((1, 0), (7, 0), (2, 3)):
        parallel = {"parallel.strategy": "ddp", "launch.nproc_per_node": ranks, "data.packing": True} if ranks else {}
        spec = make_spec({**changes, **parallel, "eval.per_device_eval_batch_size": size})
        values = result(fork_server.train(root / f"eval-{size}-{ranks}", spec, ranks))
        assert values["router_loss_weight"] == 1
        found.append(values["eval_loss"])
    assert found[1:] == [pytest.approx(found[0], abs=ROUNDING_TOLERANCE)] * 2, found


def test_validation_loss_of_dpo(root: Path, fork_server: ForkServer, mixtures: Mapping[str, dict[str, str]]) -> None:
    """It is log 2 for a model that equals its reference, so it does not include the router's auxiliary loss either."""
    changes = {**mixtures["qwen3_moe"], "method.kind": "full", "train.learning_rate": 1e-12, "train.max_steps": 1}
    changes |= {"train.stage": "dpo", "data.builtin": "train-pairs", "eval.strategy": "steps", "eval.steps": 1}
    folder = fork_server.train(root / "eval-dpo", make_spec({**changes, "data.max_samples": 5}))
    assert result(folder)["eval_loss"] == pytest.approx(math.log(2), abs=1e-5) and losses(folder)[1] > 0.694


@pytest.mark.parametrize("stage", ["sft", "dpo", "kto", "orpo"])
def test_the_weight_of_the_router_loss_is_read_from_every_trainer(stage: str) -> None:
    """ORPO's trainer adds the loss if config.json has output_router_logits, and has another name for its weight."""
    classes = trl_trainers.TRL[stage]
    source = inspect.getsource(getattr(importlib.import_module(f"{classes.module}_trainer"), classes.trainer))
    name = str(re.search(r"self\.(\w*aux_loss_coef) = ", source)[1])  # type: ignore[index]
    assert router_loss_coefficient(SimpleNamespace(**{name: 0.5}, aux_loss_enabled=True)) == 0.5
    assert router_loss_coefficient(SimpleNamespace(**{name: 0.5}, aux_loss_enabled=False)) == 0


@pytest.mark.parametrize(("kind", "has_loss"), [("dots1", False), ("qwen3_moe", True)])
def test_orpo_uses_the_router_loss_of_models_that_compute_one(kind: str, has_loss: bool) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 8, "num_hidden_layers": 2}
    experts = {"num_experts": 4, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    config = AutoConfig.for_model(
        kind, vocab_size=30, **sizes, **experts, **heads, first_k_dense_replace=1, output_router_logits=True
    )
    model = AutoModelForCausalLM.from_config(config)
    tokens = torch.arange(12)[None]
    assert (model(tokens, output_router_logits=True).get("aux_loss") is not None) is has_loss
    trl_missing_router.apply(SimpleNamespace(), model)
    assert model.config.output_router_logits is has_loss


@pytest.mark.parametrize(
    ("kind", "keys", "expected"),
    [
        ("llama", {"router_aux_loss_coef": 0.1}, (0.0, False)),
        ("llama", {}, (0.0, False)),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}, (None, False)),
        ("zaya", {"num_experts": 4, "num_experts_per_tok": 1}, (None, False)),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2}, (None, True)),
    ],
)
def test_a_router_loss_without_routers_or_weight_is_off(
    kind: str, keys: dict[str, Any], expected: tuple[Any, bool]
) -> None:
    """Their config.json has output_router_logits, which a training would follow."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 8, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    config = AutoConfig.for_model(kind, vocab_size=30, **sizes, **heads, **keys, output_router_logits=True)
    model, arguments = AutoModelForCausalLM.from_config(config), SimpleNamespace(router_aux_loss_coef=None)
    reference = AutoModelForCausalLM.from_config(deepcopy(config))
    trl_missing_router.apply(arguments, model, reference)
    assert (arguments.router_aux_loss_coef, model.config.output_router_logits) == expected
    assert not reference.config.output_router_logits, "TRL uses no router loss of the reference model"


@pytest.mark.filterwarnings("ignore::FutureWarning")  # as in logging_setup.py
@pytest.mark.parametrize("adapter", [False, True])
def test_models_of_older_code_keep_their_router_loss(adapter: bool) -> None:
    """Such code gives its router logits itself, so transformers knows no classes of routers."""

    class OlderModel(LlamaModel):
        def forward(self, *inputs: Any, output_router_logits: bool = False, **more: Any) -> Any:
            return super().forward(*inputs, **more)

    config = LlamaConfig(
        vocab_size=30, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model: Any = AutoModelForCausalLM.from_config(config)
    model.model = OlderModel(config)
    assert trl_missing_router.has_router_loss(get_peft_model(model, LoraConfig()) if adapter else model)


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::FutureWarning")  # as in logging_setup.py
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_an_adapter_with_rslora_on_stacked_experts_is_saved_as_it_was_trained(
    mixtures: Mapping[str, dict[str, str]], kind: str, tmp_path: Path
) -> None:
    """peft trains the fused gate and up projections with twice the rank and alpha, so their scale is larger by the
    square root of 2. Its patterns in the config keep that for peft."""
    trained = untrained_model({**mixtures[kind], "lora.use_rslora": True, "lora.alpha": 8.0}).eval()
    for name, parameter in trained.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    trained.save_pretrained(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(mixtures[kind]["model.path"], dtype=torch.float32)
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        without, expected = base.eval()(tokens).logits, trained.float()(tokens).logits
        saved = PeftModel.from_pretrained(base, str(tmp_path)).eval()(tokens).logits
    torch.testing.assert_close(saved, expected)
    assert (saved - without).abs().max() > 0.1


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::FutureWarning")  # as in logging_setup.py
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_quantized_bytes_match_the_estimate(mixtures: Mapping[str, dict[str, str]], kind: str) -> None:
    changes = {**mixtures["qwen3_moe"], "method.quantization": kind}
    model = untrained_model(changes)
    shape = from_config(model.config.to_dict())
    rows = {row.name: row.bytes for row in device_peak(memory_context(make_spec(changes), shape))[0]}
    quantized = [module for module in model.modules() if is_quantized(module) and not hasattr(module, "base_layer")]
    assert len(quantized) == 2 * 4, "the attention projections of two layers"
    assert rows["Quantized parameters"] == sum(module.weight.nbytes for module in quantized)
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    assert rows["Quantized parameters"] + rows["Frozen parameters"] == frozen
    assert rows["Trainable parameters"] == sum(p.nbytes for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("kind", soak_except(("afmoe", "ernie4_5_moe", "laguna"), ("laguna",)))
def test_ddp_trains_a_mixture_whose_router_biases_get_no_gradient(
    kind: str, tiny: Path, fork_server: ForkServer, tmp_path: Path
) -> None:
    """transformers loads them as trainable parameters, on which DDP's second step failed."""
    folder = architectures.save(architectures.build(kind), tiny, tmp_path / "model")
    options = {"model.source": "path", "model.path": str(folder), "method.kind": "full", "save.final_model": True}
    spec = make_spec({**options, "parallel.strategy": "ddp", "launch.nproc_per_node": 2})
    run = fork_server.train(tmp_path / "run", spec, 2)
    before, after = (load_file(path / "model.safetensors") for path in (folder, run / "model"))
    biases = [name for name in before if name.endswith(("correction_bias", "expert_bias"))]
    assert biases and all(torch.equal(before[name].float(), after[name].float()) for name in biases)


def test_experts_whose_rows_are_no_multiple_of_16_bytes_are_trained(root: Path, fork_server: ForkServer) -> None:
    """torch's grouped_mm accepts 12 elements in fp32, but not in bf16; tensor parallelism divides 24 into 12."""
    model = write_mixture(root, "qwen3_moe", moe_intermediate_size=12)
    found = {}
    for precision in ("fp32", "pure_bf16"):
        spec = make_spec({**model, "method.kind": "full", "precision.compute": precision, "train.max_steps": 2})
        found[precision] = losses(fork_server.train(root / f"unaligned-{precision}", spec))
    assert found["pure_bf16"] == pytest.approx(found["fp32"], rel=0.01)
