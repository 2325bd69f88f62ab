"""LoRA variants and kernels: each has its effect, and the saved adapter restores the trained model."""

from __future__ import annotations

import json
import shutil
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import architectures
import huggingface_hub
import pytest
import torch
from fork_server import ForkServer, write_run
from parameters import soak_except
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from training_runs import (
    REORDERING_TOLERANCE,
    TINY_RUN,
    log_text,
    losses,
    make_engine,
    make_spec,
    result,
    same_losses,
)
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from untrained_models import tokenizer, untrained_model

from backend.config.options import edit
from backend.train import adapters, data, device, kernels, lora, trainers
from backend.train.run_log import TrainError

# peft uses a deprecated transformers attribute; the trainer filters these warnings too.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
# A constant, high learning rate, so that a few steps have a visible effect.
FAST_LR = {"train.lr_scheduler_type": "constant", "train.learning_rate": 1e-2, "save.final_model": True}
PAIRS = {"train.stage": "dpo", "data.builtin": "train-pairs"}
# All variants that can be combined. The saved adapter still belongs to the original base weights.
ALL_VARIANTS = {
    "lora.init": "pissa_fast",
    "lora.use_dora": True,
    "lora.use_rslora": True,
    "lora.loraplus_lr_ratio": 4.0,
    "lora.modules_to_save": ("norm",),
    "lora.alpha": 8.0,
}


@pytest.fixture(scope="module")
def trained(root: Path, fork_server: ForkServer) -> Any:
    """A function that trains a spec with these changes and returns its folder; the same changes are trained once."""
    made: dict[str, Path] = {}

    def train(changes: Mapping[str, Any], ranks: int = 0) -> Path:
        key = json.dumps({**changes, "ranks": ranks}, sort_keys=True)
        if key not in made:
            made[key] = fork_server.train(root / f"run-{len(made)}", make_spec({**FAST_LR, **changes}), ranks)
        return made[key]

    return train


