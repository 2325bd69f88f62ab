"""Model shapes from config.json, compared with the counts of transformers and peft on the meta device."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from parameters import soak_except
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from backend import presets, registry
from backend.config import Method, RunSpec
from backend.config.method import Lora
from backend.config.options import edit
from backend.machine import machines
from backend.modelspec import ARCHITECTURES, UnknownArchitecture, from_config, lora_modules, trainable_parameters
from backend.preflight import preflight
from backend.rules.distributed.ddp import WITHOUT_GRADIENT
from backend.train import adapters

SMALL = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
MIXTURES = ("mixtral", "qwen3_moe", "olmoe")
MOE_FIELDS = {"num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"}
CONFIG_VARIANTS: dict[str, list[dict[str, Any]]] = {
    "llama": [{}, {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}],
    "qwen2": [{}, {"tie_word_embeddings": True}],
    "gpt2": [{}, {"n_inner": 200}],
    "gpt_neox": [{}, {"attention_bias": False}],
    "phi": [{"num_key_value_heads": 8}],
}
CASES = [(kind, more) for kind in ARCHITECTURES for more in CONFIG_VARIANTS.get(kind, [{}])]


def build_model(kind: str, more: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """A config as it is saved, and a model of it on the meta device."""
    with_head_dim = ("llama", "qwen3", "gemma", "gemma2", "gemma3_text", "granite", "mixtral", "qwen3_moe")
    drop = {*(() if kind in with_head_dim else ("head_dim",)), *(() if kind in MIXTURES else MOE_FIELDS)}
    config = AutoConfig.for_model(kind, **{k: v for k, v in {**SMALL, **more}.items() if k not in drop})
    with torch.device("meta"):
        return config.to_dict(), AutoModelForCausalLM.from_config(config)


def count_parameters(model: Any, trainable: bool = False) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not trainable)


@pytest.mark.parametrize(("kind", "more"), CASES)
def test_parameters_are_exact(kind: str, more: dict[str, Any]) -> None:
    config, model = build_model(kind, more)
    shape = from_config(config)
    assert shape.parameters == count_parameters(model)
    names = {name for name, module in model.named_modules() if list(module.parameters(recurse=False))}
    assert {leaf.path for leaf in shape.all_modules() if leaf.parameters} <= names
    assert names - {leaf.path for leaf in shape.all_modules()} == set()


IN_MAKE_TEST = {("all-linear", False), ("attention", False), ("every", True)}
# peft warns of tied weights, GPT-2's transposed layers and stacked experts; none of it changes a count.
IGNORE_LIBRARY_WARNINGS = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::RuntimeWarning"
)


@IGNORE_LIBRARY_WARNINGS
@pytest.mark.parametrize(("kind", "more"), CASES)
@pytest.mark.parametrize(
    ("targets", "dora"),
    soak_except(product(("all-linear", "attention", "custom", "every"), (False, True)), IN_MAKE_TEST),
)
def test_lora_is_exact(kind: str, more: dict[str, Any], targets: str, dora: bool) -> None:
    said, model = build_model(kind, more)
    shape = from_config(said)
    names = {"custom": shape.lora_target_names[:2], "every": shape.lora_target_names}.get(targets, ())
    lora_targets = "custom" if names else targets
    lora = Lora(r=4, targets=lora_targets, target_modules=names, use_dora=dora)
    wanted = {leaf.path for leaf in lora_modules(lora, shape, each_layer=True)}
    modules: Any = "all-linear" if targets == "all-linear" else sorted(wanted)
    if names:
        modules = list(names)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=modules, use_dora=dora)
    if kind in MIXTURES and targets in ("all-linear", "every") and dora:  # rule ADP007
        with pytest.raises(ValueError, match="use_dora"):
            get_peft_model(model, config)
        return
    adapter = get_peft_model(model, config)
    assert trainable_parameters(RunSpec(lora=lora), shape) == count_parameters(adapter, trainable=True)


@IGNORE_LIBRARY_WARNINGS
@pytest.mark.parametrize(("kind", "more"), CASES)
def test_modules_to_save_and_freeze_are_exact(kind: str, more: dict[str, Any]) -> None:
    config, model = build_model(kind, more)
    shape = from_config(config)
    embedding = shape.non_layer_modules[0].path.rpartition(".")[2]
    last = shape.non_layer_modules[-2].path.rpartition(".")[2]
    for layers, also in ((2, ()), (-1, (embedding,)), (1, ("lm_head",)), (0, (last,))):
        method = Method(kind="freeze", freeze_trainable_layers=layers, freeze_extra_modules=also)
        adapters.apply_method(RunSpec(method=method), model.requires_grad_(True), "fp32")
        assert trainable_parameters(RunSpec(method=method), shape) == count_parameters(model, trainable=True)
    lora = Lora(r=2, modules_to_save=(embedding, "lm_head"))
    adapter = get_peft_model(
        model,
        LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear", modules_to_save=[embedding, "lm_head"]),
    )
    assert trainable_parameters(RunSpec(lora=lora), shape) == count_parameters(adapter, trainable=True)


@pytest.mark.parametrize("name", registry.BUILTIN_MODELS)
def test_builtin_models_are_known_before_they_are_created(name: str) -> None:
    row = registry.BUILTIN_MODELS[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**row.config))
    assert from_config(row.config).parameters == row.parameters == count_parameters(model)


def test_published_models_have_their_published_size() -> None:
    qwen = {
        "model_type": "qwen2",
        "num_hidden_layers": 24,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    }
    assert from_config(qwen).parameters == 494_032_768
    llama = {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    }
    assert from_config(llama).parameters == 8_030_261_248
    assert from_config({"model_type": "wrapper", "text_config": llama}).parameters == 8_030_261_248
    assert from_config(registry.HUB_CONFIGS["qwen/qwen3-30b-a3b"]).parameters == 30_532_122_624
    assert from_config(registry.HUB_CONFIGS["mistralai/mixtral-8x7b-v0.1"]).parameters == 46_702_792_704
    assert from_config(registry.HUB_CONFIGS["qwen/qwen3-235b-a22b"]).parameters == 235_093_634_560
    assert from_config(registry.HUB_CONFIGS["mistralai/mixtral-8x22b-v0.1"]).parameters == 140_620_634_112
    assert from_config(registry.HUB_CONFIGS["allenai/olmoe-1b-7b-0924"]).parameters == 6_919_161_856


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({}, "model_type"),
        ({"model_type": "bert"}, "bert"),
        ({"model_type": "llama"}, "hidden_size"),
        ({"model_type": "llama", "hidden_size": "wide"}, "not a number"),
        ({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 0, "num_hidden_layers": 1}, "not a number"),
        ({"model_type": "deepseek_v3", "n_routed_experts": 8}, "experts"),
        ({"model_type": "qwen3_moe", "num_experts": 8, "decoder_sparse_step": 2}, "experts in only some layers"),
    ],
)
def test_unknown_architectures_give_a_reason(config: dict[str, Any], word: str) -> None:
    with pytest.raises(UnknownArchitecture, match=word):
        from_config(config)


@pytest.mark.parametrize(
    ("config", "slides"),
    [
        ({"model_type": "llama"}, False),
        ({"model_type": "mistral"}, True),
        ({"model_type": "mistral", "sliding_window": None}, False),
        ({"model_type": "qwen2", "sliding_window": 4096}, False),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True}, False),  # from layer 28 on
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 1}, True),
        ({"model_type": "gemma3_text"}, True),
        ({"model_type": "phi3", "sliding_window": 2047}, True),
        ({"model_type": "qwen3", "layer_types": ["full_attention"] * 2}, False),
        ({"model_type": "gemma2", "layer_types": ["full_attention", "sliding_attention"]}, True),
    ],
)
def test_sliding_windows_match_transformers(config: dict[str, Any], slides: bool) -> None:
    small = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 8}
    assert from_config({**small, "intermediate_size": 8, **config}).has_sliding_window == slides
    config_object = AutoConfig.for_model(**small, **config)
    types = getattr(config_object, "layer_types", None)
    window = getattr(config_object, "sliding_window", None)
    assert (any(name != "full_attention" for name in types) if types else bool(window)) == slides


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H100 PCIe", "fp16", 756),
        ("NVIDIA H200", "fp32", 0),
        ("NVIDIA A10G", "bf16", 0),
        ("NVIDIA A10", "bf16", 125),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA L40", "bf16", 0),
        ("Tesla V100-SXM2-16GB", "bf16", 0),
        ("Tesla T4", "fp16", 65),
        ("NVIDIA GeForce RTX 4090", "bf16", 165),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", 0),
        ("NVIDIA GeForce RTX 4090 D", "bf16", 0),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", 0),
        ("NVIDIA GH200 480GB", "bf16", 0),
        ("", "bf16", 0),
    ],
)
def test_peak_flops(name: str, dtype: str, tflops: int) -> None:
    assert registry.peak_flops(name, dtype) == tflops * 10**12


@pytest.mark.parametrize(
    ("name", "memory", "watts", "nvlink"),
    [
        ("NVIDIA A100-PCIE-40GB", 1555, 250, 0),
        ("NVIDIA A100 80GB PCIe", 1935, 300, 0),
        ("NVIDIA A100-SXM4-40GB", 1555, 400, 300),
        ("NVIDIA A100-SXM4-80GB", 2039, 400, 300),
        ("NVIDIA A800 80GB PCIe", 1935, 300, 0),
        ("NVIDIA A800-SXM4-80GB", 2039, 400, 200),
        ("NVIDIA H100 80GB HBM3", 3350, 700, 450),
        ("NVIDIA H100 NVL", 3900, 400, 0),
        ("NVIDIA H200", 4800, 700, 450),
        ("NVIDIA H200 NVL", 4800, 600, 0),
    ],
)
def test_cards_of_one_chip_are_told_apart(name: str, memory: int, watts: int, nvlink: int) -> None:
    """By the names that NVIDIA's driver reports."""
    found = registry.gpu_model(name)
    assert found is not None and (found.memory, found.watts, found.nvlink) == (memory, watts, nvlink)


