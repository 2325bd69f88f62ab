"""accelerate's configuration: the file accelerate.yaml of a plan.

Imports registry, config, engines, resolve, runs. Pure. What the launcher writes into the environment must agree with
what the trainer is told: the same precision, the same DeepSpeed file, the same FSDP settings.
"""

from __future__ import annotations

from typing import Any

import yaml

from backend.config import RunSpec, merge
from backend.resolve import DEFAULT_PORT, ResolvedRun
from backend.runs import DEEPSPEED

NAMES = {"cpu_offload": "offload_params"}
# A CPU's processes are started like a GPU's: MULTI_CPU would ask for mpirun.
TYPES = {"npu": "MULTI_NPU", "xpu": "MULTI_XPU"}


def configuration(spec: RunSpec, run: ResolvedRun) -> dict[str, Any]:
    """The keys that `accelerate launch` reads; source: accelerate 1.15 commands/config/config_args.py."""
    return {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "NO",
        "downcast_bf16": "no",
        "enable_cpu_affinity": False,
        "gpu_ids": "all",  # of those that the environment leaves visible
        "machine_rank": spec.launch.node_rank,
        "main_training_function": "main",
        "num_machines": run.nnodes,
        "num_processes": run.world_size,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": run.device == "cpu",
        **_meeting(spec, run),
        **_engine(spec, run),
    }


def _meeting(spec: RunSpec, run: ResolvedRun) -> dict[str, Any]:
    launch = spec.launch
    if run.nnodes == 1:
        return {"main_process_port": launch.master_port}  # 0: any free port
    return {"main_process_ip": launch.master_addr, "main_process_port": launch.master_port or DEFAULT_PORT}


def _engine(spec: RunSpec, run: ResolvedRun) -> dict[str, Any]:
    """The distributed type with its settings. DeepSpeed's own file sets the precision, which must not be set twice."""
    kind = run.engine.accelerate_type
    if kind == "DEEPSPEED":
        config = {"deepspeed_config_file": DEEPSPEED, "deepspeed_multinode_launcher": "standard"}
        return {"distributed_type": kind, "deepspeed_config": config}
    if kind == "FSDP":
        return {"distributed_type": kind, "fsdp_config": _fsdp(spec, run), "mixed_precision": _precision(run)}
    multi = {"distributed_type": TYPES.get(run.device, "MULTI_GPU")} if run.world_size > 1 else {}
    return {**multi, "mixed_precision": _precision(run)}


def _precision(run: ResolvedRun) -> str:
    """With fp32 master weights; without them the Trainer would take the launcher's value for mixed precision."""
    return "no" if run.compute_dtype == "fp32" or not run.fp32_master_weights else run.compute_dtype


def _fsdp(spec: RunSpec, run: ResolvedRun) -> dict[str, Any]:
    """fsdp.json with the launcher's names. Its own defaults are FSDP1, and weights loaded on rank 0."""
    config = run.engine.configuration(spec)
    found = {f"fsdp_{NAMES.get(key, key)}": value for key, value in config.items()}
    if layers := config.get("transformer_layer_cls_to_wrap"):
        found["fsdp_transformer_layer_cls_to_wrap"] = ",".join(layers)
    return found


def text(spec: RunSpec, run: ResolvedRun) -> str:
    """`configuration` with the user's extra configuration merged over it, as the text of a file."""
    extra = merge.parse(spec.launch.extra_accelerate_config)
    return yaml.safe_dump(merge.over(configuration(spec, run), extra))
