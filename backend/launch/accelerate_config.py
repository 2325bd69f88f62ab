"""accelerate's configuration: the file accelerate.yaml of a plan.

The environment that the launcher sets must agree with the Trainer's arguments: the same precision, the same DeepSpeed
file, the same FSDP settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from backend.config import RunSpec, merge
from backend.config.processes import DEFAULT_PORT
from backend.resolve import ResolvedRun

PREFIXES = {"fsdp_config": "fsdp_", "dynamo_config": "dynamo_", "fp8_config": "fp8_"}
# accelerate 1.15 commands/launch.py: the arguments that deepspeed_config sets. Others belong to DeepSpeed's own file.
DEEPSPEED_ARGUMENTS = {
    "zero_stage", "gradient_accumulation_steps", "gradient_clipping", "deepspeed_config_file", "zero3_init_flag",
    "offload_optimizer_device", "offload_optimizer_nvme_path", "offload_param_device", "offload_param_nvme_path",
    "zero3_save_16bit_model", "deepspeed_hostfile", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter",
    "deepspeed_multinode_launcher", "deepspeed_moe_layer_cls_names",
}  # fmt: skip
# CPU processes are started as MULTI_GPU: accelerate starts MULTI_CPU with mpirun.
DISTRIBUTED_TYPES = {"npu": "MULTI_NPU", "xpu": "MULTI_XPU"}


def configuration(spec: RunSpec, run: ResolvedRun) -> dict[str, Any]:
    """The keys that `accelerate launch` reads; source: accelerate 1.15 commands/config/config_args.py."""
    return {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "NO",
        "downcast_bf16": "no",
        "enable_cpu_affinity": False,
        "gpu_ids": "all",  # all that CUDA_VISIBLE_DEVICES leaves visible
        "machine_rank": spec.launch.node_rank,
        "main_training_function": "main",
        "num_machines": run.nnodes,
        "num_processes": run.world_size,
        "rdzv_backend": "static" if run.nnodes > 1 else "c10d",  # see launchers.FILE_RENDEZVOUS
        "same_network": True,
        "use_cpu": run.device == "cpu",
        **_rendezvous(spec, run),
        **_engine(spec, run),
        **_experts(spec),
    }


def _experts(spec: RunSpec) -> dict[str, Any]:
    """The settings of KTransformers, which its fork of accelerate reads. Source: llamafactory,
    examples/ktransformers/accelerate."""
    chosen = spec.llamafactory
    if spec.other_backend != "ktransformers":
        return {}
    settings = {"enabled": True, "kt_backend": chosen.kt_backend, "kt_num_threads": chosen.kt_num_threads}
    return {"kt_config": {**settings, "kt_share_backward_bb": True, "lora_rank": spec.lora.r}}


def _rendezvous(spec: RunSpec, run: ResolvedRun) -> dict[str, Any]:
    """Address and port where the processes meet."""
    launch = spec.launch
    if run.nnodes == 1:
        return {"main_process_port": 0}  # accelerate 1.15 refuses to start if its default port is in use
    return {"main_process_ip": launch.master_addr, "main_process_port": launch.master_port or DEFAULT_PORT}


def _engine(spec: RunSpec, run: ResolvedRun) -> dict[str, Any]:
    """The distributed type and the engine's settings."""
    settings = run.engine.accelerate_settings(spec, _mixed_precision(run))
    if run.world_size == 1 or "distributed_type" in settings:
        return settings
    return {"distributed_type": DISTRIBUTED_TYPES.get(run.device, "MULTI_GPU"), **settings}


def _mixed_precision(run: ResolvedRun) -> str:
    """The autocast dtype; "no" without fp32 master weights, where the Trainer would apply the launcher's dtype."""
    return "no" if run.compute_dtype == "fp32" or not run.fp32_master_weights else run.compute_dtype


def text(spec: RunSpec, run: ResolvedRun) -> str:
    """`configuration`, overridden by the user's extra config, as the text of a file."""
    extra = normalize(merge.parse(spec.launch.extra_accelerate_config))
    return yaml.safe_dump(merge.override(configuration(spec, run), extra))


def normalize(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with the prefixes that the generated file has: accelerate reads the keys of a section with and
    without its prefix. It also converts keys of its earlier versions (accelerate 1.15 commands/config/config_args.py,
    process_config)."""
    found = dict(config)
    backend = found.pop("dynamo_backend", None)
    if backend not in (None, False) and str(backend).upper() != "NO":
        found.setdefault("dynamo_config", {"dynamo_backend": backend})
    if found.pop("fp16", None) is True:
        found.setdefault("mixed_precision", "fp16")
    for section, prefix in PREFIXES.items():
        if isinstance(table := found.get(section), Mapping):
            bare = {f"{prefix}{key}": value for key, value in table.items() if not key.startswith(prefix)}
            found[section] = {**bare, **{key: value for key, value in table.items() if key.startswith(prefix)}}
    return found
