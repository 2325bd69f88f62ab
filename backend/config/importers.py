"""Configurations of others: a DeepSpeed JSON or an accelerate YAML fills the form, and what the form has no field for
is kept as further keys of the same file.

Floor 2. Imports: below. Nothing is guessed: a value that a field takes goes there; afterwards the file that the form
would write is compared with the file that came, and the rest is kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import yaml

from backend import registry
from backend.config import RunSpec, merge
from backend.config.options import Problem, SpecError, edit
from backend.config.processes import world_size
from backend.engines import engine_of
from backend.engines.fsdp import STATE_DICTS
from backend.launch import accelerate_config
from backend.machine import Machine
from backend.resolve import resolve

MIB = 1024**2
Patch = dict[str, Any]
Take = Callable[[Any], Patch]


def recognise(text: str) -> str:
    """'deepspeed' or 'accelerate' if the text is one of theirs, otherwise ''."""
    try:
        found = yaml.safe_load(text)  # JSON is YAML
    except yaml.YAMLError:
        return ""
    if not isinstance(found, dict):
        return ""
    if {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"} & found.keys():
        return "deepspeed"
    return "accelerate" if {"compute_environment", "distributed_type"} & found.keys() else ""


def read(text: str, spec: RunSpec) -> tuple[RunSpec, list[str]]:
    """(`spec` with what the file says, the dotted keys that became further keys). Raises SpecError."""
    theirs = _plain(yaml.safe_load(text))
    kind = recognise(text)
    made = edit(spec, _deepspeed(theirs) if kind == "deepspeed" else _accelerate(theirs))
    if kind == "deepspeed":
        made = edit(made, _rows(theirs, made))
        kept = merge.beyond(theirs, engine_of(made.parallel.strategy).configuration(made))
        kept = {key: value for key, value in kept.items() if key not in _understood(theirs)}
        if _is_number(whole := theirs.get("train_batch_size")) and whole != _step(made):
            kept["train_batch_size"] = whole
        return edit(made, {"parallel.extra_config": _text(kept)}), merge.paths(kept)
    kept = merge.beyond(theirs, accelerate_config.configuration(made, resolve(made, Machine())))
    kept = _without(kept, SAID)
    return edit(made, {"launch.extra_accelerate_config": _text(kept)}), merge.paths(kept)


def _without(table: Mapping[str, Any], said: set[str], before: str = "") -> dict[str, Any]:
    """`table` without the leaves of these dotted paths."""
    found = {}
    for key, value in table.items():
        inner = _without(value, said, f"{before}{key}.") if isinstance(value, Mapping) else value
        if f"{before}{key}" not in said and (inner or not isinstance(value, Mapping)):
            found[key] = inner
    return found


def _text(kept: Mapping[str, Any]) -> str:
    return json.dumps(kept, indent=2) if kept else ""


def _plain(found: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers such as 5e8, which YAML takes for words."""

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
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(name: str, value: Any, divide: float = 1) -> Patch:
    """A patch of one option, if the value is a number ("auto" and null leave the form as it is)."""
    if not _is_number(value):
        return {}
    return {name: max(1, round(value / divide)) if divide != 1 else value}


# --- DeepSpeed ---


def _deepspeed(theirs: Mapping[str, Any]) -> Patch:
    zero = theirs.get("zero_optimization") or {}
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise SpecError([Problem("", f"zero_optimization.stage must be 0, 1, 2 or 3, not {stage!r}")])
    patch: Patch = {"parallel.strategy": f"zero{stage}"}
    patch |= _number("train.per_device_train_batch_size", theirs.get("train_micro_batch_size_per_gpu"))
    patch |= _number("train.gradient_accumulation_steps", theirs.get("gradient_accumulation_steps"))
    patch |= _number("train.max_grad_norm", theirs.get("gradient_clipping"))
    patch |= _number("parallel.bucket_cap_mb", zero.get("reduce_bucket_size"), MIB / 2)
    for name in ("bf16", "fp16"):
        if (theirs.get(name) or {}).get("enabled") is True:
            patch["precision.compute"] = name
    for key in ("offload_optimizer", "offload_param"):
        patch |= _offload(key, zero.get(key) or {})
    aio = theirs.get("aio") or {}
    patch |= _number("parallel.aio_block_size_kb", aio.get("block_size"), 1024)
    patch |= _number("parallel.aio_queue_depth", aio.get("queue_depth"))
    patch |= _number("parallel.aio_intra_op_parallelism", aio.get("intra_op_parallelism"))
    return patch | _schedule(theirs.get("scheduler") or {}) | _optimizer(theirs.get("optimizer") or {})


