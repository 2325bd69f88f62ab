"""The method: which weights of a model learn.

Beside the floors. Imports catalog, spec, lora, quantized, model, journal. Trained weights are held in fp32, but for
pure bf16; frozen ones in the precision of the computing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from peft import LoraConfig
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from backend import registry
from backend.config import RunSpec
from backend.train import lora, quantized
from backend.train.device import DTYPES
from backend.train.run_log import TrainError


def adapt(spec: RunSpec, model: Any, precision: str) -> Any:
    """Make trainable what the method trains. Raises TrainError naming the modules that are there."""
    if spec.method.kind == "lora":
        model = lora.attach(spec, model, lora_config(spec, model))
    elif spec.method.kind == "freeze":
        chosen = {*_trained(spec, model), *_new(spec, model)}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(name == n or name.startswith(f"{n}.") for n in chosen))
    masters = torch.float32 if registry.PRECISIONS[spec.precision.compute].fp32_master_weights else DTYPES[precision]
    _hold(model, masters, DTYPES[precision])
    return model


def _hold(model: Any, trained: torch.dtype, frozen: torch.dtype) -> None:
    """Keep trained and frozen weights in these types."""
    packed = getattr(model, "is_quantized", False)
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        trained = frozen  # DeepSpeed casts no model that it spread as it was read, and keeps fp32 masters by itself
    sliced: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            wanted = trained if parameter.requires_grad else frozen
            if hasattr(parameter, "ds_id"):  # spread already
                continue
            if packed and not parameter.requires_grad:  # packed numbers, and others in the right precision already
                continue
            if isinstance(parameter, DTensor):  # new data would not reach the slice that it wraps
                if parameter.dtype != wanted:
                    cast = nn.Parameter(parameter.detach().to(wanted), parameter.requires_grad)
                    setattr(module, name, sliced.setdefault(id(parameter), cast))  # tied ones stay one
                continue
            parameter.data = parameter.data.to(wanted)


def lora_config(spec: RunSpec, model: nn.Module) -> LoraConfig:
    """The adapter that `spec` asks for. Raises TrainError."""
    also = list(spec.lora.modules_to_save)
    _refuse_unknown("lora.modules_to_save", also, [name for name, _ in model.named_modules()], model)
    packed = [name for name, module in model.named_modules() if quantized.is_packed(module)]
    if wrong := [end for end in also if any(f".{end}." in f".{name}." for name in packed)]:
        raise TrainError(f"lora.modules_to_save: {', '.join(wrong)} is packed, and cannot be trained in full.")
    return LoraConfig(
        task_type="SEQ_CLS" if registry.STAGES[spec.train.stage].is_reward_model else "CAUSAL_LM",
        r=spec.lora.r,
        lora_alpha=spec.lora.alpha,
        lora_dropout=spec.lora.dropout,
        target_modules=_targets(spec, model),
        modules_to_save=also or None,
        use_dora=spec.lora.use_dora,
        use_rslora=spec.lora.use_rslora,
        init_lora_weights=registry.LORA_INITS[spec.lora.init].name,
    )


def _targets(spec: RunSpec, model: nn.Module) -> str | list[str]:
    if spec.lora.targets == "all-linear":
        return "all-linear"
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) or quantized.is_packed(module)
    ]
    if spec.lora.targets == "attention":
        # Two parts of the name, since c_proj of GPT-2, for one, is also the end of a layer outside of attention.
        inside = [name.split(".") for name in linear if any("attn" in p or "attention" in p for p in name.split("."))]
        if not inside:
            raise TrainError(
                f"lora.targets: no attention layers were found; choose custom and name some of {_ends(linear)}."
            )
        return sorted({".".join(parts[-2:]) for parts in inside})
    names = list(spec.lora.target_modules)
    if not names:
        raise TrainError(f"lora.target_modules is empty; the model has {_ends(linear)}.")
    stacked = registry.STACKED_EXPERTS.get(model.config.model_type, ())  # peft knows them by these names
    _refuse_unknown("lora.target_modules", names, [*linear, *stacked], model)
    head = next((n for n, m in model.named_modules() if m is _head(model)), "") or "".join(_new(spec, model))
    if any(_matches(head, name) for name in names):
        raise TrainError(
            f"lora.target_modules: {head} cannot carry an adapter, because the loss uses its weights directly; "
            "take it out, or name it in lora.modules_to_save."
        )
    return names


def _trained(spec: RunSpec, model: Any) -> Iterable[str]:
    """Names of the modules that the freeze method trains."""
    wanted, also = spec.method.freeze_trainable_layers, list(spec.method.freeze_extra_modules)
    depth = model.config.get_text_config().num_hidden_layers
    stacks = [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == depth]
    if abs(wanted) > depth:
        raise TrainError(f"method.freeze_trainable_layers: the model has {depth} layers, not {abs(wanted)}.")
    if not wanted and not also:
        raise TrainError(
            "method.freeze_trainable_layers is 0 and method.freeze_extra_modules is empty, so nothing would be trained."
        )
    if wanted and not stacks:
        raise TrainError(
            f"method.freeze_trainable_layers: {type(model).__name__} has no list of {depth} layers to choose from."
        )
    modules = [name for name, _ in model.named_modules()]
    _refuse_unknown("method.freeze_extra_modules", also, modules, model)
    layers = range(depth)[-wanted:] if wanted > 0 else range(-wanted)
    named = [name for name in modules if any(_matches(name, end) for end in also)]
    return [*(f"{stacks[0]}.{number}" for number in layers if wanted), *named]


def _new(spec: RunSpec, model: Any) -> list[str]:
    """Modules that the stage has added, without anything learned yet: the head that scores."""
    added = registry.STAGES[spec.train.stage].is_reward_model
    return [name for name, _ in model.named_children() if added and name != model.base_model_prefix]


def _head(model: Any) -> Any:
    return model.get_output_embeddings()


def _matches(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def _ends(names: Iterable[str]) -> str:
    return ", ".join(sorted({part for name in names if not (part := name.rpartition(".")[2]).isdigit() and part}))


def _refuse_unknown(option: str, wanted: Iterable[str], names: list[str], model: nn.Module) -> None:
    unknown = [end for end in wanted if not any(_matches(name, end) for name in names)]
    if unknown:
        raise TrainError(f"{option}: {type(model).__name__} has no {', '.join(unknown)}; it has {_ends(names)}.")
