"""Unsloth: a model loaded, adapted and computed its way.

Beside the floors. Imports spec, journal. Importing it changes transformers, TRL and PEFT, so it comes before them
(`begin`). What it cannot do it turns into something like it and goes on; here that ends the run.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

import torch

from backend.config import RunSpec
from backend.train.run_log import TrainError

# Arguments of the Trainer that it is known to change, and the options that they come from.
KEPT = {
    "optim": "train.optim",
    "packing": "data.packing",
    "bf16": "precision.compute",
    "fp16": "precision.compute",
    "tf32": "precision.compute",
    "activation_checkpointing": "train.activation_checkpointing",
}


def begin(spec: RunSpec) -> None:
    """Import it, if it is asked for. Raises TrainError where it is missing or does not work here."""
    if not spec.train.use_unsloth:
        return
    os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")  # or it tells the hub of every start
    try:
        importlib.import_module("unsloth")
    except ModuleNotFoundError as error:
        if error.name != "unsloth":
            raise TrainError(f"train.use_unsloth needs the package {error.name} too: pip install it.") from error
        raise TrainError("train.use_unsloth needs the package unsloth: pip install it.") from error
    except Exception as error:  # of any kind: it looks at devices, drivers and versions
        raise TrainError(f"train.use_unsloth: it does not work here: {_first(error)}") from error


def read(spec: RunSpec, name: str, dtype: torch.dtype, how: Mapping[str, Any]) -> Any:
    """The model from its file; as `from_pretrained`."""
    method, packing = spec.method, how.get("quantization_config")
    made, _ = _fast().from_pretrained(
        name,
        max_seq_length=spec.data.max_length,
        dtype=dtype,
        load_in_4bit=packing is not None and packing.load_in_4bit,
        load_in_8bit=packing is not None and packing.load_in_8bit,
        full_finetuning=method.kind != "lora",
        use_gradient_checkpointing=_checkpointing(spec),
        random_state=spec.train.seed,
        use_exact_model_name=True,  # or it takes a copy of its own making from the hub
        **how,
    )
    _check_packing(packing, made)
    return made


def attach(spec: RunSpec, model: Any, config: Any) -> Any:
    """`model` with the adapter of peft's `config`."""
    return _fast().get_peft_model(
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


def check(spec: RunSpec, asked: Mapping[str, Any], config: Any) -> None:
    """Raise TrainError if the Trainer's `config` is not what was `asked` for."""
    if not spec.train.use_unsloth:
        return
    for name, option in KEPT.items():
        want, found = asked.get(name), getattr(config, name, None)
        if _word(want) != _word(found).removesuffix("_fused"):  # the same step, quicker
            raise TrainError(f"{option}: Unsloth took {_word(found)} instead of {_word(want)} here.")


def check_kernels(spec: RunSpec, model: Any) -> None:
    """Raise TrainError if nothing of the model is computed by it: it would only say so."""
    forwards = [module.forward for module in model.modules()]
    if spec.train.use_unsloth and not any(str(getattr(f, "__module__", "")).startswith("unsloth") for f in forwards):
        raise TrainError(f"train.use_unsloth: Unsloth has no kernels for {model.config.model_type}: switch it off.")


def _fast() -> Any:
    return importlib.import_module("unsloth").FastLanguageModel


def _checkpointing(spec: RunSpec) -> str | bool:
    return "unsloth" if spec.train.activation_checkpointing else False


def _check_packing(asked: Any, made: Any) -> None:
    packed: Any = getattr(made.config, "quantization_config", None)
    found = packed.to_dict() if hasattr(packed, "to_dict") else dict(packed or {})
    wanted = asked.to_dict() if asked is not None else {}
    for key in ("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant"):
        if wanted.get(key) and wanted[key] != found.get(key):
            raise TrainError(f"method.quantization: Unsloth took {key} {found.get(key)} instead of {wanted[key]}.")


def _word(value: Any) -> str:
    value = getattr(value, "value", value)
    return "off" if value in (None, False) else "on" if value is True else str(value)


def _first(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
