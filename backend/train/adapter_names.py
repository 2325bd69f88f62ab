"""The names by which an adapter is saved, so that peft loads every tensor of it.

peft 0.21 (utils/transformers_weight_conversion.py) renames the layers of an adapter at load as transformers renames
those of a published checkpoint, also if the adapter already has the names of the model. Where a pattern also matches
the model's names, the new name belongs to no layer, and peft ignores the tensor with a warning: the shared experts of
laguna, the short convolutions of inkling2_text.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model_state_dict
from peft.utils import load_peft_weights
from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers
from safetensors.torch import load_file, save_file
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, apply_renamings

from backend.train.run_log import TrainError

WEIGHTS, PREFIX = "adapter_model.safetensors", "base_model.model."


def saved_names(model: Any, names: Iterable[str]) -> dict[str, str]:
    """Name of a tensor, as peft has it in a file -> the name under which peft loads it into this tensor: the same or,
    where it is ignored, that of the published checkpoint. Tensors that peft ignores under both names are missing."""
    own = list(names)
    loaded = _loaded(model, own)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    transforms = [each for each in get_model_conversion_mapping(base) if isinstance(each, WeightRenaming)]
    reverse = [each.reverse_transform() for each in transforms[::-1]]
    published = {name: apply_renamings(name, reverse) for name in own if name not in loaded}
    loaded_as_published = _loaded(model, published.values())
    found = {name: name if name in loaded else published[name] for name in own}
    return {name: saved for name, saved in found.items() if name in loaded or name in loaded_as_published}


def _loaded(model: Any, names: Iterable[str]) -> set[str]:
    """The tensors into which peft loads a file with these names."""
    stored = {name: torch.empty(1, 1, device="meta") for name in names}
    return set(convert_peft_adapter_state_dict_for_transformers(model, LoraConfig(), stored)) if stored else set()


def ignored_layers(model: Any, layers: Iterable[str]) -> list[str]:
    """Those of the layers of `model` whose adapter peft would not load from any file."""
    names = {f"{PREFIX}{layer}.lora_A.weight": layer for layer in layers}
    known = saved_names(model, names)
    return [layer for name, layer in names.items() if name not in known]


def check(model: Any) -> None:
    """Raise TrainError if the trained adapter of `model` could not be loaded completely."""
    adapted = [name for name, _ in model.named_parameters() if ".lora_" in name]
    layers = {name.removeprefix(PREFIX).partition(".lora_")[0] for name in adapted}
    ignored = sorted({layer.rpartition(".")[2] for layer in ignored_layers(model, layers)})
    if ignored:
        raise TrainError(
            f"lora.targets: peft would ignore the adapters of {', '.join(ignored)} when it loads the trained adapter: "
            f"it renames these layers of {model.config.model_type}. Set lora.targets to custom, and leave them out of "
            "lora.target_modules."
        )


def require_loaded(model: Any, folder: Path) -> None:
    """Raise TrainError unless peft has loaded every tensor of the file in `folder` into the model, and every tensor of
    the adapter is in the file: peft 0.21 only warns."""
    stored, own = load_peft_weights(str(folder), device="cpu"), get_peft_model_state_dict(model)
    names = saved_names(model, own)
    problems = sorted((set(names.values()) ^ stored.keys()) | (own.keys() - names.keys()))
    problems += [name for name, saved in names.items() if saved in stored and not _equal(own[name], stored[saved])]
    if problems:
        listed = ", ".join(problems[:3]) + (f" and {len(problems) - 3} more" if len(problems) > 3 else "")
        raise TrainError(
            f"The adapter in {folder} does not fit its base model: {listed} could not be loaded. Use the base model "
            "that it was trained on."
        )


def _equal(own: torch.Tensor, stored: torch.Tensor) -> bool:
    values = own.float().cpu(), stored.float()
    return own.shape == stored.shape and bool(torch.allclose(*values, rtol=0, atol=0, equal_nan=True))


def rename(model: Any, folder: Path) -> None:
    """Give the tensors of the adapter saved in `folder` the names under which peft loads them."""
    state = load_file(folder / WEIGHTS)
    renamed = {saved: state[name] for name, saved in saved_names(model, state).items()}
    if renamed.keys() != state.keys():
        save_file(renamed, folder / WEIGHTS, metadata={"format": "pt"})
