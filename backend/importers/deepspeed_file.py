"""DeepSpeed's configuration file as options: values with an option set it, the rest becomes extra config.

The file that Footplate would generate is compared with the imported one, in which each key has one spelling; keys that
differ become extra config.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from backend import registry
from backend.config import RunSpec, merge
from backend.config.options import Problem, SpecError, edit
from backend.config.processes import world_size
from backend.engines import deepspeed_keys, engine_of
from backend.importers.foreign import Imported

MIB = 1024**2
Patch = dict[str, Any]
Table = Mapping[str, Any]
# Keys by which a DeepSpeed configuration is recognized.
KEYS = {
    "zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer", "wall_clock_breakdown", "steps_per_print", "prescale_gradients",
}  # fmt: skip


def is_deepspeed(found: Table) -> bool:
    """Whether a table is a configuration of DeepSpeed."""
    return bool(KEYS & found.keys())


def read(given: Table, spec: RunSpec) -> Imported:
    """`spec` with the values of a DeepSpeed configuration. Raises SpecError."""
    given, different = _with_stage(_without_null_blocks(given), spec)
    imported: Table = deepspeed_keys.normalize(given)
    result = edit(spec, options_of(imported))
    result = edit(result, _batch_size(imported, result))
    imported = _without_pin_memory_switch(imported)
    extra = merge.additions(imported, engine_of(result.parallel.strategy).configuration(result))
    extra = {key: value for key, value in extra.items() if key not in _imported_blocks(imported)}
    if is_number(global_size := imported.get("train_batch_size")) and global_size != _global_batch_size(result):
        extra["train_batch_size"] = global_size
    if "scheduler" not in extra:  # else DeepSpeed has its own schedule
        different += _warmup(table_at(imported, "scheduler")) + _learning_rate(imported)
    return Imported(edit(result, {"parallel.extra_config": as_json(extra)}), merge.paths(extra), different)


def _with_stage(given: Table, spec: RunSpec) -> tuple[Table, list[str]]:
    """The configuration with a number for the stage "auto", and what was chosen."""
    zero, strategy = given.get("zero_optimization"), spec.parallel.strategy
    if not isinstance(zero, Mapping) or zero.get("stage") != deepspeed_keys.AUTO:
        return given, []
    is_set = strategy.startswith("zero")
    stage = int(strategy.removeprefix("zero")) if is_set else 2
    reason = (
        "the strategy of this spec is kept" if is_set else "accelerate fills in 2 unless its own file has zero_stage"
    )
    text = f"zero_optimization.stage: auto: ZeRO-{stage} is imported; {reason}"
    return {**given, "zero_optimization": {**zero, "stage": stage}}, [text]


def as_json(extra: Table) -> str:
    """Extra config as text; '' if it is empty."""
    return json.dumps(extra, indent=2) if extra else ""


def is_number(value: Any) -> bool:
    """Whether a value is a finite number."""
    return (isinstance(value, int) and not isinstance(value, bool)) or (
        isinstance(value, float) and math.isfinite(value)
    )


def table_at(parent: Table, key: str, prefix: str = "") -> Table:
    """The table at `key`; empty if there is none. Raises SpecError, which names the key with `prefix` before it."""
    found = parent.get(key) or {}
    if not isinstance(found, Mapping):
        raise SpecError([Problem("", f"{prefix}{key} must contain keys and values, not {found!r}")])
    return found


def number_patch(name: str, value: Any, divide: float = 1) -> Patch:
    """A patch of one option if the value is a number; "auto" and null leave the option unchanged."""
    if not is_number(value):
        return {}
    return {name: max(1, round(value / divide)) if divide != 1 else value}


def options_of(imported: Table) -> Patch:
    """The options that a DeepSpeed configuration sets."""
    zero = table_at(imported, "zero_optimization")
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise SpecError([Problem("", f"zero_optimization.stage must be 0, 1, 2 or 3, not {stage!r}")])
    patch: Patch = {"parallel.strategy": f"zero{stage}"}
    patch |= number_patch("train.per_device_train_batch_size", imported.get("train_micro_batch_size_per_gpu"))
    patch |= number_patch("train.gradient_accumulation_steps", imported.get("gradient_accumulation_steps"))
    patch |= number_patch("train.max_grad_norm", imported.get("gradient_clipping"))
    patch |= number_patch("parallel.bucket_cap_mb", zero.get("reduce_bucket_size"), MIB / 2)
    patch |= _precision(imported)
    if (pinned := deepspeed_keys.as_boolean(zero.get("cpu_offload_use_pin_memory"))) is not None:
        patch["parallel.pin_memory"] = pinned
    for key in ("offload_optimizer", "offload_param"):
        patch |= _offload(key, table_at(zero, key, "zero_optimization."))
    aio = table_at(imported, "aio")
    patch |= number_patch("parallel.aio_block_size_kb", aio.get("block_size"), 1024)
    patch |= number_patch("parallel.aio_queue_depth", aio.get("queue_depth"))
    patch |= number_patch("parallel.aio_intra_op_parallelism", aio.get("intra_op_parallelism"))
    # In DeepSpeed, the schedule sets the learning rate of the optimizer, too.
    return patch | _optimizer(table_at(imported, "optimizer")) | _scheduler(table_at(imported, "scheduler"))


def _precision(imported: Table) -> Patch:
    """The compute dtype, unless the file leaves it to the Trainer."""
    bf16, fp16 = (table_at(imported, name).get("enabled") for name in ("bf16", "fp16"))
    if deepspeed_keys.as_boolean(bf16) and deepspeed_keys.as_boolean(fp16):
        message = "bf16.enabled and fp16.enabled are both true, which DeepSpeed refuses: set one of them to false"
        raise SpecError([Problem("", message)])
    for name, value in (("bf16", bf16), ("fp16", fp16)):
        if deepspeed_keys.as_boolean(value):
            return {"precision.compute": name}
    is_fp32 = deepspeed_keys.as_boolean(bf16) is False and fp16 != deepspeed_keys.AUTO
    return {"precision.compute": "fp32"} if is_fp32 else {}


def _without_null_blocks(given: Table) -> dict[str, Any]:
    """The configuration without blocks that are null, and so turn nothing on."""
    zero = given.get("zero_optimization")
    inner = {key: value for key, value in zero.items() if value is not None} if isinstance(zero, Mapping) else zero
    return {key: inner if key == "zero_optimization" else value for key, value in given.items() if value is not None}


def _without_pin_memory_switch(imported: Table) -> Table:
    """The configuration without the deprecated switch of pinned memory, which parallel.pin_memory expresses."""
    zero = table_at(imported, "zero_optimization")
    if deepspeed_keys.as_boolean(zero.get("cpu_offload_use_pin_memory")) is None:
        return imported
    kept = {key: value for key, value in zero.items() if key != "cpu_offload_use_pin_memory"}
    return {**imported, "zero_optimization": kept}


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
        if is_number(global_size) and not is_number(imported.get(key)) and global_size % each == 0:
            return {name: global_size // each}
    return {}


# DeepSpeed's optimizers and schedulers -> Footplate's options; source: transformers 5.23 docs/main_classes/deepspeed.
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
# Of the schedules, for parameters that a file leaves out; WarmupLR then takes the optimizer's learning rate.
SCHEDULER_DEFAULTS: Mapping[str, Table] = {
    "WarmupLR": {"warmup_num_steps": 1000},
    "WarmupDecayLR": {"warmup_num_steps": 1000, "warmup_max_lr": 0.001},
    "WarmupCosineLR": {"warmup_num_steps": 1000},
}  # source: DeepSpeed 0.19 runtime/lr_schedules.py


def _optimizer(block: Mapping[str, Any]) -> Patch:
    params = table_at(block, "params", "optimizer.")
    patch: Patch = {}
    if name := OPTIMIZERS.get(str(block.get("type")).lower()):
        patch["train.optim"] = name
    for key, option in OPTIMIZER_PARAMS.items():
        patch |= number_patch(f"train.{option}", params.get(key))
    betas = params.get("betas")
    if isinstance(betas, list) and len(betas) == 2 and all(map(is_number, betas)):
        patch |= {"train.adam_beta1": betas[0], "train.adam_beta2": betas[1]}
    return patch


def _schedule_params(block: Mapping[str, Any]) -> Table:
    """The parameters of the block scheduler, with DeepSpeed's values for those that it leaves out."""
    return {**SCHEDULER_DEFAULTS.get(str(block.get("type")), {}), **table_at(block, "params", "scheduler.")}


