"""Loading the trained model as it was in training, in fp32 on the CPU: base model and adapter, or full weights."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import psutil
import torch
from peft import PeftModel

from backend import registry
from backend.config import RunSpec
from backend.inspect.weights import WeightsError, weight_shapes
from backend.models import trained
from backend.runs import json_values
from backend.runs.folder import Run
from backend.train import adapter_names, added_tokens, base_weights, lora, model
from backend.train.run_log import RunLog, Stopped, TrainError


def start_phase(run_log: RunLog, name: str, text: str, fraction: float) -> None:
    """Report the next phase. Raises Stopped if a stop is requested."""
    check_stop(run_log)
    run_log.start_phase(name, text, fraction=fraction)


def check_stop(run_log: RunLog) -> None:
    """Raise Stopped if a stop is requested."""
    if run_log.stop_requested():
        raise Stopped


def locate(spec: RunSpec, run_log: RunLog) -> model.ModelSource:
    """Where the base model is. Raises TrainError."""
    return model.locate(spec, lambda text, fraction: run_log.progress("loading base", text, fraction))


def load_base(run: Run, spec: RunSpec, source: model.ModelSource, tokenizer: Any) -> Any:
    """The base model in fp32, with the values that it had in training. Raises TrainError."""
    check_memory(base_weights.folder_of(source))
    quantized = registry.QUANTIZATIONS[spec.method.quantization].bits
    precision = str(run.resolved().get("compute_dtype") or "fp32") if quantized else "fp32"
    base: Any = model.load(spec, source, precision, tokenizer, frozen=True)
    if getattr(base, "is_quantized", False):
        try:
            base = base.dequantize()
        except Exception as error:
            kind = getattr(base.config, "quantization_config", None)
            raise TrainError(
                f"The base model is quantized as {getattr(kind, 'quant_method', 'another format')}, which cannot "
                "be dequantized, so the adapter can be neither merged nor exported as GGUF. Use base model and adapter "
                "together."
            ) from error
    return base.to(torch.float32)


def require_repeatable(run: Run, folder: Path) -> None:
    """Raise TrainError if the part that the adapter in `folder` took out of the base weights cannot be recomputed
    here."""
    lora.check_repeatable(json_values.read(folder / trained.ADAPTER), trained.trained_on(run), "cpu")


def load_adapter(base: Any, folder: Path) -> Any:
    """The base model with the adapter in `folder`. Raises TrainError."""
    added_tokens.fit_to_adapter(base, folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(lora.SEED)  # so that peft repeats the random search of pissa_fast
        adapted: Any = PeftModel.from_pretrained(base, str(folder), autocast_adapter_dtype=False)
    adapter_names.require_loaded(adapted, folder)
    return adapted


def elements(folder: Path | None) -> int:
    """The number of elements of all weights in a model folder; 0 if they are not in safetensors files."""
    try:
        shapes = weight_shapes(Path(folder or os.devnull)) or {}
    except (OSError, WeightsError):
        return 0
    return sum(torch.Size(shape).numel() for shape in shapes.values())


def require_room(folder: Path, what: str, need: float, other: str = "") -> None:
    """Raise TrainError if there is no room for `need` bytes in `folder`. `what`: the beginning of the error, with the
    verb; `other`: further advice."""
    free = shutil.disk_usage(folder).free
    if free < need:
        raise TrainError(
            f"The {what} {need / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free on the disk of "
            f"{folder.resolve()}. Free some disk space{other}."
        )


def check_memory(folder: Path | None) -> None:
    """Raise TrainError if the fp32 weights of the model in `folder` do not fit into memory."""
    need, there = 4 * elements(folder), psutil.virtual_memory().total
    if need > there:
        raise TrainError(
            f"The weights in fp32 need {need / 2**30:.1f} GiB of CPU memory; this machine has {there / 2**30:.1f} GiB. "
            "Use a machine with more memory."
        )
