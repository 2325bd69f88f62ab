"""LoRA variants: initializations that are taken out of the base weights and saved as ordinary adapters, and LoRA+."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from transformers.pytorch_utils import Conv1D

from backend import registry
from backend.config import RunSpec
from backend.registry import llamafactory_names
from backend.train import unsloth
from backend.train.patches import peft_dequantize, peft_reference_init
from backend.train.run_log import TrainError

SEED = 0  # of initializations that are taken out of the base weights
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
# peft's keys that decide what an adapter's weights mean, and the option of each.
TOKEN_IDS = "trainable_token_indices"
OPTION_OF = {
    "r": "lora.r",
    "lora_alpha": "lora.alpha",
    "use_dora": "lora.use_dora",
    "use_rslora": "lora.use_rslora",
    "init_lora_weights": "lora.init",
    TOKEN_IDS: "data.add_special_tokens and data.add_tokens",
}


def add_adapter(spec: RunSpec, model: Any, config: LoraConfig) -> Any:
    """`model` with a new adapter. Raises TrainError.

    An initialization that is taken out of the base weights must be the same each time, also when a run is resumed:
    its random search has a fixed seed, and the initial adapter is kept for `convert_to_plain_lora`.
    """
    _check_model(spec, model)
    if spec.lora.use_dora:
        peft_dequantize.apply()
    peft_reference_init.apply()
    if not registry.LORA_INITS[spec.lora.init].changes_base_weights:
        plain = unsloth.add_adapter(spec, model, config) if spec.train.use_unsloth else get_peft_model(model, config)
        if spec.save.merge_adapter:
            check_shared_weights("save.merge_adapter: merging", plain)
        return plain
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        try:
            adapted = get_peft_model(model, config)
        except RuntimeError as error:  # raised by linear algebra
            raise TrainError(f"lora.init: {str(error).splitlines()[0]}") from error
    check_shared_weights(f"lora.init: {spec.lora.init}", adapted)
    for parameter in adapted.parameters():
        if parameter.dim() > 1 and parameter.stride(-1) != 1:  # so at rank 1; DeepSpeed copies weights as bytes
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
    state = {k: v for k, v in get_peft_model_state_dict(adapted).items() if "lora_A" in k or "lora_B" in k}
    _check_rank(spec.lora.r, state)
    adapted.initial_adapter = {k: v.detach().float().cpu().clone() for k, v in state.items()}
    return adapted


def check_repeatable(adapter: Mapping[str, Any], trained_on: str, device: str) -> None:
    """Raise TrainError if an adapter with this configuration belongs to base weights that can be reproduced only on the
    device type that it was `trained_on`: those of pissa_fast follow from random numbers, which differ between device
    types, and between Footplate and LLaMA-Factory."""
    if not str(adapter.get("init_lora_weights")).startswith("pissa_niter"):
        return
    if trained_on == llamafactory_names.NAME:
        raise TrainError(
            f"{trained_on} has trained this adapter with lora.init pissa_fast. It fits only base weights that a random "
            "decomposition has changed, and its random numbers are not known. Train with lora.init pissa or default."
        )
    if trained_on != device:
        raise TrainError(
            "With lora.init pissa_fast, a checkpoint needs base weights that a randomized decomposition changed, and "
            f"only {trained_on}, on which it was trained, gives the same result again. Use the final model of the run, "
            "which works on the original base weights."
        )


def _check_model(spec: RunSpec, model: Any) -> None:
    """Raise TrainError for adapters that peft does not support on this model."""
    stacked = registry.STACKED_EXPERTS.get(model.config.model_type, ())
    if spec.adapts_experts(stacked) and not spec.lora.is_plain:
        raise TrainError(
            "lora.targets: peft supports neither dropout nor DoRA nor other initializations for adapters on stacked "
            "experts. Set lora.targets to attention, or set these options to their defaults."
        )
    fused = [name for name in stacked[:2] if name in spec.lora.target_modules]
    if spec.lora.targets == "custom" and len(fused) == 1:
        raise TrainError(
            f"lora.target_modules: {' and '.join(stacked[:2])} are one fused weight in {model.config.model_type}. Set "
            "both of them."
        )
    if spec.lora.init == "olora" and any(isinstance(module, Conv1D) for module in model.modules()):
        raise TrainError(
            "lora.init: peft's OLoRA does not support Conv1D layers, which this model has. Use another initialization."
        )


def check_shared_weights(what: str, adapted: Any) -> None:
    """Raise TrainError if adapters of several layers would change the same weight, each on its own."""
    layers = (module.base_layer for module in adapted.modules() if isinstance(module, LoraLayer))
    weights = [id(layer.weight) for layer in layers if hasattr(layer, "weight")]  # weights of experts have other names
    if len(set(weights)) < len(weights):
        raise TrainError(
            f"{what} would change the same weights several times, because layers of this model share them. Use the "
            "default initialization, and do not merge the adapter."
        )


def _check_rank(rank: int, adapter: Mapping[str, torch.Tensor]) -> None:
    """An initialization from a weight matrix has at most the rank of the matrix."""
    smallest = min((len(tensor) for name, tensor in adapter.items() if "lora_A" in name), default=rank)
    if smallest < rank:
        raise TrainError(
            f"lora.r: {rank} exceeds {smallest}, the rank of the smallest target layer, whose weights lora.init "
            f"factorizes. Set lora.r to at most {smallest}."
        )


def check_checkpoint(model: Any, checkpoint: Path | None) -> None:
    """Raise TrainError unless the adapter in `checkpoint` was made with the model's adapter options: only then do its
    weights mean the same."""
    if checkpoint is None or not hasattr(model, "peft_config") or not (checkpoint / CONFIG).is_file():
        return
    check_adapter(model, checkpoint, "save.resume_path")


def check_adapter(model: Any, folder: Path, option_of_folder: str) -> None:
    """Raise TrainError unless the adapter in `folder`, which this option names, has the model's adapter options."""
    own, other = model.peft_config["default"], PeftConfig.from_pretrained(str(folder))
    for key, option in OPTION_OF.items():
        values = getattr(own, key, None), getattr(other, key, None)
        if values[0] != values[1] and not (key == "init_lora_weights" and registry.same_base_weights(*values)):
            wanted = "the tokens with these ids" if key == TOKEN_IDS else "the same value"
            raise TrainError(
                f"{option_of_folder}: the adapter in {folder} was trained with {key} {values[1]}, but this run has "
                f"{values[0]}. Set {option} to {wanted}."
            )


