"""The training method: which parameters of a model are trainable, and the dtype of each.

Trainable parameters are fp32, except in pure bf16; frozen ones have the compute dtype.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from peft import LoraConfig
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from backend import registry
from backend.config import RunSpec
from backend.train import adapter_names, added_tokens, base_weights, lora, quantized
from backend.train.decoder_layers import decoder_layers
from backend.train.device import DTYPES
from backend.train.model import ModelSource
from backend.train.patches import peft_token_bias, peft_token_merge
from backend.train.run_log import TrainError


def apply_method(spec: RunSpec, model: Any, precision: str, device: str = "", token_ids: Sequence[int] = ()) -> Any:
    """Make trainable what the method trains, on a `device` of this type; an adapter also trains the rows of the
    embeddings in `token_ids`. Raises TrainError that names the modules of the model."""
    if spec.method.kind == "lora":
        if token_ids:
            peft_token_bias.apply()
            peft_token_merge.apply()
        model = lora.add_adapter(spec, model, lora_config(spec, model, token_ids))
        adapter_names.check(model)
        added_tokens.check_tied(model)
    elif spec.method.kind == "freeze":
        trainable = {*_unfrozen_modules(spec, model), *_new_head(spec, model)}
        chosen = {
            id(parameter)
            for name, parameter in model.named_parameters(remove_duplicate=False)  # tied ones have several names
            if any(name == n or name.startswith(f"{n}.") for n in trainable)
        }
        for parameter in model.parameters():
            parameter.requires_grad_(id(parameter) in chosen and parameter.requires_grad)  # some classes freeze some
    _cast(model, torch.float32 if spec.fp32_master_weights else DTYPES[precision], DTYPES[precision])
    if device == "cpu" and spec.fp32_master_weights and not _is_sharded_by_zero3(model):
        _keep_layer_norms(model)
    return model


def _keep_layer_norms(model: Any) -> None:
    """LayerNorm in fp32: torch 2.13 refuses bf16 weights on a CPU if the input is fp32, as after trained embeddings,
    and autocast does not convert them there."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False) if isinstance(module, nn.LayerNorm) else ():
            if not isinstance(parameter, DTensor):
                parameter.data = parameter.data.float()


def _is_sharded_by_zero3(model: Any) -> bool:
    """Whether DeepSpeed sharded the model while it was loaded. All its weights have one dtype, including those that an
    adapter adds: DeepSpeed does not cast them, and keeps fp32 master weights."""
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def _cast(model: Any, trainable: torch.dtype, frozen: torch.dtype) -> None:
    """Cast trainable and frozen parameters to these dtypes."""
    is_quantized = getattr(model, "is_quantized", False)
    if _is_sharded_by_zero3(model):
        trainable = frozen
    replaced: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            dtype = trainable if parameter.requires_grad else frozen
            if hasattr(parameter, "ds_id"):  # sharded by ZeRO-3
                continue
            if is_quantized and not parameter.requires_grad:  # quantized, or loaded in the right dtype
                continue
            if isinstance(parameter, DTensor):  # assigning .data would not change its local tensor
                if parameter.dtype != dtype:
                    cast = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
                    setattr(module, name, replaced.setdefault(id(parameter), cast))  # tied parameters stay tied
                continue
            parameter.data = parameter.data.to(dtype)


def lora_config(spec: RunSpec, model: Any, token_ids: Sequence[int] = ()) -> LoraConfig:
    """peft's config of the adapter, which also trains the rows of the embeddings in `token_ids`. Raises TrainError."""
    full, modules = list(spec.lora.modules_to_save), [name for name, _ in model.named_modules()]
    _require_known("lora.modules_to_save", full, modules, model)
    quantized_modules = [name for name, module in model.named_modules() if quantized.is_quantized(module)]
    if wrong := [suffix for suffix in full if any(f".{suffix}." in f".{name}." for name in quantized_modules)]:
        raise TrainError(f"lora.modules_to_save: {', '.join(wrong)} is quantized and cannot be trained. Remove it.")
    saved = [path for name in full for path in _saved_names(name, modules)]
    return LoraConfig(
        task_type="SEQ_CLS" if registry.STAGES[spec.train.stage].is_reward_model else "CAUSAL_LM",
        r=spec.lora.r,
        lora_alpha=spec.lora.alpha,
        lora_dropout=spec.lora.dropout,
        target_modules=_target_modules(spec, model),
        modules_to_save=saved or None,
        trainable_token_indices=added_tokens.trained_rows(model, token_ids, saved) if token_ids else None,
        use_dora=spec.lora.use_dora,
        use_rslora=spec.lora.use_rslora,
        init_lora_weights=registry.LORA_INITS[spec.lora.init].init_lora_weights,
        revision=_revision(spec),
    )


