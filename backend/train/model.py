"""The model and its tokenizer: located, loaded, and saved."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from accelerate import PartialState
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from backend import registry
from backend.config import RunSpec
from backend.train import (
    adapter_names,
    added_tokens,
    builtin_models,
    end_tokens,
    kernels,
    lora,
    quantized,
    templates,
    trl_trainers,
    unsloth,
)
from backend.train.device import DTYPES
from backend.train.patches import (
    bitsandbytes_cpu_layout,
    bitsandbytes_int8_inputs,
    bitsandbytes_int8_reload,
    deepspeed_fp32_buffers,
    llama4_base_model,
    tensor_parallel_save,
    transformers_dbrx_experts,
    transformers_frozen_parameters,
    transformers_generation_config,
    transformers_grouped_mm,
    transformers_inplace_outputs,
    transformers_loss_type,
    transformers_quantize_on_device,
    transformers_router_jitter,
    transformers_rwkv_rescaling,
)
from backend.train.run_log import TrainError

REFERENCE = re.compile(r"\.(lora_\w+|modules_to_save|trainable_tokens_delta)\.ref(\.|$)")
Build = Callable[[Any, str, torch.dtype, Mapping[str, Any]], Any]  # class, name, dtype, further arguments


@dataclass(frozen=True)
class ModelSource:
    """A folder or a Hub id, and the arguments of `from_pretrained` that belong to it."""

    name: str
    options: dict[str, Any]


def locate(spec: RunSpec, report: builtin_models.Report) -> ModelSource:
    """Where the model is; a built-in model is prepared if it is missing. Raises TrainError."""
    model = spec.model
    if model.source == "builtin":
        return ModelSource(str(builtin_models.prepare(model.builtin, report)), {"local_files_only": True})
    trust = {"trust_remote_code": model.trust_remote_code}
    if model.source == "hub":
        return ModelSource(model.hub_id, {**trust, "revision": model.revision})
    return ModelSource(str(Path(model.path).expanduser()), {**trust, "local_files_only": True})


def load_tokenizer(spec: RunSpec, source: ModelSource) -> Any:
    """The tokenizer, with a padding token, and with the added tokens and the chat template of `spec`. Raises
    TrainError."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.name, **source.options)
    except Exception as error:  # errors of many kinds: network, name, missing file, broken file
        raise TrainError(_unloadable("tokenizer", source, error)) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = _padding_token(tokenizer, source)
    added_tokens.add(spec, tokenizer)
    templates.set_chat_template(spec, tokenizer)
    return tokenizer


def load_saved_tokenizer(spec: RunSpec, folder: Path) -> Any:
    """The tokenizer that a run has saved with its model. Raises TrainError."""
    options = {"local_files_only": True, "trust_remote_code": spec.model.trust_remote_code}
    source = ModelSource(str(folder), options)
    try:
        return AutoTokenizer.from_pretrained(source.name, **source.options)
    except Exception as error:
        raise TrainError(_unloadable("tokenizer", source, error)) from error


def _padding_token(tokenizer: Any, source: ModelSource) -> str:
    """A token to pad with. Padding is masked, so any special token will do; the trainers of TRL require that it is in
    the vocabulary. Raises TrainError."""
    special = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    tokens = (tokenizer.eos_token, "<|pad|>", tokenizer.unk_token, tokenizer.bos_token, *special)
    vocabulary = tokenizer.get_vocab()
    found = next((token for token in tokens if token in vocabulary), "")
    if not found:
        raise TrainError(
            f"The tokenizer of {source.name} has no padding token, and no other special token that could replace it. "
            "Set pad_token in its tokenizer_config.json to a token of the vocabulary."
        )
    return str(found)


