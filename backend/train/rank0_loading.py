"""FSDP2 loading on rank 0: one rank reads the weights, and the others get their shards from it.

accelerate 1.15 broadcasts the weights from rank 0 once the optimizer exists (utils/fsdp_utils.py,
fsdp2_load_full_state_dict), but transformers 5.23 reads the file on every rank all the same. So until then the other
ranks have the model on the meta device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, GenerationConfig

from backend.config import RunSpec
from backend.train import model, quantized
from backend.train.context import TrainContext
from backend.train.engines.fsdp import load_on_every_rank, loads_on_rank0
from backend.train.patches import accelerate_fsdp2_quantized


def load(
    context: TrainContext,
    config: Any,
    source: model.ModelSource,
    tokenizer: Any,
    engine_arguments: Mapping[str, Any],
) -> Any:
    """The model before training, on the meta device on all ranks but 0. Where that is not possible every rank reads the
    weights, and the TrainingArguments `config` say so. A collective call. Raises TrainError, Stopped."""
    spec, group = context.spec, context.group

    def read() -> Any:
        return model.load(spec, source, context.run.compute_dtype, tokenizer, engine_arguments)

    if not loads_on_rank0(config):
        return read()
    on_meta = (
        _load_on_meta(spec, source, context.run.compute_dtype, tokenizer) if _can_broadcast(spec, source) else None
    )
    loaded = None
    if all(group.gather(on_meta is not None)):
        loaded = context.first(read)
        found = on_meta if group.rank else loaded
        # A checkpoint may have two tensors that the config ties. Then the names of the parameters differ.
        if all(signature == _signature(found) for signature in group.gather(_signature(found))):
            _broadcast_buffers(context, found)
            if getattr(found, "is_loaded_in_4bit", False):
                quantized.share_scales(context.group, found)
                accelerate_fsdp2_quantized.apply()
            return found
    context.run_log.info("Every rank reads the weights, because those of this model cannot be broadcast from rank 0.")
    load_on_every_rank(config)
    return read() if loaded is None else loaded


def _can_broadcast(spec: RunSpec, source: model.ModelSource) -> bool:
    """Whether everything that is done to the model works on the meta device. The tensors of prequantized weights, and
    what the custom code of a model computes, are not known before the weights are read."""
    return not (spec.needs_loaded_weights or quantized.stored_config(source.name, source.options))


def _load_on_meta(spec: RunSpec, source: model.ModelSource, precision: str, tokenizer: Any) -> Any:
    """The model on the meta device; None if that is not possible. Does not change the random state."""
    try:
        with torch.random.fork_rng(devices=[]):
            made = model.load(spec, source, precision, tokenizer, build=_build_on_meta)
    except Exception:  # reading the weights, which follows, reports the reason
        return None
    parameters, all_names = dict(made.named_parameters()), dict(made.named_parameters(remove_duplicate=False))
    # accelerate broadcasts everything in the state_dict and expects it to be sharded, but buffers are not. Afterwards
    # accelerate ties weights again, and would also tie the trained copy of a tied weight.
    buffers, tied = made.state_dict().keys() - all_names.keys(), len(parameters) < len(all_names)
    return None if buffers or (tied and spec.method.kind == "lora" and spec.lora.modules_to_save) else made


def _build_on_meta(kind: Any, name: str, dtype: torch.dtype, arguments: Mapping[str, Any]) -> Any:
    """Like `from_pretrained`, with the parameters on the meta device; buffers have their values."""
    attention = {key: arguments[key] for key in arguments if key == "attn_implementation"}
    of_loading = (*attention, "quantization_config", "device_map")
    config = AutoConfig.from_pretrained(name, **{k: v for k, v in arguments.items() if k not in of_loading})
    with init_empty_weights(include_buffers=False):
        made = kind.from_config(config, dtype=dtype, **attention)
    if "quantization_config" in arguments:
        quantized.convert_on_meta(made, arguments["quantization_config"])
    made.tie_weights()  # moving parameters to the meta device has untied them
    if made.can_generate():
        options = {key: arguments[key] for key in arguments if key in ("revision", "local_files_only")}
        with contextlib.suppress(OSError):  # without a file, it follows from the model's config
            made.generation_config = GenerationConfig.from_pretrained(name, **options)
    return made.eval()


def _signature(module: nn.Module) -> list[tuple[str, str, str]]:
    """Name, shape and dtype of all tensors; they must be the same on all ranks."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return [(name, str(tuple(tensor.shape)), str(tensor.dtype)) for name, tensor in tensors]


def _broadcast_buffers(context: TrainContext, module: nn.Module) -> None:
    """Copy rank 0's buffers to all ranks: accelerate does not broadcast them."""
    buffers = dict(module.named_buffers())
    for name, tensor in context.group.share(buffers).items():
        buffers[name].copy_(tensor)