def load_base(cache: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(cache / "models/tiny-llama", dtype=torch.float32)


def logits(found: Any) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = found.eval()(torch.arange(3, 40)[None]).logits
    return output


def up_proj_layer(found: Any) -> Any:
    return found.base_model.model.model.layers[1].mlp.up_proj


def test_dora_trains_magnitude_vectors(trained: Any, cache: Path) -> None:
    state = load_file(trained({"lora.use_dora": True}) / "model/adapter_model.safetensors")
    magnitudes = {name: tensor for name, tensor in state.items() if "magnitude" in name}
    assert len(magnitudes) == 4 * 7
    initial = load_base(cache).model.layers[1].mlp.up_proj.weight.norm(dim=1)
    change = (magnitudes["base_model.model.model.layers.1.mlp.up_proj.lora_magnitude_vector"] - initial).abs()
    assert 1e-3 < change.max() < 0.1


def test_rslora_scales_by_the_square_root_of_the_rank(cache: Path) -> None:
    changes = {"lora.r": 9, "lora.alpha": 6.0}
    assert up_proj_layer(untrained_model(changes)).scaling["default"] == pytest.approx(6 / 9)
    assert up_proj_layer(untrained_model({**changes, "lora.use_rslora": True})).scaling["default"] == pytest.approx(2)


@pytest.mark.parametrize("init", soak_except(["pissa", "pissa_fast", "olora"], ("pissa", "olora")))
@pytest.mark.parametrize("precision", soak_except(["fp32", "bf16"], ("fp32",)))
def test_initializations_that_change_the_base_weights(cache: Path, init: str, precision: str) -> None:
    model = untrained_model({"lora.init": init}, precision)
    layer, original = up_proj_layer(model), load_base(cache).model.layers[1].mlp.up_proj.weight
    residual = layer.base_layer.weight
    assert (residual - original).abs().max() > 1e-2
    assert residual.dtype == device.DTYPES[precision]
    assert layer.lora_A["default"].weight.dtype == torch.float32
    restored = residual.float() + layer.get_delta_weight("default")
    assert torch.allclose(restored, original, atol=1e-6 if precision == "fp32" else 2e-3)
    other_seed = up_proj_layer(untrained_model({"lora.init": init, "train.seed": 7}, precision))
    # Exact: the same decomposition of the same weights in one process. A tolerance would hide randomness of the seed.
    assert torch.equal(other_seed.base_layer.weight, residual), "a resumed run must have the same initialization"


@pytest.mark.parametrize(("kind", "expected"), [("git", "attention.output.dense"), ("gpt2", "attn.c_proj")])
def test_attention_targets_are_layers_of_the_attention_only(kind: str, expected: str) -> None:
    """Layers outside of it have the same last name, in git even the same last two."""
    model = architectures.build(kind)
    targets = adapters.lora_config(make_spec({"lora.targets": "attention"}), model).target_modules
    assert expected in targets
    adapted = get_peft_model(model, LoraConfig(target_modules=targets)).targeted_module_names
    assert adapted and all("attn" in name or "attention" in name for name in adapted)


@pytest.mark.parametrize("changes", [{"lora.init": "pissa_fast"}, {"save.merge_adapter": True}])
def test_layers_that_share_weights(changes: dict[str, Any]) -> None:
    """PEFT would subtract, or merge, the adapter of each layer, also where their weights are the same."""
    model = architectures.build("zamba2")
    with pytest.raises(TrainError, match="the same weights several times, because layers of this model share them"):
        spec = make_spec(changes)
        lora.add_adapter(spec, model, adapters.lora_config(spec, model))


def test_an_adapter_names_the_revision_of_its_base_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else AutoPeftModelForCausalLM would put it on the weights of the branch main, or on newer ones of the branch."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    hub = {"model.source": "hub", "model.hub_id": "some/model", "model.revision": "v2"}
    model = architectures.build("gpt2")
    assert get_peft_model(model, adapters.lora_config(make_spec(hub), model)).peft_config["default"].revision == "v2"
    place, commit = tmp_path / "models--some--model", "b" * 40
    for file, text in ((f"snapshots/{commit}/config.json", "{}"), ("refs/v2", commit)):
        (place / file).parent.mkdir(parents=True)
        (place / file).write_text(text)
    assert adapters.lora_config(make_spec(hub), model).revision == commit


def test_modules_are_saved_by_whole_names() -> None:
    """peft takes the names for the ends of others: norm would be input_layernorm too."""
    model = untrained_model({"lora.modules_to_save": ("norm",)})
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad and "lora" not in name]
    assert trained == ["base_model.model.model.norm.modules_to_save.default.weight"]


def test_a_saved_layer_norm_has_the_dtype_of_the_weights_that_zero3_has_sharded() -> None:
    """DeepSpeed refuses several dtypes, and gives a copy of a sharded parameter no shard."""
    model = architectures.build("gpt_neox").to(torch.bfloat16)
    for parameter in model.parameters():
        parameter.ds_id = 0
    changes: dict[str, Any] = {"lora.modules_to_save": ("final_layer_norm",), "precision.compute": "bf16"}
    adapted = adapters.apply_method(make_spec(changes), model, "bf16", "cpu", ())
    trained = {name: parameter.dtype for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert any("final_layer_norm" in name for name in trained) and {*trained.values()} == {torch.bfloat16}


def test_a_tied_head_is_trained_under_each_of_its_names() -> None:
    config = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
    for name in ("lm_head", "embed_tokens"):
        spec = make_spec({"method.kind": "freeze", "method.freeze_trainable_layers": 1})
        spec = edit(spec, {"method.freeze_extra_modules": name})
        model = LlamaForCausalLM(LlamaConfig(**config, num_hidden_layers=2, tie_word_embeddings=True))
        adapters.apply_method(spec, model, "fp32")
        assert model.lm_head.weight.requires_grad and not model.model.norm.weight.requires_grad


@pytest.mark.parametrize("init", ["gaussian", "orthogonal"])
def test_initializations_that_keep_the_base_weights(cache: Path, init: str) -> None:
    model = untrained_model({"lora.init": init})
    assert up_proj_layer(model).lora_A["default"].weight.abs().sum() > 0
    assert torch.allclose(logits(model), logits(load_base(cache)), atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"lora.init": "pissa"}, marks=pytest.mark.soak),
        pytest.param({"lora.init": "olora", "lora.use_rslora": True, **PAIRS}, marks=pytest.mark.soak),
        ALL_VARIANTS,
    ],
    ids=["pissa", "olora with a reference", "everything"],
)
def test_saved_adapter_is_for_the_original_base_weights(trained: Any, cache: Path, changes: dict[str, Any]) -> None:
    merged = AutoModelForCausalLM.from_pretrained(trained({**changes, "save.merge_adapter": True}) / "model")
    expected = logits(merged)
    assert not torch.allclose(expected, logits(load_base(cache)), atol=0.1), "training had no effect"
    adapter = PeftModel.from_pretrained(load_base(cache), trained(changes) / "model")
    assert torch.allclose(logits(adapter), expected, atol=1e-4)
    assert adapter.peft_config["default"].r == 32, "rank 16 of the initial adapter is subtracted by another 16"