def _revision(spec: RunSpec) -> str | None:
    """Where other programs find the base model: the commit that was loaded, since a branch can get a newer one."""
    if spec.model.source != "hub":
        return None
    source = ModelSource(spec.model.hub_id, {"revision": spec.model.revision})
    return base_weights.commit_of(source) or spec.model.revision


def _target_modules(spec: RunSpec, model: nn.Module) -> str | list[str]:
    if spec.lora.targets == "all-linear":
        return "all-linear"
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) or quantized.is_quantized(module)
    ]
    if spec.lora.targets == "attention":
        attention = [name for name in linear if any("attn" in p or "attention" in p for p in name.split("."))]
        if not attention:
            raise TrainError(
                f"lora.targets: {type(model).__name__} has no linear layers with attn or attention in their name. Set "
                f"lora.targets to custom and lora.target_modules to some of {_suffixes(linear)}."
            )
        others = set(linear).difference(attention)
        return sorted({_distinct_suffix(name, others) for name in attention})
    names = list(spec.lora.target_modules)
    stacked = registry.STACKED_EXPERTS.get(model.config.model_type, ())  # peft knows stacked experts by these names
    _require_known("lora.target_modules", names, [*linear, *stacked], model, "linear layer")
    head = next((n for n, m in model.named_modules() if m is _head(model)), "") or "".join(_new_head(spec, model))
    if any(_matches(head, name) for name in names):
        raise TrainError(
            f"lora.target_modules: {head} cannot have an adapter, because the loss uses its weights directly. Remove "
            "it, or add it to lora.modules_to_save."
        )
    return names


def _distinct_suffix(name: str, others: Collection[str]) -> str:
    """The end of a module's name that none of `others` has: at least two parts, because GPT-2, for example, also has a
    c_proj outside of attention."""
    parts = name.split(".")
    suffixes = (".".join(parts[start:]) for start in range(max(0, len(parts) - 2), -1, -1))
    return next((suffix for suffix in suffixes if not any(_matches(other, suffix) for other in others)), name)


def _unfrozen_modules(spec: RunSpec, model: Any) -> Iterable[str]:
    """Names of the modules that the freeze method trains."""
    layers, extra = spec.method.freeze_trainable_layers, list(spec.method.freeze_extra_modules)
    path, depth = decoder_layers(model)
    if layers and not depth:
        raise TrainError(
            f"method.freeze_trainable_layers: {type(model).__name__} has no list of decoder layers to choose from. Set "
            "it to 0, and name modules in method.freeze_extra_modules."
        )
    if abs(layers) > depth:
        raise TrainError(f"method.freeze_trainable_layers: {abs(layers)} exceeds the model's {depth} layers.")
    modules = [name for name, _ in model.named_modules()]
    _require_known("method.freeze_extra_modules", extra, modules, model)
    numbers = range(depth)[-layers:] if layers > 0 else range(-layers)
    named = [name for name in modules if any(_matches(name, suffix) for suffix in extra)]
    return [*(f"{path}.{number}" for number in numbers if layers), *named]


def _new_head(spec: RunSpec, model: Any) -> list[str]:
    """Modules that the stage has added with random weights: the head of a reward model."""
    added = registry.STAGES[spec.train.stage].is_reward_model
    return [name for name, _ in model.named_children() if added and name != model.base_model_prefix]


def _head(model: Any) -> Any:
    return model.get_output_embeddings()


def _saved_names(suffix: str, modules: Collection[str]) -> list[str]:
    """Names for peft's modules_to_save, which peft 0.21 takes for the end of a name: norm would also select
    input_layernorm. In such cases, whole names are returned."""
    selected = [name for name in modules if _matches(name, suffix)]
    return [suffix] if all(_matches(name, suffix) for name in modules if name.endswith(suffix)) else selected


def _matches(name: str, suffix: str) -> bool:
    return name == suffix or name.endswith(f".{suffix}")


def _suffixes(names: Iterable[str]) -> str:
    return ", ".join(sorted({part for name in names if not (part := name.rpartition(".")[2]).isdigit() and part}))


def _require_known(
    option: str, suffixes: Iterable[str], names: list[str], model: nn.Module, what: str = "module"
) -> None:
    unknown = [suffix for suffix in suffixes if not any(_matches(name, suffix) for name in names)]
    if unknown:
        raise TrainError(
            f"{option}: {type(model).__name__} has no {what} {', '.join(unknown)}. It has {_suffixes(names)}."
        )
