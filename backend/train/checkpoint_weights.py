"""Loading the weights of a checkpoint into the model that trains: all of them, or TrainError.

transformers 5 holds the weights of many architectures in another layout than their published checkpoints, for example
the experts of a layer in one tensor. `from_pretrained` converts when it loads, and `save_pretrained` converts back. But
trainer.py, `_load_from_checkpoint` and `_load_best_model` (transformers 5.23), load a checkpoint by the names of the
model with strict=False: what was converted keeps the values of the base model, with a warning. Here a checkpoint is
converted as by `from_pretrained`, and loaded completely.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model_state_dict
from peft.utils import load_peft_weights
from safetensors import safe_open
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from backend.train.run_log import TrainError
from backend.wording import counted

ONE_FILE = ("model.safetensors", "pytorch_model.bin")  # transformers writes the first; other tools may write the second
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
NOT_WEIGHTS: Mapping[str, str] = {"_extra_state": "scales of TransformerEngine's fp8 layers, measured again"}
"""Ends of names that only the checkpoint or only the model may have, and why nothing is lost without them."""
REMEDY = "Use a checkpoint of the same model and method, or start at step 0."
NAMED = 4  # tensors in an error
Read = Callable[[], torch.Tensor]


class CheckpointWeightsMixin:
    """Mixin for a Trainer that loads nothing but complete checkpoints. DeepSpeed and FSDP load their own formats, which
    have the names of the model."""

    def _load_from_checkpoint(self, checkpoint: str, model: Any = None) -> None:
        trainer: Any = self
        if trainer.is_fsdp_enabled:
            super()._load_from_checkpoint(checkpoint, model)  # type: ignore[misc]
        else:
            load(trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False), Path(checkpoint))

    def _load_best_model(self) -> None:
        trainer: Any = self
        if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
            super()._load_best_model()  # type: ignore[misc]
        else:
            weights = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
            load(weights, Path(trainer.state.best_model_checkpoint))


def load(model: Any, folder: Path) -> None:
    """Load what a checkpoint holds of `model`, all weights or its adapters, in place: optimizer and engine keep their
    references. Raises TrainError unless `folder` has exactly these tensors."""
    if hasattr(model, "peft_config"):
        for adapter in model.peft_config:
            load_adapter(model, adapter, folder if adapter == "default" else folder / adapter)
    else:
        _load_model(model, folder)


def _load_model(model: Any, folder: Path) -> None:
    """Load every weight and persistent buffer."""
    target = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if not _is_no_weight(name)}
    loaded: set[int] = set()
    with _stored_tensors(folder) as stored:
        groups, left = _converted_groups(model, stored, target)
        for (name, sources), transform in groups.items():
            values = _convert(model, folder, name, sources, transform)
            left += [f"{name} (no tensor of the model)" for name in values if name not in target]
            for name, value in values.items():
                if name in target:
                    _set(folder, name, target[name], value, sources)
                    loaded.add(id(target[name]))
    missing = [name for name, tensor in target.items() if id(tensor) not in loaded]  # tied ones are the same tensor
    _require_nothing(folder, missing, left)


def _is_no_weight(name: str) -> bool:
    return name.rpartition(".")[2] in NOT_WEIGHTS


@contextmanager
def _stored_tensors(folder: Path) -> Iterator[Mapping[str, Read]]:
    """Name -> a function that reads the tensor. Raises TrainError."""
    with ExitStack() as opened:
        found: dict[str, Read] = {}
        for path in _weight_files(folder):
            if path.suffix == ".safetensors":
                file = opened.enter_context(safe_open(path, framework="pt"))
                found |= {name: partial(file.get_tensor, name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            else:
                tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
                found |= {name: partial(tensors.__getitem__, name) for name in tensors}
        yield {name: read for name, read in found.items() if not _is_no_weight(name)}


def _weight_files(folder: Path) -> list[Path]:
    for name in ONE_FILE:
        if (path := folder / name).is_file():
            return [path]
        if (index := folder / f"{name}.index.json").is_file():
            return [folder / part for part in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    raise TrainError(f"{folder} has no weights to load: {' and '.join(ONE_FILE)} are missing.")


def _converted_groups(
    model: Any, stored: Mapping[str, Read], target: Mapping[str, Any]
) -> tuple[dict[tuple[str, tuple[str, ...]], Any], list[str]]:
    """(The first tensor of the model and the stored names) -> the transform that makes tensors of the model from them,
    as in transformers' `convert_and_load_state_dict_in_model`; and the stored names that belong to no tensor of the
    model.
    """
    mapping, prefix = get_model_conversion_mapping(model), model.base_model_prefix
    renamings = [transform for transform in mapping if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in mapping if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    transforms: dict[str, Any] = {}
    sources: dict[str, list[str]] = {}
    left = []
    for name in sorted(stored, key=dot_natural_key):
        own, pattern = rename_source_key(name, renamings, converters, prefix, dict(target))
        if own not in target and name in target:  # saved by its own name
            own, pattern = rename_source_key(name, [], [], prefix, dict(target))
        if own not in target or (pattern is None and own in transforms):
            left.append(name)
            continue
        transform = deepcopy(by_pattern[pattern]) if pattern else WeightRenaming(name, own)
        transforms.setdefault(own, transform).add_tensor(own, name, pattern or name, stored[name])
        sources.setdefault(own, []).append(name)
    return {(own, tuple(sources[own])): transform for own, transform in transforms.items()}, left


def _convert(model: Any, folder: Path, name: str, sources: tuple[str, ...], transform: Any) -> dict[str, torch.Tensor]:
    """Name -> tensor of the model. Raises TrainError."""
    try:
        values = transform.convert(name, model=model, config=model.config)
    except Exception as error:  # errors of many kinds: stacking, chunking, reading
        raise TrainError(
            f"{folder} does not fit the model: {name} cannot be built from {_listed(sources)} ({error}). {REMEDY}"
        ) from error
    return {own: value[0] if isinstance(value, list) else value for own, value in values.items()}


def _set(folder: Path, name: str, tensor: Any, value: torch.Tensor, sources: tuple[str, ...] = ()) -> None:
    """Copy `value`, which is made of the stored tensors `sources`, into `tensor`. Raises TrainError."""
    if tensor.shape != value.shape:
        made = f", built from {_listed(sources)}," if sources not in ((), (name,)) else ""
        raise TrainError(
            f"{folder} does not fit the model: {name}{made} has the shape {tuple(value.shape)} in the file, and "
            f"{tuple(tensor.shape)} in the model. {REMEDY}"
        )
    with torch.no_grad():
        if isinstance(tensor, DTensor):  # every rank has read the whole tensor
            value = distribute_tensor(
                value.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None
            )
        tensor.copy_(value)


def has_adapter(folder: Path) -> bool:
    """Whether there are weights of an adapter in `folder`."""
    return any((folder / name).is_file() for name in ADAPTER_FILES)


def load_adapter(model: Any, adapter: str, folder: Path) -> None:
    """Load an adapter by the names it was saved with. peft 0.21 (transformers_weight_conversion.py) renames layers that
    have a published name, also where the adapter was saved with the model's name, as on laguna and inkling2_text; it
    ignores the tensors whose new name the model does not have."""
    if not has_adapter(folder):
        raise TrainError(f"{folder} has no adapter to load: {ADAPTER_FILES[0]} is missing.")
    saved = load_peft_weights(str(folder), device="cpu")
    own = get_peft_model_state_dict(model, adapter_name=adapter)
    _require_nothing(folder, sorted(own.keys() - saved.keys()), sorted(saved.keys() - own.keys()))
    for name, tensor in own.items():
        _set(folder, name, tensor, saved[name])  # `tensor` shares the memory of the model's tensor
    after = get_peft_model_state_dict(model, adapter_name=adapter)
    differing = [name for name, tensor in own.items() if not torch.equal(tensor, after[name])]
    if differing:
        raise TrainError(f"{folder} was not loaded completely: {_listed(differing)} differ in the model.")


def check_engine_names(model: Any, folder: Path) -> None:
    """Raise TrainError unless a checkpoint of DeepSpeed or FSDP has the tensors of `model`, before the engine wraps it:
    of adapters, universal checkpoints and FSDP's files, the engines load whatever they find."""
    stored, own = _engine_names(folder), {name for name in model.state_dict() if not _is_no_weight(name)}
    needed = own
    if hasattr(model, "peft_config"):  # frozen weights are not saved
        needed = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        if not needed <= stored:  # sharded files of FSDP have peft's names
            needed = set(get_peft_model_state_dict(model))
    _require_nothing(folder, sorted(needed - stored), sorted(stored - own - needed))