def _scheduler(block: Mapping[str, Any]) -> Patch:
    params = _schedule_params(block)
    patch: Patch = {}
    if name := SCHEDULERS.get(str(block.get("type"))):
        patch["train.lr_scheduler_type"] = name
    for key, option in SCHEDULER_PARAMS.items():
        patch |= number_patch(f"train.{option}", params.get(key))
    if is_number(steps := params.get("total_num_steps")):  # optimizer steps of the whole run
        patch |= {"train.duration": "steps", "train.max_steps": steps}
    return patch


def _warmup(block: Mapping[str, Any]) -> list[str]:
    """What is different about the warmup of a scheduler, whose type is "log" by default (runtime/lr_schedules.py)."""
    if str(block.get("type")) not in SCHEDULERS or table_at(block, "params", "scheduler.").get("warmup_type"):
        return []
    text = "DeepSpeed's learning rate rises with the logarithm of the step, Footplate's linearly"
    return [f"scheduler.params.warmup_type: log, the default: {text}"]


def _learning_rate(imported: Table) -> list[str]:
    """Where the learning rate is from, if not from the optimizer's block, which has another one."""
    rate = table_at(table_at(imported, "optimizer"), "params", "optimizer.").get("lr")
    peak = _schedule_params(table_at(imported, "scheduler")).get("warmup_max_lr")
    if not is_number(rate) or not is_number(peak) or rate == peak:
        return []
    text = f"DeepSpeed's schedule sets scheduler.params.warmup_max_lr, {peak}, which is imported"
    return [f"optimizer.params.lr: {rate}: {text}"]


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
        if str(block.get("type")).lower() in types and not rest and block.keys() <= {"type", "params"}:
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
    return patch | number_patch("parallel.nvme_buffer_count", table.get("buffer_count"))