@pytest.mark.parametrize(("kind", "end"), [("lora", "trainable (adapters included)"), ("full", "trainable")])
def test_the_summary_of_a_plan_has_the_trainable_parameters(kind: str, end: str) -> None:
    spec = edit(presets.presets()[0].spec, {"model.builtin": "tiny-llama", "method.kind": kind})
    summary = preflight(spec, presets.presets()[0].machine, Path("/nowhere")).summary
    assert re.search(r"; [\d.]+ [KM]? ?of [\d.]+ M parameters are " + re.escape(end) + "$", summary), summary


def test_flops_of_a_plan() -> None:
    """What the page needs for the MFU is saved with a run on devices with a known peak, for stages that train on every
    token."""
    spec, machine = next(p.spec for p in presets.presets() if p.name == "full-8b-fsdp2"), machines()["8x80gb"]
    expected = preflight(spec, machine, Path.cwd()).expected
    assert expected is not None
    assert expected["peak_flops"] == 8 * 989 * 10**12
    assert expected["flops_per_token"] == 6 * (8_030_261_248 - 128_256 * 4096 - 65 * 4096)  # no embeddings and norms
    for changes in ({"train.stage": "dpo"}, {"precision.compute": "fp32"}, {"method.kind": "freeze"}):
        other = preflight(edit(spec, changes), machine, Path.cwd()).expected or {}
        assert "peak_flops" not in other


def test_variants_without_a_formula_are_counted_by_transformers() -> None:
    """Their modules would be missing, for example among those that get no gradient from text."""
    for kind, more in (("gpt2", {"add_cross_attention": True}), ("phi", {"qk_layernorm": True})):
        with pytest.raises(UnknownArchitecture, match="no formula"):
            from_config({**SMALL, "model_type": kind, **more})
    assert WITHOUT_GRADIENT.search("transformer.h.0.crossattention.c_attn")
    assert not WITHOUT_GRADIENT.search("model.local_encoder.cross_attn_layers.0.q_proj"), "BLT's get one"