def _engine_names(folder: Path) -> set[str]:
    """Names of the tensors of the model in a checkpoint of DeepSpeed or FSDP. Raises TrainError."""
    sharded, whole = folder / "pytorch_model_fsdp_0", folder / "pytorch_model_fsdp.bin"
    states = sorted(folder.glob("global_step*/*model_states.pt"))
    if states:
        names = torch.load(states[0], map_location="cpu", weights_only=False, mmap=True)["module"]
    elif whole.is_file():
        names = torch.load(whole, map_location="cpu", weights_only=True, mmap=True)
    elif sharded.is_dir():
        metadata = FileSystemReader(sharded).read_metadata().state_dict_metadata
        names = [name.removeprefix("model.") for name in metadata]
    else:
        raise TrainError(f"{folder} has no weights that DeepSpeed or FSDP can load. {REMEDY}")
    return {name for name in names if not _is_no_weight(name)}


def _require_nothing(folder: Path, missing: list[str], left: list[str]) -> None:
    """Raise TrainError if there are names in either list."""
    problems = []
    if missing:
        of_model = f"{counted(len(missing), 'tensor')} of the model"
        problems.append(f"{of_model} {_are(missing)} missing there ({_listed(missing)})")
    if left:
        problems.append(f"{counted(len(left), 'tensor')} there {_are(left)} not part of the model ({_listed(left)})")
    if problems:
        raise TrainError(f"{folder} does not fit the model: {', and '.join(problems)}. {REMEDY}")


def _are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _listed(names: Iterable[str]) -> str:
    """The first names, and how many more there are."""
    found = list(names)
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return ", ".join(found[:NAMED]) + more