def _step(spec: RunSpec) -> int:
    """Rows of a step, as DeepSpeed counts them."""
    return spec.train.per_device_train_batch_size * spec.train.gradient_accumulation_steps * world_size(spec)


def _rows(theirs: Mapping[str, Any], made: RunSpec) -> Patch:
    """What of batch size and accumulation is not said, so that a step learns from as many rows as the file says."""
    whole: Any = theirs.get("train_batch_size")
    for name, key, other in (
        ("train.gradient_accumulation_steps", "gradient_accumulation_steps", made.train.per_device_train_batch_size),
        ("train.per_device_train_batch_size", "train_micro_batch_size_per_gpu", made.train.gradient_accumulation_steps),
    ):
        each = other * world_size(made)
        if _is_number(whole) and not _is_number(theirs.get(key)) and whole % each == 0:
            return {name: whole // each}
    return {}


# DeepSpeed's optimizers and schedules that are the form's too; source: transformers 5.23 docs/main_classes/deepspeed.
OPTIMIZERS = {"adam": "adamw_torch", "adamw": "adamw_torch"}  # its Adam decays like AdamW, unless told otherwise
SCHEDULES = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
PLAIN = {"torch_adam": (True, False), "adam_w_mode": (True,), "bias_correction": (True,), "warmup_min_lr": (0, "auto"),
         "warmup_type": ("linear",)}  # fmt: skip
RATES = {"lr": "learning_rate", "eps": "adam_epsilon", "weight_decay": "weight_decay"}
STEPS = {"warmup_max_lr": "learning_rate", "warmup_num_steps": "warmup_steps"}


def _optimizer(block: Mapping[str, Any]) -> Patch:
    params: Mapping[str, Any] = block.get("params") or {}
    patch: Patch = {}
    if name := OPTIMIZERS.get(str(block.get("type")).lower()):
        patch["train.optim"] = name
    for key, option in RATES.items():
        patch |= _number(f"train.{option}", params.get(key))
    betas = params.get("betas")
    if isinstance(betas, list) and len(betas) == 2 and all(map(_is_number, betas)):
        patch |= {"train.adam_beta1": betas[0], "train.adam_beta2": betas[1]}
    return patch


def _schedule(block: Mapping[str, Any]) -> Patch:
    params: Mapping[str, Any] = block.get("params") or {}
    patch: Patch = {}
    if name := SCHEDULES.get(str(block.get("type"))):
        patch["train.lr_scheduler_type"] = name
    for key, option in STEPS.items():
        patch |= _number(f"train.{option}", params.get(key))
    if _is_number(steps := params.get("total_num_steps")):  # of the whole training
        patch |= {"train.duration": "steps", "train.max_steps": steps}
    return patch


def _understood(theirs: Mapping[str, Any]) -> list[str]:
    """Which of the blocks optimizer and scheduler the form says in full."""
    found = []
    for name, types, said in (
        ("optimizer", {*OPTIMIZERS}, {*RATES, "betas"}),
        ("scheduler", {key.lower() for key in SCHEDULES}, {*STEPS, "total_num_steps"}),
    ):
        block = theirs.get(name) or {}
        params = block.get("params") or {}
        rest = {k: v for k, v in params.items() if k not in said and v not in PLAIN.get(k, ())}
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

# What the form says in other words, so that its own file need not repeat it.
SAID = {
    "distributed_type", "mixed_precision", "gpu_ids", "use_cpu",
    "fsdp_config.fsdp_activation_checkpointing", "fsdp_config.fsdp_sharding_strategy",
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap",
    *(f"deepspeed_config.{key}" for key in (
        "zero_stage", "gradient_accumulation_steps", "gradient_clipping", "deepspeed_config_file",
        "offload_optimizer_device", "offload_optimizer_nvme_path", "offload_param_device", "offload_param_nvme_path",
        "zero3_init_flag", "zero3_save_16bit_model",  # as deepspeed.json does always
    )),
}  # fmt: skip
STRATEGIES = {"NO": "single", "MULTI_GPU": "ddp", "MULTI_CPU": "ddp", "MULTI_XPU": "ddp", "MULTI_NPU": "ddp"}


def _accelerate(theirs: Mapping[str, Any]) -> Patch:
    kind = str(theirs.get("distributed_type", "NO"))
    patch: Patch = {"launch.launcher": "accelerate"}
    if kind == "DEEPSPEED":
        patch |= _accelerate_deepspeed(theirs.get("deepspeed_config") or {})
    elif kind == "FSDP":
        patch |= _accelerate_fsdp(theirs.get("fsdp_config") or {})
    elif kind in STRATEGIES:
        patch["parallel.strategy"] = STRATEGIES[kind]
    else:
        raise SpecError([Problem("", f"distributed_type {kind} is none that Footplate starts")])
    machines = int(theirs.get("num_machines") or 1)
    patch |= _number("launch.nproc_per_node", int(theirs.get("num_processes") or machines) // machines)
    if machines > 1:
        patch |= {"launch.rendezvous": "static", "launch.nnodes": machines}
        patch |= {"launch.master_addr": str(theirs.get("main_process_ip") or "")}
        patch |= _number("launch.node_rank", theirs.get("machine_rank"))
    patch |= _number("launch.master_port", theirs.get("main_process_port"))
    if theirs.get("mixed_precision") in ("no", "bf16", "fp16", "fp8"):
        patch["precision.compute"] = str(theirs["mixed_precision"]).replace("no", "fp32")
    if theirs.get("use_cpu") is True:
        patch["launch.device"] = "cpu"
    ids = str(theirs.get("gpu_ids", "all"))
    return patch | ({"launch.devices": ids} if ids not in ("all", "None") else {})


def _accelerate_deepspeed(table: Mapping[str, Any]) -> Patch:
    if table.get("deepspeed_config_file"):
        said = f"deepspeed_config names {table['deepspeed_config_file']}: import that file too, before or after"
        patch: Patch = {} if table.get("zero_stage") is None else {"parallel.strategy": f"zero{table['zero_stage']}"}
        return patch or _refuse(said)
    zero = {"stage": table.get("zero_stage", 2)}
    for key in ("optimizer", "param"):
        zero[f"offload_{key}"] = {
            "device": table.get(f"offload_{key}_device", "none"),
            "nvme_path": table.get(f"offload_{key}_nvme_path", ""),
        }
    same = ("gradient_accumulation_steps", "gradient_clipping")
    return _deepspeed({"zero_optimization": zero, **{key: table.get(key) for key in same}})


def _refuse(sentence: str) -> Patch:
    raise SpecError([Problem("", sentence)])


def _accelerate_fsdp(table: Mapping[str, Any]) -> Patch:
    said = {key.removeprefix("fsdp_"): value for key, value in table.items()}
    version = 2 if said.get("version") == 2 else 1
    patch: Patch = {"parallel.strategy": f"fsdp{version}"}
    sharding = str(said.get("sharding_strategy") or said.get("reshard_after_forward", "")).lower()
    if version == 1 and sharding in registry.SHARDINGS:
        patch["parallel.sharding_strategy"] = sharding
    if version == 2 and isinstance(said.get("reshard_after_forward"), bool):
        patch["parallel.reshard_after_forward"] = said["reshard_after_forward"]
    if isinstance(said.get("offload_params"), bool):
        patch["parallel.cpu_offload"] = said["offload_params"]
    formats = {value: key for key, value in STATE_DICTS.items()}
    if said.get("state_dict_type") in formats:
        patch["parallel.state_dict_type"] = formats[said["state_dict_type"]]
    if version == 2 and said.get("cpu_ram_efficient_loading") is False:  # both files must say so
        patch["parallel.extra_config"] = _text({"cpu_ram_efficient_loading": False})
    layers = said.get("transformer_layer_cls_to_wrap") or ""
    return patch | {
        "parallel.transformer_layer_cls_to_wrap": layers,
        "train.activation_checkpointing": said.get("activation_checkpointing") is True,
    }