@pytest.mark.soak
@pytest.mark.parametrize(
    "more", [{}, {"data.add_tokens": ("<tool>", "</tool>")}, {"lora.modules_to_save": ("embed_tokens", "lm_head")}]
)
def test_fsdp2_merges_the_adapter(trained: Any, cache: Path, more: dict[str, Any]) -> None:
    """The rank is odd, so that no shard of an adapter is whole; rule STR004 refuses other sharded weights, and DoRA.
    The run ends with an evaluation that leaves the layers gathered, and generates with the merged model. `more` trains
    embeddings, whose wrapper leaves the model."""
    evaluated = {"parallel.reshard_after_forward": False, "eval.strategy": "steps", "eval.steps": 1}
    evaluated |= {"eval.num_generations": 2, "eval.max_new_tokens": 8}
    changes = {"parallel.strategy": "fsdp2", "lora.r": 3, "train.learning_rate": 1e-2, **evaluated, **more}
    folders = [trained({**changes, "save.merge_adapter": merge}, 2) for merge in (True, False)]
    merged, adapter = (AutoModelForCausalLM.from_pretrained(folder / "model") for folder in folders)
    after, same = ([sample["after"] for sample in result(folder)["samples"]] for folder in folders)
    assert after == same
    assert torch.allclose(logits(merged), logits(adapter), atol=1e-5)
    assert not torch.allclose(logits(merged), logits(load_base(cache)), atol=0.1)


@pytest.mark.soak
def test_zero3_saves_the_same_adapter(trained: Any, cache: Path) -> None:
    """Each rank has a shard of the base weights from which the initialization is subtracted."""
    single = trained({"lora.init": "pissa", "train.per_device_train_batch_size": 2})
    zero3 = trained({"lora.init": "pissa", "train.per_device_train_batch_size": 1, "parallel.strategy": "zero3"}, 2)
    assert losses(zero3) == same_losses(losses(single), REORDERING_TOLERANCE)
    adapter = PeftModel.from_pretrained(load_base(cache), zero3 / "model")
    reference = PeftModel.from_pretrained(load_base(cache), single / "model")
    assert torch.allclose(logits(adapter), logits(reference), atol=2e-2)
    assert not torch.allclose(logits(adapter), logits(load_base(cache)), atol=0.1)


def test_all_variants_together_resume(trained: Any, fork_server: ForkServer) -> None:
    more = {"save.strategy": "steps", "save.steps": 2, "save.total_limit": 0, "parallel.strategy": "ddp"}
    folder = trained({**ALL_VARIANTS, **more, "train.max_steps": 4, "train.per_device_train_batch_size": 1}, 2)
    before, state = losses(folder), load_file(folder / "model/adapter_model.safetensors")
    shutil.rmtree(folder / "model")
    fork_server.resume(folder, 2, ranks=2)
    assert losses(folder) == same_losses(before)
    again = load_file(folder / "model/adapter_model.safetensors")
    assert all(torch.allclose(again[name], tensor, atol=1e-5) for name, tensor in state.items())


