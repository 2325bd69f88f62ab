"""Base weights that are packed: how bitsandbytes packs them while loading, and what must be left as it is.

Beside the floors. Imports spec, catalog, journal.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import PartialState
from peft.tuners.lora import dora, variants
from peft.utils import integrations
from transformers import (
    AwqConfig,
    BitsAndBytesConfig,
    CompressedTensorsConfig,
    FineGrainedFP8Config,
    GPTQConfig,
    Mxfp4Config,
    PreTrainedConfig,
)

from backend import registry
from backend.config import RunSpec
from backend.train.run_log import TrainError

UNPACK: Mapping[str, Any] = {
    "mxfp4": Mxfp4Config, "fp8": FineGrainedFP8Config, "compressed-tensors": CompressedTensorsConfig,
}  # fmt: skip
TRAINABLE: Mapping[str, Any] = {"gptq": GPTQConfig, "awq": AwqConfig}


def check(spec: RunSpec) -> None:
    """Raise TrainError for what packed weights cannot do, before any are loaded."""
    row = registry.QUANTIZATIONS[spec.method.quantization]
    strategy = registry.STRATEGIES[spec.parallel.strategy]
    if not row.bits:
        return
    if importlib.util.find_spec(row.package) is None:
        raise TrainError(f"method.quantization: {row.label} needs the package {row.package}: pip install it.")
    if spec.lora.init not in ("default", "gaussian"):
        raise TrainError(f"lora.init: {spec.lora.init} needs weights that are not packed: set it to zero.")
    if spec.save.merge_adapter:
        raise TrainError("save.merge_adapter: an adapter cannot be merged into packed weights: switch it off.")
    if strategy.shards_weights and row.bits == 8:
        raise TrainError("method.quantization: 8-bit weights cannot be spread over devices: take nf4.")
    if strategy.fsdp_version == 1:
        raise TrainError("parallel.strategy: FSDP1 cannot spread packed weights: take fsdp2.")


def loading(spec: RunSpec, source: str, options: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """What `from_pretrained` is told. Raises TrainError where a model came packed in a way that cannot be trained."""
    came = came_as(source, options)
    found: dict[str, Any] = {}
    if came:
        found = _as_it_came(spec, came)
    elif registry.QUANTIZATIONS[spec.method.quantization].bits:
        found = {"quantization_config": configuration(spec, dtype)}
    if not found:
        return {}
    if (
        registry.STRATEGIES[spec.parallel.strategy].zero_stage != 3
    ):  # which finds the place by itself, and refuses to be told
        found["device_map"] = {"": PartialState().device}
    return found


def came_as(source: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The quantization_config of a model that came packed."""
    known = {name: value for name, value in options.items() if name in ("revision", "local_files_only")}
    config, _ = PreTrainedConfig.get_config_dict(source, **known)
    return dict(config.get("quantization_config") or {})


def _as_it_came(spec: RunSpec, came: Mapping[str, Any]) -> dict[str, Any]:
    kind = str(came.get("quant_method"))
    row = registry.PREQUANTIZED.get(kind)
    if row is None:
        raise TrainError(f"model.{spec.model.source}: transformers trains nothing on weights packed as {kind}.")
    for name in row.packages:
        if not _installed(name):
            raise TrainError(f"model.{spec.model.source}: {row.label} needs the package {name}: pip install it.")
    if spec.method.kind == "lora" and spec.method.quantization != "none":
        raise TrainError(f"method.quantization: the model comes packed as {row.label} already: set it to none.")
    if row.dequantized_on_load:
        return {"quantization_config": UNPACK[kind](dequantize=True)}
    _check_adapter(spec, kind, row)
    if kind in TRAINABLE:  # kernels with a backward pass
        return {"quantization_config": TRAINABLE[kind](bits=int(came.get("bits") or 4), backend="auto_trainable")}
    return {}


def _check_adapter(spec: RunSpec, kind: str, row: registry.PrequantizedFormat) -> None:
    if spec.method.kind != "lora":
        raise TrainError(f"method.kind: weights packed as {row.label} carry adapters only: take lora.")
    if spec.save.merge_adapter:
        raise TrainError("save.merge_adapter: an adapter cannot be merged into packed weights: switch it off.")
    if spec.lora.init not in ("default", "gaussian"):
        raise TrainError(f"lora.init: the model comes packed as {row.label}: set it to zero.")
    if spec.lora.use_dora and kind in TRAINABLE:
        raise TrainError(f"lora.use_dora: adapters on {row.label} have no DoRA: switch it off.")
    if spec.precision.compute == "fp8" and kind == "bitsandbytes":
        raise TrainError("precision.compute: fp8 replaces the layers that hold packed weights: take bf16.")


def _installed(distribution: str) -> bool:
    try:
        return bool(importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return False


def configuration(spec: RunSpec, dtype: torch.dtype) -> BitsAndBytesConfig:
    """bitsandbytes' options: it computes in the precision of the run."""
    method = spec.method
    if method.quantization not in registry.FOUR_BIT:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=method.quantization,
        bnb_4bit_use_double_quant=method.bnb_4bit_use_double_quant,
        bnb_4bit_compute_dtype=dtype,
        # Only floating-point tensors are spread over devices; with the usual uint8 each would keep the whole base.
        bnb_4bit_quant_storage=dtype if registry.STRATEGIES[spec.parallel.strategy].shards_weights else torch.uint8,
    )


def keep_layout(model: Any) -> None:
    """On a CPU with AVX512-BF16 bitsandbytes rewrites its 4-bit weights at the first evaluation, with scales rounded to
    bf16, and fails where a layer is no multiple of a block wide: the training afterwards would be another."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def keep_weights() -> None:
    """Let DoRA unpack base weights and leave them where they are, as `unpacked` does."""
    dora.dequantize_module_weight = variants.dequantize_module_weight = unpacked


def unpacked(module: Any) -> Any:
    """The weight of a layer as numbers. On a CPU peft 0.21 leaves a copy in the packed weight's place, which has lost
    its scales (8 bits) and what DeepSpeed has noted on it."""
    weight = module.weight
    found = integrations.dequantize_module_weight(module)
    if module.weight is not weight:
        module.weight = weight
    return found


def is_packed(module: Any) -> bool:
    """Whether a module's own weights are packed."""
    own = type(getattr(module, "weight", None)).__name__ in ("Params4bit", "Int8Params")
    return own or hasattr(module, "qweight") or hasattr(module, "W_q")  # bitsandbytes; GPTQ and AWQ; HQQ


@contextmanager
def exact(model: Any) -> Iterator[None]:
    """TRL rounds the adapters of a packed base to bf16, where small updates are lost; inside, they are kept."""
    packed = getattr(model, "is_quantized", False)
    held = [(p, p.data) for p in model.parameters() if p.requires_grad] if packed else []
    yield
    for parameter, data in held:
        parameter.data = data