def convert_to_plain_lora(model: Any, folder: Path) -> None:
    """Rewrite the adapter saved in `folder` for the original base weights: with W = R + A0 B0, the trained R + A B
    equals W + A B - A0 B0, which is an adapter of twice the rank. DoRA's magnitude vectors do not change."""
    initial = getattr(model, "initial_adapter", None)
    if not initial:
        return
    state = load_file(folder / WEIGHTS)
    for name, start in initial.items():
        now = state[name].float()
        state[name] = torch.cat([now, start] if "lora_A" in name else [now, -start], 0 if "lora_A" in name else 1)
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    scale = 2**0.5 if config["use_rslora"] else 2  # keeps alpha / sqrt(rank), or alpha / rank
    config |= {"init_lora_weights": True, "r": 2 * config["r"], "lora_alpha": scale * config["lora_alpha"]}
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def set_loraplus_lr(optimizer: Any, model: Any, ratio: float) -> None:
    """LoRA+: multiply the learning rate of the B matrices by `ratio`, in parameter groups like their previous ones.
    Raises TrainError if they are not in the optimizer."""
    b_matrices = {id(p) for name, p in model.named_parameters() if p.requires_grad and "lora_B" in name}
    found = 0
    for group in list(optimizer.param_groups):
        own = [p for p in group["params"] if id(p) in b_matrices]
        if not own:
            continue
        found += len(own)
        rate = group["lr"] * ratio
        if len(own) == len(group["params"]):
            group["lr"] = rate
            continue
        group["params"] = [p for p in group["params"] if id(p) not in b_matrices]
        optimizer.add_param_group({**{k: v for k, v in group.items() if k != "params"}, "params": own, "lr": rate})
    if found != len(b_matrices) or not b_matrices:
        raise TrainError(
            "lora.loraplus_lr_ratio: this optimizer does not have LoRA's B matrices as separate parameters. Set the "
            "ratio to 1."
        )
