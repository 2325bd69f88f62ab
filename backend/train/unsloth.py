"""Unsloth: loads and adapts the model, and replaces its kernels.

Importing Unsloth changes transformers, TRL and PEFT, so it is imported before them (`import_unsloth`). It replaces
options that it does not support and continues; here that ends the run.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

import torch

from backend.config import RunSpec
from backend.train.run_log import TrainError

# TrainingArguments that Unsloth is known to change, and the option of each.
OPTION_OF = {
    "optim": "train.optim",
    "packing": "data.packing",
    "bf16": "precision.compute",
    "fp16": "precision.compute",
    "tf32": "precision.compute",
    "activation_checkpointing": "train.activation_checkpointing",
}


def import_unsloth(spec: RunSpec) -> None:
    """Import Unsloth, if it is on. Raises TrainError if it does not work here."""
    if not spec.train.use_unsloth:
        return
    os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")  # otherwise Unsloth reports every start to the Hub
    try:
        importlib.import_module("unsloth")
    except ModuleNotFoundError as error:
        raise TrainError(
            f"train.use_unsloth: the Python module {error.name} is not installed: pip install {error.name}."
        ) from error
    except Exception as error:  # of any kind: it inspects devices, drivers and versions
        raise TrainError(f"train.use_unsloth: importing unsloth failed: {_first_line(error)}") from error


def load_model(spec: RunSpec, name: str, dtype: torch.dtype, arguments: Mapping[str, Any]) -> Any:
    """The model; `arguments` are those of `from_pretrained`. Raises TrainError."""
    method, quantization = spec.method, arguments.get("quantization_config")
    model, _ = _fast().from_pretrained(
        name,
        max_seq_length=spec.data.max_length,
        dtype=dtype,
        load_in_4bit=quantization is not None and quantization.load_in_4bit,
        load_in_8bit=quantization is not None and quantization.load_in_8bit,
        full_finetuning=method.kind != "lora",
        use_gradient_checkpointing=_checkpointing(spec),
        random_state=spec.train.seed,
        use_exact_model_name=True,  # otherwise Unsloth downloads its own copy of the model from the Hub
        **arguments,
    )
    _check_quantization(quantization, model)
    return model


def add_adapter(spec: RunSpec, model: Any, config: Any) -> Any:
    """`model` with the adapter that peft's `config` describes."""
    adapted = _fast().get_peft_model(
        model,
        r=config.r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=config.target_modules if isinstance(config.target_modules, str) else [*config.target_modules],
        modules_to_save=config.modules_to_save,
        use_dora=config.use_dora,
        use_rslora=config.use_rslora,
        init_lora_weights=config.init_lora_weights,
        use_gradient_checkpointing=_checkpointing(spec),
        random_state=spec.train.seed,
        max_seq_length=spec.data.max_length,
    )
    adapted.peft_config["default"].revision = config.revision
    return adapted


def check_arguments(spec: RunSpec, requested: Mapping[str, Any], config: Any) -> None:
    """Raise TrainError if the TrainingArguments `config` differ from the requested ones."""
    if not spec.train.use_unsloth:
        return
    for name, option in OPTION_OF.items():
        want, used = requested.get(name), getattr(config, name, None)
        if _word(want) != _word(used).removesuffix("_fused"):  # _fused: a faster version of the same optimizer
            raise TrainError(
                f"{option}: Unsloth uses {_word(used)} instead of {_word(want)}. Set the option to "
                f"{_word(used)}, or train.use_unsloth to false."
            )


def check_kernels(spec: RunSpec, model: Any) -> None:
    """Raise TrainError if no layer of the model uses Unsloth's kernels; Unsloth itself only logs that."""
    forwards = [module.forward for module in model.modules()]
    if spec.train.use_unsloth and not any(str(getattr(f, "__module__", "")).startswith("unsloth") for f in forwards):
        raise TrainError(f"train.use_unsloth: Unsloth has no kernels for {model.config.model_type}. Set it to false.")


def _fast() -> Any:
    return importlib.import_module("unsloth").FastLanguageModel


def _checkpointing(spec: RunSpec) -> str | bool:
    return "unsloth" if spec.train.activation_checkpointing else False


def _check_quantization(requested: Any, model: Any) -> None:
    config: Any = getattr(model.config, "quantization_config", None)
    used = config.to_dict() if hasattr(config, "to_dict") else dict(config or {})
    wanted = requested.to_dict() if requested is not None else {}
    for key in ("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant"):
        if wanted.get(key) and wanted[key] != used.get(key):
            raise TrainError(
                f"method.quantization: Unsloth uses {key}={used.get(key)} instead of {wanted[key]}. Set "
                "train.use_unsloth to false."
            )


def _word(value: Any) -> str:
    value = getattr(value, "value", value)
    return "off" if value in (None, False) else "on" if value is True else str(value)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
