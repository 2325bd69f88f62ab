"""The kin of LoRA: adapters that begin inside the base weights and are saved to stand beside them, and LoRA+.

Beside the floors. Imports spec, catalog, quantized, unsloth, journal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers.pytorch_utils import Conv1D

from backend import registry
from backend.config import RunSpec
from backend.train import quantized, unsloth
from backend.train.run_log import TrainError

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
# What decides the meaning of an adapter's weights, and the option that says it.
MADE = {
    "r": "lora.r",
    "lora_alpha": "lora.alpha",
    "use_dora": "lora.use_dora",
    "use_rslora": "lora.use_rslora",
    "init_lora_weights": "lora.init",
}


def attach(spec: RunSpec, model: Any, config: LoraConfig) -> Any:
    """`model` with new adapters. Raises TrainError.

    One that takes its start out of the base weights must take the same each time, also where a run goes on: the seed
    of its search is fixed, and what it began with is remembered for `stand_alone`.
    """
    _check(spec, model, config)
    if spec.lora.use_dora:
        quantized.keep_weights()
    if not registry.LORA_INITS[spec.lora.init].changes_base_weights:
        return unsloth.attach(spec, model, config) if spec.train.use_unsloth else get_peft_model(model, config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            made = get_peft_model(model, config)
        except RuntimeError as error:  # of linear algebra
            raise TrainError(f"lora.init: {str(error).splitlines()[0]}") from error
    state = {k: v for k, v in get_peft_model_state_dict(made).items() if "lora_A" in k or "lora_B" in k}
    _check_ranks(spec.lora.r, state)
    made.first_adapter = {k: v.detach().float().cpu().clone() for k, v in state.items()}
    return made


def _check(spec: RunSpec, model: Any, config: LoraConfig) -> None:
    if spec.lora.init == "orthogonal" and spec.lora.r % 2:
        raise TrainError(f"lora.r: an orthogonal start needs an even rank, not {spec.lora.r}.")
    stacked = registry.STACKED_EXPERTS.get(model.config.model_type, ())
    if spec.adapts_experts(stacked) and not spec.lora.is_plain:
        raise TrainError(
            "lora.targets: peft's adapters on experts know no dropout, DoRA or other start: take attention, or "
            "do without."
        )
    named = [name for name in stacked[:2] if name in spec.lora.target_modules]
    if spec.lora.targets == "custom" and len(named) == 1:
        raise TrainError(f"lora.target_modules: {' and '.join(stacked[:2])} are one weight here: name both.")
    if spec.lora.init == "olora" and any(isinstance(module, Conv1D) for module in model.modules()):
        raise TrainError("lora.init: OLoRA does not know the transposed layers of this model.")


def _check_ranks(rank: int, adapter: Mapping[str, torch.Tensor]) -> None:
    """A start that is taken out of a weight has no more directions than the weight."""
    found = min((len(tensor) for name, tensor in adapter.items() if "lora_A" in name), default=rank)
    if found < rank:
        raise TrainError(f"lora.r: {rank} is more than the {found} directions of the narrowest layer.")


def check_start(model: Any, checkpoint: Path | None) -> None:
    """Raise TrainError unless the adapter in `checkpoint` was made as the model's own: only then do its weights mean
    the same here."""
    if checkpoint is None or not hasattr(model, "peft_config") or not (checkpoint / CONFIG).is_file():
        return
    own, other = model.peft_config["default"], PeftConfig.from_pretrained(str(checkpoint))
    for key, option in MADE.items():
        if getattr(own, key) != getattr(other, key):
            raise TrainError(
                f"save.resume_path: the adapter in {checkpoint} has {key} {getattr(other, key)}: set {option} to that."
            )


def stand_alone(model: Any, folder: Path) -> None:
    """Rewrite the adapter saved in `folder` so that it belongs to the untouched base weights: with W = R + A0 B0, the
    trained R + A B is W + A B - A0 B0, which is an adapter of twice the rank. DoRA's lengths stay what they are."""
    first = getattr(model, "first_adapter", None)
    if not first:
        return
    state = load_file(folder / WEIGHTS)
    for name, began in first.items():
        now = state[name].float()
        state[name] = torch.cat([now, began] if "lora_A" in name else [now, -began], 0 if "lora_A" in name else 1)
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    scale = 2**0.5 if config["use_rslora"] else 2  # alpha / root of rank, or alpha / rank, stays the same
    config |= {"init_lora_weights": True, "r": 2 * config["r"], "lora_alpha": scale * config["lora_alpha"]}
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def hurry(optimizer: Any, model: Any, ratio: float) -> None:
    """LoRA+: let the B matrices learn `ratio` times faster, each in a group like the one that it was in. Raises
    TrainError if the optimizer does not hold them."""
    fast = {id(p) for name, p in model.named_parameters() if p.requires_grad and "lora_B" in name}
    found = 0
    for group in list(optimizer.param_groups):
        own = [p for p in group["params"] if id(p) in fast]
        if not own:
            continue
        found += len(own)
        rate = group["lr"] * ratio
        if len(own) == len(group["params"]):
            group["lr"] = rate
            continue
        group["params"] = [p for p in group["params"] if id(p) not in fast]
        optimizer.add_param_group({**{k: v for k, v in group.items() if k != "params"}, "params": own, "lr": rate})
    if found != len(fast) or not fast:
        raise TrainError(
            "lora.loraplus_lr_ratio: this optimizer does not hold the B matrices as they are: set it to 1."
        )
