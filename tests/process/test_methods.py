"""LoRA variants: each has its effect, and the saved adapter gives the trained model again."""

from __future__ import annotations

import json
import shutil
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import ForkServer, write_run
from peft import PeftModel
from safetensors.torch import load_file
from training_runs import (
    REORDERING_TOLERANCE,
    TINY_RUN,
    log_text,
    losses,
    make_engine,
    make_spec,
    same_losses,
    soak_except,
)
from transformers import AutoModelForCausalLM
from untrained_models import tokenizer, untrained_model

from backend.train import data, device, kernels, lora, trainers

# peft asks transformers under an old name, and warns of what is known; the run's own log leaves that out too.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
# The fast rate makes every step count from the first on.
QUICK = {"train.lr_scheduler_type": "constant", "train.learning_rate": 1e-2, "save.final_model": True}
# All that can be combined; what is saved stands on the untouched model all the same.
EVERYTHING = {
    "lora.init": "pissa_fast",
    "lora.use_dora": True,
    "lora.use_rslora": True,
    "lora.loraplus_lr_ratio": 4.0,
    "lora.modules_to_save": ("norm",),
    "lora.alpha": 8.0,
}


@pytest.fixture(scope="module")
def trained(root: Path, fork_server: ForkServer) -> Any:
    """A folder for each table of changes; the same table is trained once."""
    made: dict[str, Path] = {}

    def train(changes: Mapping[str, Any], ranks: int = 0) -> Path:
        key = json.dumps({**changes, "ranks": ranks}, sort_keys=True)
        if key not in made:
            made[key] = fork_server.train(root / f"run-{len(made)}", make_spec({**QUICK, **changes}), ranks)
        return made[key]

    return train


def base(cache: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(cache / "models/tiny-llama", dtype=torch.float32)


def logits(found: Any) -> torch.Tensor:
    with torch.no_grad():
        answer: torch.Tensor = found.eval()(torch.arange(3, 40)[None]).logits
    return answer


def a_layer(found: Any) -> Any:
    return found.base_model.model.model.layers[1].mlp.up_proj


def test_dora_trains_magnitude_vectors(trained: Any, cache: Path) -> None:
    state = load_file(trained({"lora.use_dora": True}) / "model/adapter_model.safetensors")
    lengths = {name: tensor for name, tensor in state.items() if "magnitude" in name}
    assert len(lengths) == 4 * 7
    began = base(cache).model.layers[1].mlp.up_proj.weight.norm(dim=1)
    moved = (lengths["base_model.model.model.layers.1.mlp.up_proj.lora_magnitude_vector"] - began).abs()
    assert 1e-3 < moved.max() < 0.1


def test_rslora_scales_by_the_square_root_of_the_rank(cache: Path) -> None:
    changes = {"lora.r": 9, "lora.alpha": 6.0}
    assert a_layer(untrained_model(changes)).scaling["default"] == pytest.approx(6 / 9)
    assert a_layer(untrained_model({**changes, "lora.use_rslora": True})).scaling["default"] == pytest.approx(2)


@pytest.mark.parametrize("init", soak_except(["pissa", "pissa_fast", "olora"], ("pissa", "olora")))
@pytest.mark.parametrize("precision", soak_except(["fp32", "bf16"], ("fp32",)))
def test_initializations_that_change_the_base_weights(cache: Path, init: str, precision: str) -> None:
    found = untrained_model({"lora.init": init}, precision)
    layer, whole = a_layer(found), base(cache).model.layers[1].mlp.up_proj.weight
    left = layer.base_layer.weight
    assert (left - whole).abs().max() > 1e-2
    assert left.dtype == device.DTYPES[precision]
    assert layer.lora_A["default"].weight.dtype == torch.float32
    again = left.float() + layer.get_delta_weight("default")
    assert torch.allclose(again, whole, atol=1e-6 if precision == "fp32" else 2e-3)
    same = a_layer(untrained_model({"lora.init": init, "train.seed": 7}, precision))
    # Exact: the same decomposition of the same weights in this process. A tolerance would hide what the seed draws.
    assert torch.equal(same.base_layer.weight, left), "a resumed run must have the same initialization"


@pytest.mark.parametrize("init", ["gaussian", "orthogonal"])
def test_initializations_that_keep_the_base_weights(cache: Path, init: str) -> None:
    found = untrained_model({"lora.init": init})
    assert a_layer(found).lora_A["default"].weight.abs().sum() > 0
    assert torch.allclose(logits(found), logits(base(cache)), atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"lora.init": "pissa"},
        {"lora.init": "olora", "lora.use_rslora": True},
        EVERYTHING,
    ],
    ids=["pissa", "olora", "everything"],
)
def test_saved_adapter_is_for_the_original_base_weights(trained: Any, cache: Path, changes: dict[str, Any]) -> None:
    merged = AutoModelForCausalLM.from_pretrained(trained({**changes, "save.merge_adapter": True}) / "model")
    wanted = logits(merged)
    assert not torch.allclose(wanted, logits(base(cache)), atol=0.1), "nothing was learned"
    adapter = PeftModel.from_pretrained(base(cache), trained(changes) / "model")
    assert torch.allclose(logits(adapter), wanted, atol=1e-4)
    assert adapter.peft_config["default"].r == 32, "rank 16 of the initial adapter is subtracted by another 16"


