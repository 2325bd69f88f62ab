"""Importers: a DeepSpeed JSON, an accelerate YAML, or a training YAML of LLaMA-Factory, axolotl or TRL as a spec.

Imports registry, config, llamafactory, axolotl, trl, engines, resolve and launch.accelerate_config. Values that have an
option set it. Of a DeepSpeed or accelerate config, the file that Footplate would generate is then compared with the
imported one, and the keys that differ become extra config.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from backend import registry
from backend.config import RunSpec, axolotl, llamafactory, merge, trl
from backend.config.foreign import Import, Table
from backend.config.options import Problem, SpecError, edit
from backend.config.processes import world_size
from backend.config.yaml_text import load_yaml
from backend.engines import engine_of
from backend.engines.fsdp import STATE_DICTS
from backend.launch import accelerate_config
from backend.machine import Machine
from backend.resolve import resolve

MIB = 1024**2
Patch = dict[str, Any]
TOOLS: Mapping[str, tuple[Callable[[Table], bool], Callable[[Table, Path], Import]]] = {
    "llamafactory": (llamafactory.is_llamafactory, llamafactory.read),
    "axolotl": (axolotl.is_axolotl, axolotl.read),
    "trl": (trl.is_trl, trl.read),
}


def detect_format(text: str) -> str:
    """'deepspeed', 'accelerate' or one of TOOLS if the text is such a configuration file, otherwise ''."""
    try:
        found = load_yaml(text)  # JSON is YAML
    except yaml.YAMLError:
        return ""
    if not isinstance(found, dict):
        return ""
    if {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"} & found.keys():
        return "deepspeed"
    if {"compute_environment", "distributed_type"} & found.keys():
        return "accelerate"
    return next((name for name, (is_one, _) in TOOLS.items() if is_one(found)), "")


@dataclass(frozen=True)
class Imported:
    """A spec from another tool's file: dotted keys that were `kept` in the extra config, keys that have a `different`
    meaning here, and those that are `missing`, as sentences."""

    spec: RunSpec
    kept: Sequence[str] = ()
    different: Sequence[str] = ()
    missing: Sequence[str] = ()


def import_file(text: str, spec: RunSpec, base: Path) -> Imported:
    """A file of a known format. A DeepSpeed or accelerate config is merged into `spec`; a training YAML of one of
    TOOLS, whose relative paths are relative to `base`, replaces it. Raises SpecError."""
    if (tool := detect_format(text)) not in TOOLS:
        return Imported(*import_config(text, spec))
    found = TOOLS[tool][1](load_yaml(text), base)
    result = edit(RunSpec(), found.patch)
    found.name_without_effect(result)
    return Imported(result, different=found.different, missing=found.missing)


def import_config(text: str, spec: RunSpec) -> tuple[RunSpec, list[str]]:
    """(`spec` with the values of a DeepSpeed or accelerate config, the dotted keys that became extra config). Raises
    SpecError."""
    imported = _parse_numbers(load_yaml(text))
    if detect_format(text) == "deepspeed":
        return _import_deepspeed(imported, spec)
    result = edit(spec, _accelerate(imported))
    extra = merge.additions(imported, accelerate_config.configuration(result, resolve(result, Machine())))
    extra = _without(extra, ACCELERATE_OPTIONS)
    return edit(result, {"launch.extra_accelerate_config": _json(extra)}), merge.paths(extra)


def _import_deepspeed(imported: Mapping[str, Any], spec: RunSpec) -> tuple[RunSpec, list[str]]:
    result = edit(spec, _deepspeed(imported))
    result = edit(result, _batch_size(imported, result))
    extra = merge.additions(imported, engine_of(result.parallel.strategy).configuration(result))
    extra = {key: value for key, value in extra.items() if key not in _imported_blocks(imported)}
    if _is_number(global_size := imported.get("train_batch_size")) and global_size != _global_batch_size(result):
        extra["train_batch_size"] = global_size
    return edit(result, {"parallel.extra_config": _json(extra)}), merge.paths(extra)


def _without(table: Mapping[str, Any], removed: set[str], prefix: str = "") -> dict[str, Any]:
    """`table` without the leaves at these dotted paths."""
    found = {}
    for key, value in table.items():
        inner = _without(value, removed, f"{prefix}{key}.") if isinstance(value, Mapping) else value
        if f"{prefix}{key}" not in removed and (inner or not isinstance(value, Mapping)):
            found[key] = inner
    return found


def _json(extra: Mapping[str, Any]) -> str:
    return json.dumps(extra, indent=2) if extra else ""


def _parse_numbers(found: Mapping[str, Any]) -> dict[str, Any]:
    """The table with strings such as 5e8, which YAML does not read as numbers, as numbers, and 8.0 as 8."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(k): plain(v) for k, v in value.items()}
        if isinstance(value, str):
            try:
                return int(float(value)) if float(value).is_integer() else float(value)
            except ValueError:
                return value
        return int(value) if isinstance(value, float) and value.is_integer() else value

    return {str(k): plain(v) for k, v in found.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _table(parent: Mapping[str, Any], key: str, prefix: str = "") -> Mapping[str, Any]:
    """The table at `key`; empty if there is none. Raises SpecError; `prefix` completes the key in its message."""
    found = parent.get(key) or {}
    if not isinstance(found, Mapping):
        raise SpecError([Problem("", f"{prefix}{key} must contain keys and values, not {found!r}")])
    return found


def _number(name: str, value: Any, divide: float = 1) -> Patch:
    """A patch of one option if the value is a number; "auto" and null leave the option unchanged."""
    if not _is_number(value):
        return {}
    return {name: max(1, round(value / divide)) if divide != 1 else value}


# --- DeepSpeed ---


def _deepspeed(imported: Mapping[str, Any]) -> Patch:
    """The options that a DeepSpeed configuration sets."""
    zero = _table(imported, "zero_optimization")
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise SpecError([Problem("", f"zero_optimization.stage must be 0, 1, 2 or 3, not {stage!r}")])
    patch: Patch = {"parallel.strategy": f"zero{stage}"}
    patch |= _number("train.per_device_train_batch_size", imported.get("train_micro_batch_size_per_gpu"))
    patch |= _number("train.gradient_accumulation_steps", imported.get("gradient_accumulation_steps"))
    patch |= _number("train.max_grad_norm", imported.get("gradient_clipping"))
    patch |= _number("parallel.bucket_cap_mb", zero.get("reduce_bucket_size"), MIB / 2)
    for name in ("bf16", "fp16"):
        if _table(imported, name).get("enabled") is True:
            patch["precision.compute"] = name
    for key in ("offload_optimizer", "offload_param"):
        patch |= _offload(key, _table(zero, key, "zero_optimization."))
    aio = _table(imported, "aio")
    patch |= _number("parallel.aio_block_size_kb", aio.get("block_size"), 1024)
    patch |= _number("parallel.aio_queue_depth", aio.get("queue_depth"))
    patch |= _number("parallel.aio_intra_op_parallelism", aio.get("intra_op_parallelism"))
    return patch | _scheduler(_table(imported, "scheduler")) | _optimizer(_table(imported, "optimizer"))


def _global_batch_size(spec: RunSpec) -> int:
    """train_batch_size as DeepSpeed computes it, from the world size even with sequence parallelism."""
    return spec.train.per_device_train_batch_size * spec.train.gradient_accumulation_steps * world_size(spec)


def _batch_size(imported: Mapping[str, Any], spec: RunSpec) -> Patch:
    """Batch size or accumulation, whichever the file leaves open, so that train_batch_size is the file's."""
    global_size: Any = imported.get("train_batch_size")
    for name, key, other in (
        ("train.gradient_accumulation_steps", "gradient_accumulation_steps", spec.train.per_device_train_batch_size),
        ("train.per_device_train_batch_size", "train_micro_batch_size_per_gpu", spec.train.gradient_accumulation_steps),
    ):
        each = other * world_size(spec)
        if _is_number(global_size) and not _is_number(imported.get(key)) and global_size % each == 0:
            return {name: global_size // each}
    return {}


# DeepSpeed's optimizers and schedulers -> our options; source: transformers 5.23 docs/main_classes/deepspeed.
OPTIMIZERS = {"adam": "adamw_torch", "adamw": "adamw_torch"}  # DeepSpeed's Adam is AdamW unless adam_w_mode is false
SCHEDULERS = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
# Parameters without an option, with the values that change nothing.
NEUTRAL_VALUES = {
    "torch_adam": (True, False),
    "adam_w_mode": (True,),
    "bias_correction": (True,),
    "warmup_min_lr": (0, "auto"),
    "warmup_type": ("linear",),
}
OPTIMIZER_PARAMS = {"lr": "learning_rate", "eps": "adam_epsilon", "weight_decay": "weight_decay"}
SCHEDULER_PARAMS = {"warmup_max_lr": "learning_rate", "warmup_num_steps": "warmup_steps"}


def _optimizer(block: Mapping[str, Any]) -> Patch:
    params = _table(block, "params", "optimizer.")
    patch: Patch = {}
    if name := OPTIMIZERS.get(str(block.get("type")).lower()):
        patch["train.optim"] = name
    for key, option in OPTIMIZER_PARAMS.items():
        patch |= _number(f"train.{option}", params.get(key))
    betas = params.get("betas")
    if isinstance(betas, list) and len(betas) == 2 and all(map(_is_number, betas)):
        patch |= {"train.adam_beta1": betas[0], "train.adam_beta2": betas[1]}
    return patch


def _scheduler(block: Mapping[str, Any]) -> Patch:
    params = _table(block, "params", "scheduler.")
    patch: Patch = {}
    if name := SCHEDULERS.get(str(block.get("type"))):
        patch["train.lr_scheduler_type"] = name
    for key, option in SCHEDULER_PARAMS.items():
        patch |= _number(f"train.{option}", params.get(key))
    if _is_number(steps := params.get("total_num_steps")):  # optimizer steps of the whole run
        patch |= {"train.duration": "steps", "train.max_steps": steps}
    return patch


def _imported_blocks(imported: Mapping[str, Any]) -> list[str]:
    """Which of the blocks optimizer and scheduler are completely expressed by options."""
    found = []
    for name, types, params_with_option in (
        ("optimizer", {*OPTIMIZERS}, {*OPTIMIZER_PARAMS, "betas"}),
        ("scheduler", {key.lower() for key in SCHEDULERS}, {*SCHEDULER_PARAMS, "total_num_steps"}),
    ):
        block = imported.get(name) or {}
        params = block.get("params") or {}
        rest = {k: v for k, v in params.items() if k not in params_with_option and v not in NEUTRAL_VALUES.get(k, ())}
        if str(block.get("type")).lower() in types and not rest:
            found.append(name)
    return found


def _offload(option: str, table: Mapping[str, Any]) -> Patch:
    device = str(table.get("device", "none"))
    if device not in registry.OFFLOADS:
        raise SpecError([Problem("", f"zero_optimization.{option}.device must be none, cpu or nvme, not {device!r}")])
    patch: Patch = {f"parallel.{option}": device}
    if isinstance(table.get("pin_memory"), bool):
        patch["parallel.pin_memory"] = table["pin_memory"]
    if table.get("nvme_path"):
        patch["parallel.nvme_path"] = str(table["nvme_path"])
    return patch | _number("parallel.nvme_buffer_count", table.get("buffer_count"))


# --- accelerate ---

# Keys that options express under other names.
ACCELERATE_OPTIONS = {
    "distributed_type", "mixed_precision", "gpu_ids", "use_cpu",
    "fsdp_config.fsdp_activation_checkpointing", "fsdp_config.fsdp_sharding_strategy",
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap",
    *(f"deepspeed_config.{key}" for key in (
        "zero_stage", "gradient_accumulation_steps", "gradient_clipping", "deepspeed_config_file",
        "offload_optimizer_device", "offload_optimizer_nvme_path", "offload_param_device", "offload_param_nvme_path",
        "zero3_init_flag", "zero3_save_16bit_model",  # always on in our deepspeed.json
    )),
}  # fmt: skip
DISTRIBUTED_TYPES = {"NO": "single", "MULTI_GPU": "ddp", "MULTI_CPU": "ddp", "MULTI_XPU": "ddp", "MULTI_NPU": "ddp"}


def _accelerate(imported: Mapping[str, Any]) -> Patch:
    kind = str(imported.get("distributed_type", "NO"))
    patch: Patch = {"launch.launcher": "accelerate"}
    if kind == "DEEPSPEED":
        patch |= _accelerate_deepspeed(_table(imported, "deepspeed_config"))
    elif kind == "FSDP":
        patch |= _accelerate_fsdp(_table(imported, "fsdp_config"))
    elif kind in DISTRIBUTED_TYPES:
        patch["parallel.strategy"] = DISTRIBUTED_TYPES[kind]
    else:
        names = ", ".join([*DISTRIBUTED_TYPES, "FSDP", "DEEPSPEED"])
        raise SpecError([Problem("", f"distributed_type {kind} is not supported; supported are {names}")])
    machines = _count(imported, "num_machines", 1)
    patch |= _number("launch.nproc_per_node", _count(imported, "num_processes", machines) // machines)
    if machines > 1:
        patch |= {"launch.rendezvous": "static", "launch.nnodes": machines}
        patch |= {"launch.master_addr": str(imported.get("main_process_ip") or "")}
        patch |= _number("launch.node_rank", imported.get("machine_rank"))
    patch |= _number("launch.master_port", imported.get("main_process_port"))
    if imported.get("mixed_precision") in ("no", "bf16", "fp16", "fp8"):
        patch["precision.compute"] = str(imported["mixed_precision"]).replace("no", "fp32")
    if imported.get("use_cpu") is True:
        patch["launch.device"] = "cpu"
    ids = str(imported.get("gpu_ids", "all"))
    return patch | ({"launch.devices": ids} if ids not in ("all", "None") else {})


def _count(imported: Mapping[str, Any], key: str, default: int) -> int:
    """A number of machines or processes. Raises SpecError."""
    value = imported.get(key) or default
    if not _is_number(value) or value < 1:
        raise SpecError([Problem("", f"{key} must be a positive integer, not {value!r}")])
    return int(value)


def _accelerate_deepspeed(table: Mapping[str, Any]) -> Patch:
    if table.get("deepspeed_config_file"):
        if table.get("zero_stage") is None:
            file = table["deepspeed_config_file"]
            raise SpecError([Problem("", f"deepspeed_config refers to {file}: import that file instead")])
        return {"parallel.strategy": f"zero{table['zero_stage']}"}
    zero = {"stage": table.get("zero_stage", 2)}
    for key in ("optimizer", "param"):
        zero[f"offload_{key}"] = {
            "device": table.get(f"offload_{key}_device", "none"),
            "nvme_path": table.get(f"offload_{key}_nvme_path", ""),
        }
    same = ("gradient_accumulation_steps", "gradient_clipping")
    return _deepspeed({"zero_optimization": zero, **{key: table.get(key) for key in same}})


def _accelerate_fsdp(table: Mapping[str, Any]) -> Patch:
    config = {key.removeprefix("fsdp_"): value for key, value in table.items()}
    version = 2 if config.get("version") == 2 else 1
    patch: Patch = {"parallel.strategy": f"fsdp{version}"}
    sharding = str(config.get("sharding_strategy") or config.get("reshard_after_forward", "")).lower()
    if version == 1 and sharding in registry.SHARDINGS:
        patch["parallel.sharding_strategy"] = sharding
    if version == 2 and isinstance(config.get("reshard_after_forward"), bool):
        patch["parallel.reshard_after_forward"] = config["reshard_after_forward"]
    if isinstance(config.get("offload_params"), bool):
        patch["parallel.cpu_offload"] = config["offload_params"]
    formats = {value: key for key, value in STATE_DICTS.items()}
    if (name := str(config.get("state_dict_type"))) in formats:
        patch["parallel.state_dict_type"] = formats[name]
    if version == 2 and config.get("cpu_ram_efficient_loading") is False:  # fsdp.json must agree with it
        patch["parallel.extra_config"] = _json({"cpu_ram_efficient_loading": False})
    layers = config.get("transformer_layer_cls_to_wrap") or ""
    return patch | {
        "parallel.transformer_layer_cls_to_wrap": layers,
        "train.activation_checkpointing": config.get("activation_checkpointing") is True,
    }
