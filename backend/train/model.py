"""The weights: found, loaded, made trainable as the method says, and saved.

Beside the floors. Imports catalog, spec, kernels, lora, quantized, stages, templates, unsloth, builtin, journal.
Trained weights are held in fp32, frozen ones in the precision of the computing.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from backend import registry
from backend.config import RunSpec
from backend.train import builtin_models, kernels, lora, quantized, templates, trl_trainers, unsloth
from backend.train.device import DTYPES
from backend.train.run_log import TrainError

Make = Callable[[Any, str, torch.dtype, Mapping[str, Any]], Any]  # class, name, type, further arguments


@dataclass(frozen=True)
class Source:
    """Where the model comes from: a folder or a hub id, and how it may be read."""

    name: str
    options: dict[str, Any]


def find(spec: RunSpec, tell: builtin_models.Tell) -> Source:
    """The model's place; a built-in one is made if need be. Raises TrainError."""
    model = spec.model
    if model.source == "builtin":
        return Source(str(builtin_models.prepare(model.builtin, tell)), {"local_files_only": True})
    trust = {"trust_remote_code": model.trust_remote_code}
    if model.source == "hub":
        if not model.hub_id:
            raise TrainError("model.hub_id is empty: write organisation/name.")
        return Source(model.hub_id, {**trust, "revision": model.revision})
    folder = Path(model.path).expanduser()
    if not model.path or not folder.is_dir():
        raise TrainError(f"model.path: there is no folder {model.path or '(empty)'}.")
    if not (folder / "config.json").is_file():
        raise TrainError(f"model.path: {folder} has no config.json: name the folder that save_pretrained wrote.")
    return Source(str(folder), {**trust, "local_files_only": True})


def tokenizer(spec: RunSpec, source: Source) -> Any:
    """The tokenizer, with a padding token and the chat template of `spec`. Raises TrainError."""
    try:
        found = AutoTokenizer.from_pretrained(source.name, **source.options)
    except Exception as error:  # of many kinds: network, name, missing file, broken file
        raise TrainError(_unloadable("tokenizer", source, error)) from error
    if found.pad_token is None:
        found.pad_token = found.eos_token or "<|pad|>"
    templates.set_chat_template(spec, found)
    return found


def load(
    spec: RunSpec,
    source: Source,
    precision: str,
    tokens: Any,
    sliced: Mapping[str, Any] = MappingProxyType({}),
    frozen: bool = False,
    make: Make | None = None,
) -> nn.Module:
    """The untouched model, as it is trained or, `frozen`, only looked at; `sliced` says how to load it in slices, and
    `make` makes it otherwise than from its file.

    Raises TrainError.
    """
    lora, pure = spec.method.kind == "lora", not registry.PRECISIONS[spec.precision.compute].fp32_master_weights
    plain = frozen or (not registry.LORA_INITS[spec.lora.init].changes_base_weights if lora else pure)
    dtype = DTYPES[precision] if plain else torch.float32  # what is taken apart is taken apart exactly
    scores = registry.STAGES[spec.train.stage].is_reward_model
    kind, more = (AutoModelForSequenceClassification, {"num_labels": 1}) if scores else (AutoModelForCausalLM, {})
    packing = quantized.loading(spec, source.name, source.options, dtype)
    how = {**more, **source.options, **sliced, **packing, **kernels.loading(spec)}
    try:
        with trl_trainers.untaught() if scores else contextlib.nullcontext():
            if spec.train.use_unsloth:
                model: Any = unsloth.read(spec, source.name, dtype, how)
            else:
                model = (make or _read)(kind, source.name, dtype, how)
    except TrainError:
        raise
    except Exception as error:
        raise TrainError(kernels.refused(spec, error) or _unloadable("model", source, error)) from error
    kernels.check_attention(spec, model)
    kernels.patch(spec, model)
    unsloth.check_kernels(spec, model)
    quantized.keep_layout(model)
    vocabulary, known = model.get_input_embeddings().num_embeddings, max(tokens.get_vocab().values()) + 1
    if known > vocabulary:
        raise TrainError(
            f"The tokenizer knows {known:,} tokens and the model {vocabulary:,}: they do not belong together."
        )
    if not scores and "<|im_end|>" in (tokens.chat_template or "") and "<|im_end|>" in tokens.get_vocab():
        _stop_at(model, tokens.convert_tokens_to_ids("<|im_end|>"))
    return model


def _read(kind: Any, name: str, dtype: torch.dtype, how: Mapping[str, Any]) -> Any:
    return kind.from_pretrained(name, dtype=dtype, **how)


def _stop_at(model: Any, token: int) -> None:
    """Let generation end at `token` too; it is saved with the model."""
    ends = model.generation_config.eos_token_id
    ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    if token not in ends:
        model.generation_config.eos_token_id = [*ends, token]


def saved_dtype(spec: RunSpec, source: Source) -> torch.dtype:
    """The type that the source's own weights are stored in: what is saved has the same size as what was loaded. Pure
    bf16 has nothing finer to save."""
    if not registry.PRECISIONS[spec.precision.compute].fp32_master_weights:
        return torch.bfloat16
    config = Path(source.name) / "config.json"
    if not config.is_file():
        return torch.float32
    found = json.loads(config.read_text(encoding="utf-8"))
    name = found.get("dtype") or found.get("torch_dtype") or "float32"
    return getattr(torch, str(name), torch.float32)


def counts(weights: nn.Module) -> tuple[int, int]:
    """(trained parameters, all parameters) of the whole model, also where a rank holds a part of it."""
    found = [(int(getattr(p, "ds_numel", p.numel())), p.requires_grad) for p in weights.parameters()]
    return sum(size for size, taught in found if taught), sum(size for size, _ in found)


def save(model: Any, tokens: Any, folder: Path, dtype: torch.dtype, gathered: Mapping[str, Any] | None = None) -> None:
    """Write weights and tokenizer into `folder`, which appears whole or not at all. Raises TrainError.

    `gathered` are the weights where the model itself holds a part of them only.
    """
    temporary = folder.with_name(f".{folder.name}.writing")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        if hasattr(model, "peft_config"):
            own = ["default"]  # beside it may lie a copy of how it began, for the loss to compare with
            model.save_pretrained(temporary, state_dict=gathered, selected_adapters=own)
            lora.stand_alone(model, temporary)
        else:
            cast: dict[int, torch.Tensor] = {}  # tied weights stay one tensor
            state = {k: cast.setdefault(v.data_ptr(), v.to(dtype)) for k, v in (gathered or model.state_dict()).items()}
            model.config.dtype = dtype
            # Gathered already: the library would gather once more, and wait for ranks that do not come.
            vars(model.config).pop("distributed_config", None)
            model.save_pretrained(temporary, state_dict=state)
        tokens.save_pretrained(temporary)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.replace(folder)
    except OSError as error:
        raise TrainError(f"The trained model could not be saved in {folder}: {error.strerror or error}.") from error


def _unloadable(what: str, source: Source, error: Exception) -> str:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if isinstance(error, ImportError):
        return f"The {what} of {source.name} needs a package that is not installed: {reason}"
    return f"The {what} of {source.name} could not be loaded: {reason}"
