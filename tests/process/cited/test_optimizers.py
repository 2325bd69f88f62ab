"""Optimizers and precisions: how each library behaves in an optimizer step."""

from __future__ import annotations

import gc
import inspect
import time
import warnings
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
import transformers.trainer_optimizer as trainer_optimizer
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils.ao import convert_model_to_fp8_ao, filter_linear_layers
from adam_mini import Adam_mini
from badam import BlockOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.tensor_fragment import fragment_address, tensor_fragment
from galore_torch.galore_projector import GaLoreProjector
from grokadamw import GrokAdamW
from lomo_optim import AdaLomo, Lomo
from optimi import StableAdamW
from schedulefree import AdamWScheduleFree, RAdamScheduleFree
from torch import nn
from torchao.float8 import Float8LinearConfig
from torchao.optim import AdamW4bit, AdamW8bit
from transformers import Trainer, TrainingArguments
from transformers.optimization import Adafactor

from backend import registry
from backend.registry import adam_mini
from backend.rules.schedule_free import RECTIFIED_LENGTH, _rectified_length
from cited import cites

pytestmark = pytest.mark.filterwarnings("ignore")
# Optimizers that the Trainer creates from a separate package.
TRAINER_OPTIMIZERS = sorted(
    {row.trainer_optim for row in registry.OPTIMIZERS.values() if row.package and row.trainer_optim}
)


@pytest.fixture(scope="module", autouse=True)
def earlier_objects() -> None:
    """BAdam collects garbage at each switch, which takes seconds with all objects that earlier tests have left."""
    gc.freeze()


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    return TrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[], **more)


