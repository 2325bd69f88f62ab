"""The memory that the models of a chat take, known before they are loaded: from the headers of the weight files, the
dtype in which a chat computes, and the quantization of training."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend import registry
from backend.config import RunSpec
from backend.inspect.json_files import read_json_object
from backend.inspect.model_folder import local_folder
from backend.inspect.weights import WeightsError, weight_shapes
from backend.machine import Machine
from backend.memory import quantized
from backend.memory.context import DTYPE_BYTES, Row
from backend.memory.estimate import CONTEXT_BYTES
from backend.memory.host import LIBRARY_BYTES
from backend.models import chat
from backend.models.spec import read_spec_outside_training
from backend.models.trained import TrainedModel
from backend.modelspec import ModelShape, UnknownArchitecture, from_config
from backend.runs.folder import Run
from backend.wording import data_size

CPU = "the CPU"
ON_GPU = Row("the GPU's context and kernels", CONTEXT_BYTES, "approximate")
NO_COPY = Row("the base model", 0, "no copy is needed")
SHOWN_TOKENS = 1000  # length of the conversation whose KV cache is shown
STORED_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}  # of an element in files that are not safetensors


@dataclass(frozen=True)
class ChatMemory:
    """`rows`: what a chat loads; `missing`: what it loads whose size is not known; `compared`: the copy of the base
    model that it also loads to compare with, 0 bytes if it needs none; `token_bytes`: KV cache of a token, 0 if it is
    unknown; `free_bytes`: free memory of the `device`, 'GPU 0' or 'the CPU', with `waits` once other programs on it
    have ended."""

    rows: tuple[Row, ...]
    missing: str
    compared: Row
    token_bytes: int
    device: str
    free_bytes: int
    waits: bool = False

    @property
    def bytes(self) -> int:
        """Bytes before the first prompt, as far as they are known."""
        return sum(row.bytes for row in self.rows)

    @property
    def text(self) -> str:
        """What loading takes, and how much is free, as sentences."""
        parts = ", ".join(f"{data_size(row.bytes)} for {row.name} ({row.formula})" for row in self.rows)
        least = "at least" if self.missing else "about"
        found = [f"Loading takes {least} {data_size(self.bytes)} of {self._memory}: {parts}."]
        if self.missing:
            found.append(f"The size of {self.missing} is not known.")
        if self.compared.bytes:
            more = f"{data_size(self.compared.bytes)} ({self.compared.formula})"
            found.append(f"Comparing with the base model also takes {more}.")
        if self.token_bytes:
            cache = data_size(SHOWN_TOKENS * self.token_bytes)
            found.append(f"A conversation takes up to {cache} more for {SHOWN_TOKENS:,} tokens.")
        return " ".join([*found, f"{self._free}."])

    @property
    def warning(self) -> str:
        """That the chat does not fit, as sentences; '' if it does."""
        whole = self.bytes + self.compared.bytes
        if whole <= self.free_bytes:
            return ""
        need, free = f"{data_size(self.bytes)} of {self._memory}", self._free
        if self.bytes <= self.free_bytes:
            return f"A comparison with the base model does not fit: both models take {data_size(whole)}, and {free}."
        end = "the system may kill the process" if self.device == CPU else "loading may end with an out-of-memory error"
        more = ", or export the model as GGUF in a smaller format and serve that" if self.token_bytes else ""
        fix = f"End other programs that use this memory{more}"
        return f"The model does not fit: it takes {need}, and {free}, so {end}. {fix}."

    @property
    def _free(self) -> str:
        once = " once the other programs on the device have ended (the chat waits for them)" if self.waits else ""
        return f"{data_size(self.free_bytes)} is free{once}"

    @property
    def _memory(self) -> str:
        return "CPU memory" if self.device == CPU else f"the memory of {self.device}"

    def as_json(self) -> dict[str, Any]:
        """For the page."""
        return {"text": self.text, "warning": self.warning}


def of_chat(run: Run, machine: Machine) -> ChatMemory:
    """What a chat with the newest model of `run` loads on this `machine`. Raises RunError without such a model."""
    spec, resolved, model = read_spec_outside_training(run), run.resolved(), chat.loadable(run)[0]
    compute = str(resolved.get("compute_dtype"))
    dtype = compute if compute in DTYPE_BYTES else "fp32"
    device, free, waits = _place(run, resolved, machine)
    base = local_folder(spec, run.path, {**os.environ, **spec.launch.env})
    if model.base:
        weights = _base_row(spec, base, "fp32" if model.is_residual else dtype)
        others = [Row("the adapter", _adapter_bytes(model), "its file")]
        has_copy = model.is_residual
    else:
        weights, others = _weights_row("the trained model", model.folder, dtype), []
        has_copy = not model.is_reward_model
    copy = _base_row(spec, base, dtype) if has_copy else NO_COPY
    unknown = {"the base model" if model.base else "the trained model": weights, "the base model to compare with": copy}
    missing = " and ".join(name for name, row in unknown.items() if row is None)
    others.append(Row("Python and libraries", LIBRARY_BYTES, "approximate") if device == CPU else ON_GPU)
    shape = None if model.is_reward_model else _shape(base if model.base else model.folder)
    cache = 2 * shape.layers * shape.kv_heads * shape.head_dim * DTYPE_BYTES[dtype] if shape else 0
    rows = tuple(row for row in (weights, *others) if row)
    return ChatMemory(rows, missing, copy or NO_COPY, cache, device, free, waits)


def _place(run: Run, resolved: dict[str, Any], machine: Machine) -> tuple[str, int, bool]:
    """The device of a chat as `jobs.place` chooses it, the first one of the run, if this machine still has it; its free
    memory, and whether that is free once other programs have ended."""
    ids = [*(resolved.get("device_ids") or ()), *(gpu.id for gpu in machine.gpus)][:1]
    if machine.device != "cpu" and machine.device == resolved.get("device") and not run.job():
        for gpu in machine.gpus:
            if gpu.id in ids:
                return f"GPU {gpu.id}", gpu.usable_bytes, bool(gpu.processes)
    return CPU, machine.ram_free_bytes, False


def _base_row(spec: RunSpec, folder: Path | None, dtype: str) -> Row | None:
    """The weights of the model that training started with; None if their size is not known."""
    whole = _weights_row("the base model", folder, dtype)
    if not whole or not folder:
        return None
    if _config(folder).get("quantization_config"):
        return Row(whole.name, _file_bytes(folder), "quantized, its files")
    name = spec.method.quantization if spec.method.kind == "lora" else "none"
    if not registry.QUANTIZATIONS[name].bits:
        return whole
    shape = _shape(folder)
    if not shape:
        return None
    matrices = quantized.quantized_matrices(spec, shape)
    count = quantized.weight_count(matrices)
    size = count * quantized.bits(spec, shape) // 8 + quantized.scale_bytes(spec, shape, matrices)
    rest = max(0, whole.bytes - count * DTYPE_BYTES[dtype])
    return Row(whole.name, size + rest, f"{name}, the rest in {dtype}")


def _weights_row(name: str, folder: Path | None, dtype: str) -> Row | None:
    """The weights in a folder, loaded in `dtype`; None if their size is not known."""
    if folder is None:
        return None
    with suppress(OSError, WeightsError):
        shapes = weight_shapes(folder)
        if shapes is not None:
            count = sum(math.prod(shape) for shape in shapes.values())
        else:
            config = _config(folder)
            stored = STORED_BYTES.get(str(config.get("dtype") or config.get("torch_dtype")), 4)
            count = _file_bytes(folder) // stored
        return Row(name, count * DTYPE_BYTES[dtype], f"{count:,} parameters in {dtype}") if count else None
    return None


def _file_bytes(folder: Path) -> int:
    """The bytes of the weight files: safetensors if there are any."""
    for pattern in ("*.safetensors", "pytorch_model*.bin"):
        if size := sum(path.stat().st_size for path in folder.glob(pattern)):
            return size
    return 0


def _adapter_bytes(model: TrainedModel) -> int:
    return sum(path.stat().st_size for path in model.files() if path.name.startswith("adapter_model."))


def _config(folder: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        return read_json_object(folder / "config.json")
    return {}


def _shape(folder: Path | None) -> ModelShape | None:
    with suppress(UnknownArchitecture):
        return from_config(_config(folder)) if folder else None
    return None
