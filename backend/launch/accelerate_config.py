"""accelerate's configuration: the file `accelerate.yaml` of a plan.

Floor 2. Imports catalog, derived, fsdp, machine, run, spec. Pure. What its launcher writes into the environment must
agree with what the trainer is told: the same precision, the same DeepSpeed file, FSDP's same words.
"""

from __future__ import annotations

from typing import Any

import yaml

from backend import registry
from backend.config import RunSpec, merge
from backend.engines import fsdp
from backend.machine import Machine
from backend.resolve import PORT, device, masters, nodes, precision, world
from backend.runs import DEEPSPEED

NAMES = {"cpu_offload": "offload_params"}
# A CPU's processes are started like a GPU's: MULTI_CPU would ask for mpirun.
TYPES = {"npu": "MULTI_NPU", "xpu": "MULTI_XPU"}


def configuration(spec: RunSpec, machine: Machine) -> dict[str, Any]:
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
        "num_machines": nodes(spec),
        "num_processes": world(spec),
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": device(spec, machine) == "cpu",
        **_meeting(spec),
        **_engine(spec, machine),
    }


def _meeting(spec: RunSpec) -> dict[str, Any]:
    launch = spec.launch
    if nodes(spec) == 1:
        return {"main_process_port": launch.master_port}  # 0: it takes a free one
    return {"main_process_ip": launch.master_addr, "main_process_port": launch.master_port or PORT}


def _engine(spec: RunSpec, machine: Machine) -> dict[str, Any]:
    """The kind of run; with DeepSpeed, whose own file names the precision, that must not stand here again."""
    if spec.parallel.strategy in registry.DEEPSPEED:
        config = {"deepspeed_config_file": DEEPSPEED, "deepspeed_multinode_launcher": "standard"}
        return {"distributed_type": "DEEPSPEED", "deepspeed_config": config}
    if spec.parallel.strategy in registry.FSDP:
        return {"distributed_type": "FSDP", "fsdp_config": _fsdp(spec), "mixed_precision": _precision(spec, machine)}
    many = {"distributed_type": TYPES.get(device(spec, machine), "MULTI_GPU")} if world(spec) > 1 else {}
    return {**many, "mixed_precision": _precision(spec, machine)}


def _precision(spec: RunSpec, machine: Machine) -> str:
    """Beside masters in fp32; the trainer would read it as that where there are none."""
    compute = precision(spec, machine)
    return "no" if compute == "fp32" or not masters(spec) else compute


def _fsdp(spec: RunSpec) -> dict[str, Any]:
    """What fsdp.json says, in the launcher's words. Its own defaults are another version, and one reader always."""
    said = fsdp.configuration(spec)
    found = {f"fsdp_{NAMES.get(key, key)}": value for key, value in said.items()}
    if layers := said.get("transformer_layer_cls_to_wrap"):
        found["fsdp_transformer_layer_cls_to_wrap"] = ",".join(layers)
    return found


def text(spec: RunSpec, machine: Machine) -> str:
    """As a file."""
    further = merge.parse(spec.launch.extra_accelerate_config)
    return yaml.safe_dump(merge.over(configuration(spec, machine), further))