@cites("OPT001")
@pytest.mark.parametrize("name", TRAINER_OPTIMIZERS)
def test_missing_optimizer_package_is_an_error(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for attribute in vars(trainer_optimizer).copy():
        if attribute.startswith("is_") and attribute.endswith("_available"):
            monkeypatch.setattr(trainer_optimizer, attribute, lambda *version: False)
    training_arguments = arguments(tmp_path, optim=name, optim_target_modules=["mlp"])
    with pytest.raises((ImportError, ValueError), match=r"(?i)install|failed to import"):
        Trainer.get_optimizer_cls_and_kwargs(training_arguments, nn.Linear(2, 2))


@cites("OPT006")
def test_gradients_are_scaled_during_the_backward_pass() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    weight, gradients = nn.Parameter(torch.ones(1)), []
    weight.register_post_accumulate_grad_hook(lambda parameter: gradients.append(parameter.grad.item()))
    accelerator.backward(weight.sum())
    assert gradients == [1024.0]


@cites("OPT010")
def test_projection_rank_is_limited_by_the_matrix() -> None:
    gradient = torch.randn(8, 6)
    assert [GaLoreProjector(rank=rank).project(gradient, 0).numel() for rank in (2, 6, 1024)] == [16, 48, 48]


def after_one_step(kind: Any, *, sides: tuple[int, ...] = (64, 64), scale: float = 1.0, **more: Any) -> tuple[Any, Any]:
    """An optimizer after one step, and its weight."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(sides))
    optimizer = kind([weight], **more)
    weight.grad = torch.randn(sides) * scale
    optimizer.step()
    return optimizer, weight


@cites("OPT011")
def test_paged_optimizer_is_not_paged_on_a_cpu() -> None:
    optimizer, weight = after_one_step(bitsandbytes.optim.PagedAdamW32bit, sides=(512, 512))
    state = optimizer.state[weight]["state1"]
    assert state.device.type == "cpu"
    assert not getattr(state, "is_paged", False)


@cites("OPT013")
def test_sgd_steps_scale_with_the_gradient() -> None:
    small, large = (after_one_step(torch.optim.SGD, scale=scale, lr=1.0)[1] for scale in (1e-3, 1.0))
    assert torch.allclose(1e3 * small, large)
    small, large = (after_one_step(torch.optim.AdamW, scale=scale, lr=1.0)[1] for scale in (1e-3, 1.0))
    assert torch.allclose(small, large, atol=0.05)
    assert inspect.signature(Lomo).parameters["lr"].default == 1e-3


@cites("OPT014")
def test_adafactor_limits_its_updates() -> None:
    given = {"scale_parameter": False, "relative_step": False, "lr": 1.0}
    for scale in (1.0, 1e3):
        _, weight = after_one_step(Adafactor, scale=scale, **given)
        assert weight.square().mean().sqrt() <= 1.0001


@cites("OPT032")
@pytest.mark.parametrize(
    "kind", [StableAdamW, GrokAdamW, partial(Adafactor, scale_parameter=False, relative_step=False)]
)
def test_a_flat_tensor_is_trained_like_one_parameter(kind: Any) -> None:
    """With AdamW, it is trained like the parameters that it consists of."""

    def trained(kind: Any, weights: list[nn.Parameter]) -> torch.Tensor:
        torch.manual_seed(0)
        optimizer = kind(weights, lr=0.1)
        for step in range(3):
            noise = torch.randn(8).split([each.numel() for each in weights])
            for weight, gradient in zip(weights, noise, strict=True):
                weight.grad = gradient * 10**step
            optimizer.step()
        return torch.cat([weight.detach() for weight in weights])

    for each, is_same in ((torch.optim.AdamW, True), (kind, False)):
        apart = trained(each, [nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))])
        assert torch.allclose(apart, trained(each, [nn.Parameter(torch.zeros(8))])) is is_same


@cites("OPT015")
def test_adafactor_factors_only_matrices() -> None:
    given = {"scale_parameter": False, "relative_step": False, "lr": 1.0}
    sizes = {}
    for sides in ((64, 64), (4096,)):
        optimizer, weight = after_one_step(Adafactor, sides=sides, **given)
        sizes[sides] = sum(t.numel() for n, t in optimizer.state[weight].items() if n.startswith("exp_avg_sq"))
    assert sizes == {(64, 64): 128, (4096,): 4096}


@cites("OPT016")
def test_moments_are_not_in_the_state_dict(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """GrokAdamW attaches its moments to the parameters; AdaLomo keeps them outside of its state."""
    optimizer, weight = after_one_step(GrokAdamW)
    assert weight.abs().sum() > 0
    assert not optimizer.state_dict()["state"]
    monkeypatch.setattr(torch.Tensor, "cuda", lambda own: own)
    lomo = AdaLomo(nn.Linear(4, 4))
    assert set(lomo.exp_avg_sq_row) == {"weight"}
    assert not lomo.state_dict()["state"]


@cites("OPT017")
def test_badam_copies_the_active_block_to_fp32() -> None:
    model = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype)
        base = torch.optim.AdamW(model.parameters())
        with warnings.catch_warnings(record=True) as messages:
            warnings.simplefilter("always")
            optimizer = BlockOptimizer(base, list(model.named_parameters()), [["0."], ["1."]], verbose=0)
        assert any("expect model to be loaded in fp16/bf16" in str(w.message) for w in messages) == (
            dtype == torch.float32
        )
        copies = list(optimizer.param_idx2hp.values())
        assert [(copy.dtype, copy.numel()) for copy in copies] == [(torch.float32, 16)]


@cites("OPT033")
def test_badam_trains_parameters_of_the_blocks_only() -> None:
    model = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("0", "1", "head")})
    for own in ({}, {"0.lora_A": nn.Linear(4, 4), "1.lora_A": nn.Linear(4, 4)}):
        named = [*model.named_parameters(), *((name, part.weight) for name, part in own.items())]
        base = torch.optim.AdamW([weight for _, weight in named])
        optimizer = BlockOptimizer(base, named, [["0."], ["1."]], switch_mode="ascending", verbose=0)
        trained = set()
        for _ in range(2):
            trained |= {named[index][0] for index in optimizer.param_idx2hp}
            optimizer.switch_trainable_params()
        assert trained == (own.keys() or {"0.weight", "0.bias", "1.weight", "1.bias"})


@cites("OPT019")
def test_torchao_optimizers_need_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(Exception, match="InvalidCxxCompiler"):
        after_one_step(AdamW8bit)


@cites("OPT022")
@pytest.mark.parametrize("kind", [DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3])
def test_deepspeed_optimizers_have_no_train_and_eval(kind: Any) -> None:
    """accelerate would forward these calls, and schedule-free optimizers require them."""
    assert {"train", "eval"} <= set(dir(AcceleratedOptimizer)) & set(dir(AdamWScheduleFree))
    assert not {"train", "eval"} & set(dir(kind))
    weight = nn.Parameter(torch.ones(2))
    optimizer = AdamWScheduleFree([weight])
    weight.grad = torch.ones(2)
    with pytest.raises(Exception, match="not in train mode"):
        optimizer.step()


@cites("PRC001")
def test_fp16_is_ignored_on_a_cpu() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    assert (accelerator.scaler, accelerator.native_amp) == (None, False)
    layer = nn.Linear(2, 2)
    assert accelerator.prepare_model(layer)(torch.ones(2)).dtype == torch.float32
    with accelerator.autocast():
        assert layer(torch.ones(2)).dtype == torch.float32


@cites("PRC007")
def test_fp8_needs_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    state, module = inspect.getmodule(type(Accelerator(cpu=True).state)), inspect.getmodule(Accelerator)
    monkeypatch.setattr(state, "is_fp8_available", lambda: True)
    for name in ("is_torchao_available", "is_transformer_engine_available", "is_msamp_available"):
        monkeypatch.setattr(module, name, lambda: False)
    type(Accelerator(cpu=True).state)._reset_state(True)
    with pytest.raises(ImportError, match="no FP8-compatible backend was installed"):
        Accelerator(cpu=True, mixed_precision="fp8")


def linear(*sides: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(sides)))


@pytest.mark.soak
@cites("PRC010")
def test_fp8_is_emulated_on_a_cpu() -> None:
    """It trains, and is slower than fp32."""
    best = {}
    for kind in ("fp32", "fp8"):
        model = linear(512, 512, 512, 512)
        if kind == "fp8":
            convert_model_to_fp8_ao(model, config=Float8LinearConfig(emulate=True))
            assert type(model[1]).__name__ == "Float8Linear"
        times = []
        for _ in range(5):
            start = time.perf_counter()
            model(torch.randn(256, 512)).square().mean().backward()
            times.append(time.perf_counter() - start)
        assert model[1].weight.grad.abs().sum() > 0
        best[kind] = min(times)
    assert best["fp8"] > best["fp32"]


@cites("PRC011")
@pytest.mark.parametrize(("side", "converted"), [(570, False), (576, True)])
def test_fp8_skips_layers_that_are_not_multiples_of_16(side: int, converted: bool) -> None:
    assert filter_linear_layers(nn.Linear(side, 64), "layer", []) is converted


@cites("PRC012")
def test_fp8_replaces_quantized_layers() -> None:
    for kind in (bitsandbytes.nn.Linear4bit, bitsandbytes.nn.Linear8bitLt):
        assert isinstance(kind(64, 64), nn.Linear)
        assert filter_linear_layers(kind(64, 64), "layer", [])
    model = nn.Sequential(nn.Linear(64, 64), bitsandbytes.nn.Linear4bit(64, 64), nn.Linear(64, 64))
    convert_model_to_fp8_ao(model, config=Float8LinearConfig(emulate=True))
    assert type(model[1]).__name__ == "Float8Linear"


@cites("STR052")
@pytest.mark.parametrize("optimizer", [AdamW8bit, AdamW4bit])
def test_quantized_state_is_sliced_at_blocks_only(optimizer: Any) -> None:
    """As DeepSpeed slices the state of a flat partition: tensor_fragment.py, set_optim_state_fragment."""
    flat = nn.Parameter(torch.ones(4096))
    state = optimizer([flat])._new_buffer(flat, signed=True)
    fragment: Any = object.__new__(tensor_fragment)
    fragment.hp_fragment_address = fragment_address(numel=1024, start=512)
    fragment.set_optim_state_fragment(flat, {"exp_avg": state})
    assert fragment.optim_fragment["exp_avg"].shape == (1024,)
    fragment.hp_fragment_address = fragment_address(numel=1024, start=510)
    with pytest.raises(ValueError, match="align with block boundary"):
        fragment.set_optim_state_fragment(flat, {"exp_avg": state})
    odd = nn.Parameter(torch.ones(4096 + 8))
    assert type(optimizer([odd])._new_buffer(odd, signed=True)) is torch.Tensor, "not quantized"


@cites("OPT029")
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("layers.0.mlp.experts.gate_up_proj", (2, 8, 4)),
        ("layers.0.linear_attn.conv1d.weight", (8, 1, 4)),
        ("layers.0.mixer.conv1d.weight", (8, 1, 4)),
        ("layers.0.self_attn.q_proj.weight", (4, 4)),
        ("layers.0.self_attn.q_proj.weight", (3, 4)),
        ("h.0.self_attention.query_key_value.weight", (12, 4)),
        ("layers.0.self_attn.query.bias", (3,)),
        ("layers.0.mlp.up_proj.weight", (8, 4)),
    ],
)
def test_which_weights_adam_mini_divides(name: str, shape: tuple[int, ...]) -> None:
    weight = torch.nn.Parameter(torch.ones(shape))
    optimizer = Adam_mini(named_parameters=[(name, weight)], dim=4, n_heads=2, verbose=False)
    weight.grad = torch.ones(shape)
    problem = adam_mini.problem(name, weight.dim(), weight.numel(), optimizer.head_numel)
    with pytest.raises((RuntimeError, IndexError)) if problem else nullcontext():
        optimizer.step()


@pytest.mark.parametrize(("beta2", "first_update"), [(0.999, 5), (0.7, 6), (0.6, None)])
@cites("OPT030")
def test_schedule_free_radam_makes_no_update_until_its_moving_average_is_long(
    beta2: float, first_update: int | None
) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = RAdamScheduleFree([weight], lr=0.1, betas=(0.9, beta2))
    optimizer.train()
    changed = None
    for step in range(1, 13):
        weight.grad = torch.ones(3)
        optimizer.step()
        assert (_rectified_length(step, beta2) > RECTIFIED_LENGTH) == bool((weight != 1).any())
        changed = changed or (step if bool((weight != 1).any()) else None)
    assert changed == first_update


@cites("ADP013")
@pytest.mark.parametrize("kind", [Lomo, BlockOptimizer])  # AdaLomo steps on a GPU only
def test_one_learning_rate_for_all_parameters(kind: Any) -> None:
    model = nn.ModuleDict({"lora_A": nn.Linear(4, 4, bias=False), "lora_B": nn.Linear(4, 4, bias=False)})
    loss = sum(layer(torch.ones(1, 4)).sum() for layer in model.values())
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    if kind is BlockOptimizer:
        groups = [{"params": [model["lora_A"].weight]}, {"params": [model["lora_B"].weight], "lr": 8e-2}]
        blocks = [["lora"]]
        optimizer = BlockOptimizer(torch.optim.AdamW(groups, lr=1e-2), [*model.named_parameters()], blocks, verbose=0)
        loss.backward()
        optimizer.step()
    else:
        optimizer = kind(model, 1e-2)
        assert not optimizer.param_groups[1:], "there is nowhere to set another one"
        optimizer.fused_backward(loss, 1e-2)
    moved = [(weight.detach() - before[name]).abs().max().item() for name, weight in model.named_parameters()]
    assert moved[0] > 0 and moved[0] == pytest.approx(moved[1], rel=0.2)