def load(
    spec: RunSpec,
    source: ModelSource,
    precision: str,
    tokenizer: Any,
    engine_arguments: Mapping[str, Any] = MappingProxyType({}),
    frozen: bool = False,
    build: Build | None = None,
) -> nn.Module:
    """The model before training; `frozen` if it is only a reference. `engine_arguments` go to `from_pretrained`, and
    `build` is called instead of it. Raises TrainError."""
    adapted, pure = spec.method.kind == "lora", not spec.fp32_master_weights
    low = frozen or (not registry.LORA_INITS[spec.lora.init].changes_base_weights if adapted else pure)
    dtype = DTYPES[precision] if low else torch.float32  # weights that are decomposed or trained need full precision
    reward = registry.STAGES[spec.train.stage].is_reward_model
    kind, more = (AutoModelForSequenceClassification, {"num_labels": 1}) if reward else (AutoModelForCausalLM, {})
    quantization = quantized.load_arguments(spec, source.name, source.options, dtype)
    arguments = {**more, **source.options, **engine_arguments, **quantization, **kernels.load_arguments(spec)}
    try:
        with trl_trainers.without_new_head_warning() if reward else contextlib.nullcontext():
            if spec.train.use_unsloth:
                model: Any = unsloth.load_model(spec, source.name, dtype, arguments)
            else:
                model = (build or _from_pretrained)(kind, source.name, dtype, arguments)
    except TrainError:
        raise
    except Exception as error:
        raise TrainError(kernels.attention_error(spec, error) or _unloadable("model", source, error)) from error
    kernels.check_attention(spec, model)
    kernels.apply_liger(spec, model)
    unsloth.check_kernels(spec, model)
    bitsandbytes_cpu_layout.apply(model)
    bitsandbytes_int8_inputs.apply(model)
    bitsandbytes_int8_reload.apply(model)
    llama4_base_model.apply(model)
    if spec.precision.compute == "fp8":
        transformers_inplace_outputs.apply(model)
    transformers_dbrx_experts.apply(model)
    transformers_router_jitter.apply(model)
    transformers_rwkv_rescaling.apply(model)
    transformers_frozen_parameters.apply(model)
    transformers_generation_config.apply(model)
    if not reward:
        transformers_loss_type.apply(model)
    if registry.STRATEGIES[spec.parallel.strategy].zero_stage is not None or not spec.fp32_master_weights:
        deepspeed_fp32_buffers.apply(model, DTYPES[precision])
    transformers_grouped_mm.apply()
    added_tokens.fit_embeddings(spec, model, tokenizer)
    # FSDP2 wants one dtype of trainable weights, and some models keep those of the router in fp32.
    return model.requires_grad_(False) if frozen else model


def _from_pretrained(kind: Any, name: str, dtype: torch.dtype, arguments: Mapping[str, Any]) -> Any:
    on_device = arguments.get("device_map") == quantized.HOST_RAM
    with transformers_quantize_on_device.apply(PartialState().device) if on_device else contextlib.nullcontext():
        model, loaded = kind.from_pretrained(name, dtype=dtype, output_loading_info=True, **arguments)
    _require_all_weights(model, name, loaded["missing_keys"], new_head=kind is AutoModelForSequenceClassification)
    return model


def _require_all_weights(model: Any, name: str, missing: Collection[str], new_head: bool) -> None:
    """Raise TrainError if the weight files of the model `name` lack parameters of it, other than those of a new head.
    transformers 5.23 only logs that it initializes them at random."""
    parameters = [parameter for parameter, _ in model.named_parameters()]
    if new_head:
        parameters = [parameter for parameter in parameters if parameter.startswith(f"{model.base_model_prefix}.")]
    absent = sorted(set(parameters) & set(missing))
    if absent:
        examples = ", ".join(absent[:3]) + (" and others" if len(absent) > 3 else "")
        raise TrainError(
            f"The weight files of {name} have no values for {len(absent):,} of the {len(parameters):,} parameters of "
            f"{type(model).__name__}: {examples}. Training would start from random values there. Use weight files and "
            "a config.json of the same model."
        )


