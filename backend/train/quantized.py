"""Quantized base weights: quantized by bitsandbytes while loading, or stored that way."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from accelerate import PartialState
from transformers import (
    AwqConfig,
    BitsAndBytesConfig,
    CompressedTensorsConfig,
    FineGrainedFP8Config,
    GPTQConfig,
    Mxfp4Config,
    PreTrainedConfig,
)
from transformers.quantizers import AutoHfQuantizer

from backend import registry
from backend.config import RunSpec
from backend.engines import engine_of
from backend.train.device import ProcessGroup
from backend.train.run_log import TrainError

DEQUANTIZED: Mapping[str, Any] = {
    "mxfp4": Mxfp4Config, "fp8": FineGrainedFP8Config, "compressed-tensors": CompressedTensorsConfig,
}  # fmt: skip
WITH_BACKWARD: Mapping[str, Any] = {"gptq": GPTQConfig, "awq": AwqConfig}
HOST_RAM: Mapping[str, Any] = {"": "cpu"}  # the device_map of weights that FSDP moves to the device as it shards them


def load_arguments(spec: RunSpec, source: str, options: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of `from_pretrained`. Raises TrainError for a prequantized model that cannot be trained."""
    stored = stored_config(source, options)
    found: dict[str, Any] = {}
    if stored:
        found = _prequantized(spec, stored)
    elif registry.QUANTIZATIONS[spec.method.quantization].bits:
        found = {"quantization_config": bitsandbytes_config(spec, dtype)}
    if not found:
        return {}
    # ZeRO-3 places the weights itself, and rejects a device_map.
    if registry.STRATEGIES[spec.parallel.strategy].zero_stage != 3:
        on_host = not stored and engine_of(spec.parallel.strategy).shards_from_host
        found["device_map"] = dict(HOST_RAM) if on_host else {"": PartialState().device}
    return found


def stored_config(source: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The quantization_config of a prequantized model; empty for others."""
    return dict(model_config(source, options).get("quantization_config") or {})


def model_config(source: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a folder or of a model on the Hub."""
    known = {name: value for name, value in options.items() if name in ("revision", "local_files_only")}
    return dict(PreTrainedConfig.get_config_dict(source, **known)[0])


def _prequantized(spec: RunSpec, stored: Mapping[str, Any]) -> dict[str, Any]:
    kind = str(stored.get("quant_method"))
    row = registry.PREQUANTIZED.get(kind)
    if row is None:
        raise TrainError(
            f"model.{spec.model.source}: transformers cannot train on weights that are quantized as {kind}. Use the "
            "original model."
        )
    _check_prequantized(spec, kind, row)
    if row.dequantized_on_load:
        return {"quantization_config": DEQUANTIZED[kind](dequantize=True)}
    if kind in WITH_BACKWARD:  # kernels with a backward pass
        return {"quantization_config": WITH_BACKWARD[kind](bits=int(stored.get("bits") or 4), backend="auto_trainable")}
    return {}


def _check_prequantized(spec: RunSpec, kind: str, row: registry.PrequantizedFormat) -> None:
    """Raise TrainError for options that a prequantized model does not support. The rules refuse the same if they can
    read the model's config; that of a model on the Hub may be downloaded after they have run."""
    if spec.method.kind == "lora" and spec.method.quantization != "none":
        raise TrainError(f"method.quantization: the model is already quantized as {row.label}. Set it to none.")
    if row.dequantized_on_load:
        return
    if spec.method.kind != "lora":
        raise TrainError(f"method.kind: a model that is quantized as {row.label} can be trained with lora only.")
    if spec.save.merge_adapter:
        raise TrainError("save.merge_adapter: an adapter cannot be merged into quantized weights. Set it to false.")
    if spec.lora.init not in ("default", "gaussian"):
        raise TrainError(
            f"lora.init: {spec.lora.init} needs weights that are not quantized; the model is quantized as {row.label}. "
            "Set it to default."
        )
    if spec.lora.use_dora and kind in WITH_BACKWARD:
        raise TrainError(f"lora.use_dora: peft has no DoRA for {row.label} layers. Set it to false.")
    if spec.precision.compute == "fp8" and kind == "bitsandbytes":
        raise TrainError("precision.compute: fp8 would replace the quantized layers of the model. Set it to bf16.")


def bitsandbytes_config(spec: RunSpec, dtype: torch.dtype) -> BitsAndBytesConfig:
    """bitsandbytes' options; it computes in the run's compute dtype."""
    method = spec.method
    if method.quantization not in registry.FOUR_BIT:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=method.quantization,
        bnb_4bit_use_double_quant=method.bnb_4bit_use_double_quant,
        bnb_4bit_compute_dtype=dtype,
        # Only floating-point tensors are sharded; with the default uint8 each device would keep the whole base model.
        bnb_4bit_quant_storage=dtype if registry.STRATEGIES[spec.parallel.strategy].shards_weights else torch.uint8,
    )


def convert_on_meta(model: Any, config: BitsAndBytesConfig) -> None:
    """Give a model on the meta device the 4-bit layers that loading would give it, without their scales."""
    quantizer: Any = AutoHfQuantizer.from_config(config, pre_quantized=False)
    model.config.quantization_config = config
    quantizer.preprocess_model(model, device_map=HOST_RAM)
    for layer in _four_bit_layers(model):
        weight, dtype = layer.weight, layer.quant_storage
        count = -(-weight.numel() // 2) // dtype.itemsize  # two weights in a byte
        packed = torch.empty((count, 1), dtype=dtype, device="meta")
        layer.weight = type(weight)(packed, **{**vars(weight), "bnb_quantized": True})
    model.hf_quantizer = quantizer
    quantizer.postprocess_model(model)


def share_scales(group: ProcessGroup, model: Any) -> None:
    """Give the 4-bit layers of all ranks the scales of rank 0. A collective call."""
    quant_state: Any = importlib.import_module("bitsandbytes.functional").QuantState
    for layer in _four_bit_layers(model):
        state = group.share(layer.quant_state.as_dict(packed=True) if group.rank == 0 else None)
        if group.rank:
            layer.quant_state = layer.weight.quant_state = quant_state.from_dict(state, device=torch.device("cpu"))


def _four_bit_layers(model: Any) -> list[Any]:
    return [module for module in model.modules() if type(getattr(module, "weight", None)).__name__ == "Params4bit"]


def is_quantized(module: Any) -> bool:
    """Whether a module's own weights are quantized."""
    own = type(getattr(module, "weight", None)).__name__ in ("Params4bit", "Int8Params")
    return own or hasattr(module, "qweight") or hasattr(module, "W_q")  # bitsandbytes; GPTQ and AWQ; HQQ