def test_zero3_saves_the_same_adapter(trained: Any, cache: Path) -> None:
    """Each rank has a shard of the weights that the initialization is taken out of."""
    one = trained({"lora.init": "pissa", "train.per_device_train_batch_size": 2})
    spread = trained({"lora.init": "pissa", "train.per_device_train_batch_size": 1, "parallel.strategy": "zero3"}, 2)
    assert losses(spread) == same_losses(losses(one), REORDERING_TOLERANCE)
    adapter = PeftModel.from_pretrained(base(cache), spread / "model")
    again = PeftModel.from_pretrained(base(cache), one / "model")
    assert torch.allclose(logits(adapter), logits(again), atol=2e-2)
    assert not torch.allclose(logits(adapter), logits(base(cache)), atol=0.1)


def test_all_variants_together_resume(trained: Any, fork_server: ForkServer) -> None:
    more = {"save.strategy": "steps", "save.steps": 2, "save.total_limit": 0, "parallel.strategy": "ddp"}
    folder = trained({**EVERYTHING, **more, "train.max_steps": 4, "train.per_device_train_batch_size": 1}, 2)
    before, state = losses(folder), load_file(folder / "model/adapter_model.safetensors")
    shutil.rmtree(folder / "model")
    fork_server.resume(folder, 2, ranks=2)
    assert losses(folder) == same_losses(before)
    again = load_file(folder / "model/adapter_model.safetensors")
    assert all(torch.allclose(again[name], tensor, atol=1e-5) for name, tensor in state.items())


def test_checkpoint_with_another_initialization_is_refused(trained: Any, fork_server: ForkServer, root: Path) -> None:
    """Its adapter belongs to base weights that were changed in another way."""
    more = {"save.strategy": "steps", "save.steps": 2}
    folder = trained({**more, "lora.init": "pissa"})
    asked = {"save.resume_from": "path", "save.resume_path": str(folder / "checkpoints/checkpoint-2")}
    other = root / "other-start"
    write_run(other, make_spec({**QUICK, **asked, "train.max_steps": 4}))
    assert fork_server.run(other) == 1
    said = log_text(other).strip().splitlines()[-1]
    assert "save.resume_path" in said
    assert "init_lora_weights=pissa" in said


def test_loraplus_raises_the_learning_rate_of_b(cache: Path) -> None:
    spec = make_spec(
        {"lora.loraplus_lr_ratio": 16.0, "lora.modules_to_save": ("model.norm",), "train.weight_decay": 0.1}
    )
    found = untrained_model({"lora.modules_to_save": ("model.norm",)})
    config = trainers.training_arguments(make_engine(spec), Path("."))
    tokens = tokenizer(spec)
    rows = data.prepare(spec, tokens, lambda done, of: True, lambda line: None)
    made = trainers.build_trainer(spec, config, found, tokens, rows, [])
    optimizer = made.create_optimizer()
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    named = {name: p for name, p in found.named_parameters() if p.requires_grad}
    assert len(rates) == len(named) == 2 * 28 + 1
    for name, parameter in named.items():
        assert rates[id(parameter)] == TINY_RUN["train.learning_rate"] * (16 if "lora_B" in name else 1)
        assert decays[id(parameter)] == (0 if "norm" in name else 0.1)


def test_loraplus_is_refused_if_the_optimizer_lacks_b(cache: Path) -> None:
    found = untrained_model({})
    with pytest.raises(lora.TrainError, match=r"lora\.loraplus_lr_ratio"):
        lora.set_loraplus_lr(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0), found, 16.0)


@pytest.mark.parametrize("packing", [False, True])
def test_attention_implementations_give_equal_losses(trained: Any, packing: bool) -> None:
    """Packed examples attend to each other in none of them; otherwise the losses would differ."""
    more = {"data.packing": packing, "save.final_model": False}
    one, two = (losses(trained({**more, "model.attn_implementation": name})) for name in ("sdpa", "eager"))
    assert two == same_losses(one, REORDERING_TOLERANCE)


def test_attention_implementation_is_the_requested_one(cache: Path) -> None:
    found = untrained_model({"model.attn_implementation": "eager"})
    assert found.config._attn_implementation == "eager"
    kernels.check_attention(make_spec({"model.attn_implementation": "eager"}), found)
    with pytest.raises(kernels.TrainError, match="sdpa was requested, but transformers uses eager"):
        kernels.check_attention(make_spec({"model.attn_implementation": "sdpa"}), found)


def test_liger_kernels_must_be_in_the_layers(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels need a GPU; that they were really put in is seen by where the layers' methods come from."""
    asked, found, seen = make_spec({"train.use_liger_kernel": True}), base(cache), {}
    liger = types.ModuleType("liger_kernel.transformers")
    liger._apply_liger_kernel_to_instance = lambda **given: seen.update(given)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", liger)
    with pytest.raises(kernels.TrainError, match=r"train\.use_liger_kernel: Liger has no kernels for llama"):
        kernels.apply_liger(asked, found)
    assert seen == {"model": found, "cross_entropy": False, "fused_linear_cross_entropy": False}

    def forward(self: Any, hidden: Any) -> Any:
        return hidden

    forward.__module__ = "liger_kernel.transformers.rms_norm"
    found.model.norm.forward = types.MethodType(forward, found.model.norm)
    kernels.apply_liger(asked, found)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler asks torch.jit
def test_model_that_was_not_compiled_is_reported() -> None:
    trainer = types.SimpleNamespace(model_wrapped=torch.nn.Linear(1, 1))
    with pytest.raises(kernels.TrainError, match=r"train\.torch_compile"):
        kernels.CompileCheckCallback(trainer).on_step_begin()
    kernels.CompileCheckCallback(
        types.SimpleNamespace(model_wrapped=torch.compile(trainer.model_wrapped))
    ).on_step_begin()