def saved_dtype(spec: RunSpec, source: ModelSource) -> torch.dtype:
    """The dtype that the source's weights are stored in, so that the saved model has the size of the original. In pure
    bf16 there is nothing more precise to save."""
    if not spec.fp32_master_weights:
        return torch.bfloat16
    found = quantized.model_config(source.name, source.options)
    name = found.get("dtype") or found.get("torch_dtype") or "float32"
    return getattr(torch, str(name), torch.float32)


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """(trainable parameters, all parameters) of the whole model, adapters included, also where a rank has a shard of
    it. TRL's copy of the initial adapter ("ref") is part of the reference model."""
    sizes = [(_size(p), p.requires_grad) for name, p in model.named_parameters() if not REFERENCE.search(name)]
    return sum(size for size, trainable in sizes if trainable), sum(size for size, _ in sizes)


def _size(parameter: nn.Parameter) -> int:
    size = int(getattr(parameter, "ds_numel", parameter.numel()))
    # bitsandbytes 0.50 stores two 4-bit weights in a byte.
    return 2 * size * parameter.element_size() if type(parameter).__name__ == "Params4bit" else size


def save(
    model: Any, tokenizer: Any, folder: Path, dtype: torch.dtype, gathered: Mapping[str, Any] | None = None
) -> None:
    """Write weights and tokenizer into `folder`, which appears complete or not at all. `gathered`: the weights, where
    the model itself has a shard of them. Raises TrainError."""
    temporary = folder.with_name(f".{folder.name}.writing")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        if hasattr(model, "peft_config"):
            adapters = ["default"]  # TRL may have added a copy of the initial adapter as the reference model
            model.save_pretrained(temporary, state_dict=gathered, selected_adapters=adapters)
            lora.convert_to_plain_lora(model, temporary)
            adapter_names.rename(model, temporary)
            end_tokens.save(model, temporary)
        else:
            cast: dict[int, torch.Tensor] = {}  # tied weights stay one tensor
            weights = gathered or model.state_dict()
            state = {k: cast.setdefault(v.data_ptr(), _as_stored(v, dtype)) for k, v in weights.items()}
            tensor_parallel_save.apply(model)
            model.save_pretrained(temporary, state_dict=dict(state))
            _write_dtype(temporary / "config.json", {v.dtype for v in state.values() if v.is_floating_point()})
        tokenizer.save_pretrained(temporary)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.replace(folder)
    except OSError as error:
        raise TrainError(f"The trained model could not be saved in {folder}: {error.strerror or error}.") from error


def rounding_problem(model: nn.Module, dtype: torch.dtype) -> str:
    """A sentence about weights that were rounded to a 16-bit compute dtype and not trained, although those in the files
    of the base model have another `dtype`; '' without such weights."""
    frozen = {parameter.dtype for parameter in model.parameters() if not parameter.requires_grad}
    found = frozen & {torch.bfloat16, torch.float16} - {dtype}
    names = {value: name for name, value in DTYPES.items()}
    if not found or dtype not in names:
        return ""
    rounded = " and ".join(sorted(names[each] for each in found))
    return (
        f"Weights that were not trained are saved in {rounded}, the compute dtype, although the base model's files "
        f"have {names[dtype]}."
    )


def _as_stored(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A weight as it is saved: fp32 ones in `dtype`. Others are frozen weights in a 16-bit compute dtype, or merged or
    gathered ones: in a wider dtype they would look as if they had not been rounded."""
    return tensor.to(dtype) if tensor.dtype == torch.float32 else tensor


def _write_dtype(config: Path, dtypes: set[torch.dtype]) -> None:
    """Let config.json say the dtype that holds all values of the file. save_pretrained (transformers 5.23) writes that
    of the first weight of the model in memory, and from_pretrained loads all weights in the dtype that it finds."""
    values = json.loads(config.read_text(encoding="utf-8"))
    widest = functools.reduce(torch.promote_types, dtypes)
    values["dtype"] = str(widest).removeprefix("torch.")
    config.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _unloadable(what: str, source: ModelSource, error: Exception) -> str:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if isinstance(error, ImportError):
        return f"The {what} of {source.name} needs a package that is not installed: {reason}"
    if "weights_only" in reason:  # torch would advise to load the file anyway
        return (
            f"The {what} of {source.name} could not be loaded: one of its files is a pickle that contains more than "
            "tensors and could run any code. Use a model with .safetensors files."
        )
    return f"The {what} of {source.name} could not be loaded: {reason}"