def test_checkpoint_with_another_initialization_is_refused(trained: Any, fork_server: ForkServer, root: Path) -> None:
    """Its adapter belongs to base weights that were modified by a different initialization."""
    more = {"save.strategy": "steps", "save.steps": 2}
    folder = trained({**more, "lora.init": "pissa"})
    resume_options = {"save.resume_from": "path", "save.resume_path": str(folder / "checkpoints/checkpoint-2")}
    other = root / "other-initialization"
    write_run(other, make_spec({**FAST_LR, **resume_options, "train.max_steps": 4}))
    assert fork_server.run(other) == 1
    last_line = log_text(other).strip().splitlines()[-1]
    assert "The checkpoint to resume from cannot be used" in last_line
    assert "was trained with lora.init pissa, but this run sets lora.init default" in last_line


def test_loraplus_raises_the_learning_rate_of_b(cache: Path) -> None:
    spec = make_spec(
        {"lora.loraplus_lr_ratio": 16.0, "lora.modules_to_save": ("model.norm",), "train.weight_decay": 0.1}
    )
    model = untrained_model({"lora.modules_to_save": ("model.norm",)})
    config = trainers.training_arguments(make_engine(spec), Path("."))
    tokenizer_ = tokenizer(spec)
    prepared = data.prepare(spec, tokenizer_, lambda done, of: True, lambda line: None)
    trainer = trainers.build_trainer(spec, config, model, tokenizer_, prepared, [])
    optimizer = trainer.create_optimizer()
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(rates) == len(named) == 2 * 28 + 1
    for name, parameter in named.items():
        assert rates[id(parameter)] == TINY_RUN["train.learning_rate"] * (16 if "lora_B" in name else 1)
        assert decays[id(parameter)] == (0 if "norm" in name else 0.1)


def test_loraplus_is_refused_if_the_optimizer_lacks_b(cache: Path) -> None:
    model = untrained_model({})
    with pytest.raises(lora.TrainError, match=r"lora\.loraplus_lr_ratio"):
        lora.set_loraplus_lr(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0), model, 16.0)


@pytest.mark.parametrize("packing", soak_except([False, True], (True,)))
def test_attention_implementations_give_equal_losses(trained: Any, packing: bool) -> None:
    """Packed examples attend to each other in none of them; otherwise the losses would differ."""
    more = {"data.packing": packing, "save.final_model": False}
    one, two = (losses(trained({**more, "model.attn_implementation": name})) for name in ("sdpa", "eager"))
    assert two == same_losses(one, REORDERING_TOLERANCE)


def test_attention_implementation_is_the_requested_one(cache: Path) -> None:
    model = untrained_model({"model.attn_implementation": "eager"})
    assert model.config._attn_implementation == "eager"
    kernels.check_attention(make_spec({"model.attn_implementation": "eager"}), model)
    with pytest.raises(kernels.TrainError, match="sdpa was requested, but transformers uses eager"):
        kernels.check_attention(make_spec({"model.attn_implementation": "sdpa"}), model)


def test_liger_kernels_must_be_in_the_layers(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels need a GPU; whether they were installed is tested by the module of the layers' methods."""
    spec, model, received = make_spec({"train.use_liger_kernel": True}), load_base(cache), {}
    liger = types.ModuleType("liger_kernel.transformers")
    liger._apply_liger_kernel_to_instance = lambda **arguments: received.update(arguments)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", liger)
    with pytest.raises(kernels.TrainError, match=r"train\.use_liger_kernel: Liger has no kernels for llama"):
        kernels.apply_liger(spec, model)
    assert received == {"model": model, "cross_entropy": False, "fused_linear_cross_entropy": False}

    def forward(self: Any, hidden: Any) -> Any:
        return hidden

    forward.__module__ = "liger_kernel.transformers.rms_norm"
    model.model.norm.forward = types.MethodType(forward, model.model.norm)
    kernels.apply_liger(spec, model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses torch.jit
def test_model_that_was_not_compiled_is_reported() -> None:
    trainer = types.SimpleNamespace(model_wrapped=torch.nn.Linear(1, 1))
    with pytest.raises(kernels.TrainError, match=r"train\.torch_compile"):
        kernels.CompileCheckCallback(trainer).on_step_begin()
    kernels.CompileCheckCallback(
        types.SimpleNamespace(model_wrapped=torch.compile(trainer.model_wrapped))
    ).on_step_begin()
