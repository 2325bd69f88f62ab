"""What vLLM can serve of a run's models, and on which GPUs. It loads full weights, and LoRA adapters on their base
model, as vllm 0.33 lora/peft_helper.py and config/model.py say."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from backend.config import RunSpec
from backend.config.options import edit
from backend.environments.vllm import LORA_RANKS, WITHOUT_LORA, lora_rank
from backend.environments.vllm_machine import unmet_by_gpus, usable_gpus
from backend.inspect.model_folder import local_folder
from backend.inspect.weights import WeightsError, tensor_shapes
from backend.machine import Machine
from backend.models import merge, trained
from backend.models.fingerprint import describe_change, fingerprint
from backend.models.gguf_adapter import LORA, WEIGHTS
from backend.models.spec import environment_of, read_spec
from backend.models.trained import ADAPTER, CONFIG, GENERATION, TrainedModel
from backend.runs import BASE, json_values
from backend.runs.folder import Run, RunError
from backend.wording import counted

ENVIRONMENT = "vllm"  # `footplate env create vllm`
NOT_RUN = (
    "Serving with vLLM is untested on a GPU: arguments and limits follow the source code of vLLM 0.33, and requests "
    "were tested with a program that stands in for vLLM."
)
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}  # names of the compute dtype of training
# quantization_config.quant_method of a model's config.json that the environment vllm cannot load: vLLM has no HQQ, and
# bitsandbytes is not among its packages.
UNLOADABLE = {"bitsandbytes": "bitsandbytes", "hqq": "HQQ"}


def find_model(run: Run, step: int | None, merged: bool) -> TrainedModel:
    """The model in the checkpoint of a `step`, or the final one (None); with `merged`, its adapter merged into the base
    model. Raises RunError."""
    if not merged:
        return merge.find_model(run, step)
    found = trained.find(merge.find_merged(run, step))
    if found is None:
        raise RunError(f"The merged model of {run.id} cannot be read. Merge it again.")
    return found


def why_not(run: Run, model: TrainedModel) -> str:
    """Why vLLM cannot serve a model of the run, and how to fix it, in a sentence or two; '' if it can. Raises
    RunError."""
    spec = read_spec(run)
    if model.is_reward_model:
        return "vLLM cannot serve this model: it is a reward model, which scores texts and generates no text."
    config = json_values.read_object(model.folder / (ADAPTER if model.base else CONFIG))
    if not model.base:
        return _quantized(config, "the weights are", "Serve a model with weights that are not quantized.")
    if reason := _unsupported(config) or _other_weights(model.folder) or _trained_on(run, spec):
        step = "" if model.step is None else f" --step {model.step}"
        return (
            f"vLLM cannot serve this adapter: {reason}. Merge it with `footplate merge {run.id}{step}` or Merge into "
            f"base model on the run's page, then serve the merged model: `footplate serve {run.id}{step} --engine vllm "
            "--merged`."
        )
    return ""


def request(run: Run, model: TrainedModel, dtype: str, tensor_parallel_size: int) -> dict[str, Any]:
    """What the process of the server needs to know about a model that vLLM can serve. Raises RunError."""
    spec = read_spec(run)
    base, revision, folder = _base(run, spec, model) if model.base else (model.folder, "", model.folder)
    dtype = dtype if dtype != "auto" else DTYPES.get(str(run.resolved().get("compute_dtype")), "auto")
    if model.base and dtype == "float32":
        raise RunError(
            "vLLM computes LoRA adapters in 16 bits only, and the compute dtype is float32 (from --dtype, or else from "
            "training). Set --dtype bfloat16, or merge the adapter and serve the merged model with --merged."
        )
    if folder:
        _check_heads(json_values.read_object(folder / CONFIG), tensor_parallel_size)
    return {
        "folder": os.path.relpath(model.folder, run.path),
        "base": str(base) if model.base else "",
        "revision": revision,
        "rank": _largest_rank(json_values.read_object(model.folder / ADAPTER)) if model.base else 0,
        "dtype": dtype,
        "tensor_parallel_size": tensor_parallel_size,
        "trust_remote_code": spec.model.trust_remote_code,
        "has_generation_config": (model.folder / GENERATION).is_file(),
        "format": "LoRA adapter" if model.base else "full weights",
    }


def place(run: Run, machine: Machine, count: int) -> tuple[dict[str, str], dict[str, str]]:
    """The environment variables, and the devices that the server waits for: GPUs of this machine, the run's GPUs first.
    Raises RunError."""
    if reason := unmet_by_gpus(machine):
        raise RunError(reason)
    first, usable = run.resolved().get("device_ids") or (), usable_gpus(machine)
    gpus = sorted(usable, key=lambda gpu: gpu.id not in first)[:count]
    if len(gpus) < count:
        raise RunError(
            f"tensor_parallel_size is {count}, and this machine has {counted(len(gpus), 'GPU')} that vLLM supports. "
            f"Set it to {len(gpus)}{' or less' if len(gpus) > 1 else ''}."
        )
    env = {"CUDA_VISIBLE_DEVICES": ",".join(gpu.visible_as for gpu in gpus), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return {**environment_of(run), **env}, {gpu.uuid or f"cuda-{gpu.id}": f"GPU {gpu.id}" for gpu in gpus}


def _unsupported(adapter: Mapping[str, Any]) -> str:
    """What vLLM does not support in an adapter with this configuration; '' for nothing."""
    if (kind := adapter.get("peft_type") or "LORA") != "LORA":
        return f"its type is {kind}, and vLLM supports LoRA"
    if trained.is_residual(adapter):
        return f"its initialization ({adapter['init_lora_weights']}) has modified the base weights that it belongs to"
    if parts := trained.other_parts(adapter):
        return f"vLLM does not support {' and '.join(parts)}"
    if lora_rank(rank := _largest_rank(adapter)) is None:
        return f"its rank is {rank}, and vLLM supports ranks up to {LORA_RANKS[-1]}"
    if not _has_one_scale(adapter):
        return (
            "its modules have different scales (rank_pattern, alpha_pattern), and vLLM gives all of them the same one"
        )
    return ""


def _has_one_scale(adapter: Mapping[str, Any]) -> bool:
    """Whether all modules have the scale of `r` and `lora_alpha`, the only one that vllm 0.33 lora/peft_helper.py
    reads. Those of stacked experts have twice the rank and twice the alpha."""
    ranks, alphas = adapter.get("rank_pattern") or {}, adapter.get("alpha_pattern") or {}
    rank, alpha = adapter.get("r") or 1, adapter.get("lora_alpha") or 1
    power = 0.5 if adapter.get("use_rslora") else 1.0
    scales = [alphas.get(key, alpha) / ranks.get(key, rank) ** power for key in {*ranks, *alphas}]
    return all(math.isclose(scale, alpha / rank**power) for scale in scales)


def _other_weights(folder: Path) -> str:
    """What vLLM does not support in the file of an adapter: peft saves the base model's embeddings, too, if the adapter
    changes these."""
    try:
        others = [name for name in tensor_shapes(folder / WEIGHTS) if not LORA.search(name)]
    except WeightsError:  # another format, or damaged
        return ""
    return f"its file has weights that are not LoRA matrices, such as {others[0]}" if others else ""


def _largest_rank(adapter: Mapping[str, Any]) -> int:
    """The largest rank of all modules: an adapter on stacked experts has twice the rank for gate and up projections."""
    return max([int(adapter.get("r") or 0), *map(int, (adapter.get("rank_pattern") or {}).values())])


def _trained_on(run: Run, spec: RunSpec) -> str:
    """What vLLM cannot load of the base model as it was in training; '' for nothing."""
    if spec.method.kind == "lora" and spec.method.quantization != "none":
        return (
            f"it was trained on a base model that bitsandbytes had quantized ({spec.method.quantization}), and the "
            f"environment {ENVIRONMENT} does not have bitsandbytes"
        )
    folder = _base_folder(spec, json_values.read_object(run.path / BASE))
    config = json_values.read_object(folder / CONFIG) if folder else {}
    if architecture := next((each for each in config.get("architectures") or () if each in WITHOUT_LORA), None):
        return f"vLLM does not support LoRA for {architecture}"
    return _quantized(config, "the weights of its base model are", "")


def _quantized(config: Mapping[str, Any], subject: str, fix: str) -> str:
    quantization = config.get("quantization_config")
    method = str(quantization.get("quant_method")) if isinstance(quantization, dict) else ""
    if method not in UNLOADABLE:
        return ""
    reason = f"{subject} quantized with {UNLOADABLE[method]}, which the environment {ENVIRONMENT} cannot load"
    return f"vLLM cannot serve this model: {reason}. {fix}" if fix else reason


def _base(run: Run, spec: RunSpec, model: TrainedModel) -> tuple[str | Path, str, Path | None]:
    """The base model of an adapter: a folder, or a name on the Hub with its commit; and its folder, if it is on this
    machine. Raises RunError if its weights are not those of training."""
    recorded = json_values.read_object(run.path / BASE)
    name, commit = str(recorded.get("name") or model.base), str(recorded.get("commit") or "")
    if os.path.isabs(name) and not Path(name).is_dir():
        raise RunError(f"The base model of this adapter, {name}, does not exist. Restore it, then try again.")
    folder = _base_folder(spec, recorded)
    then = recorded.get("fingerprint")
    if folder and then and (now := _fingerprint(folder, folder.stat().st_mtime_ns)) and now != then:
        raise RunError(describe_change(name, now, then))
    return (folder or name), ("" if folder else commit), folder


def _base_folder(spec: RunSpec, recorded: Mapping[str, Any]) -> Path | None:
    """The folder of the base model that the run recorded, for a Hub model with its commit; None if it is not on this
    machine."""
    if (name := str(recorded.get("name") or "")) and Path(name).is_dir():
        return Path(name)
    if commit := str(recorded.get("commit") or ""):
        spec = edit(spec, {"model.revision": commit})
    return local_folder(spec, Path.cwd(), {**os.environ, **spec.launch.env})


def _check_heads(config: Mapping[str, Any], size: int) -> None:
    """Raise RunError if the attention heads cannot be split."""
    text = config.get("text_config")
    heads = (text if isinstance(text, dict) else config).get("num_attention_heads")
    if isinstance(heads, int) and heads % size:
        raise RunError(
            f"{heads} attention heads cannot be split over {size} GPUs. Set tensor_parallel_size to a divisor of "
            f"{heads}."
        )


@lru_cache(maxsize=16)
def _fingerprint(folder: Path, _changed: int) -> str:
    return fingerprint(folder)
