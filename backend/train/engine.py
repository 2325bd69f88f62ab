"""The strategy: what the Trainer is told of it, how its engine starts, and what each rank really holds.

Beside the floors. Imports spec, catalog, run, device.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate import ParallelismConfig, PartialState
from accelerate.utils import DistributedType
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

from backend import catalog
from backend.run import DEEPSPEED, FSDP
from backend.spec import RunSpec
from backend.train import device
from backend.train.journal import TrainError
from backend.train.model import DTYPES


def arguments(spec: RunSpec, run: Path, family: str, world: int) -> dict[str, Any]:
    """The Trainer's arguments that belong to the strategy."""
    parallel, row = spec.parallel, catalog.STRATEGIES[spec.parallel.strategy]
    found: dict[str, Any] = {"dataloader_pin_memory": family == "cuda"}
    if row.engine == "deepspeed":
        return {**found, "deepspeed": str(run / DEEPSPEED), "ddp_timeout": parallel.timeout}
    if world == 1:
        return found
    found |= {"ddp_backend": device.backend(family), "ddp_timeout": parallel.timeout}
    if row.engine == "ddp":
        found["ddp_find_unused_parameters"] = parallel.find_unused_parameters
        found["ddp_bucket_cap_mb"] = parallel.bucket_mb
    if row.engine == "fsdp":
        found |= {"fsdp": True, "fsdp_config": str(run / FSDP)}
        if max(parallel.replicas, parallel.context) > 1:
            found["parallelism_config"] = mesh(spec, world)
        if parallel.context > 1:
            found["pad_to_multiple_of"] = 2 * parallel.context  # each device takes a piece from both ends of a row
    return found


def mesh(spec: RunSpec, world: int) -> ParallelismConfig:
    """How the ranks are arranged: replicas x shards x context."""
    parallel = spec.parallel
    return ParallelismConfig(
        dp_replicate_size=parallel.replicas,
        dp_shard_size=world // (parallel.replicas * parallel.context),
        cp_size=parallel.context,
    )


def start(spec: RunSpec, config: Any, family: str, precision: str) -> None:
    """Start the engine, between the Trainer's arguments (which start the process group) and the model."""
    row = catalog.STRATEGIES[spec.parallel.strategy]
    if row.engine == "deepspeed":
        device.start_deepspeed(family)
    if row.engine == "fsdp" and config.fsdp:
        _plugin(spec, config, family, precision)
    if row.engine in ("fsdp", "tensor") and family == "cpu":
        # accelerate 1.15 turns FSDP and meshes on for accelerators alone, and trains on a CPU as DDP without a word.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU


def _plugin(spec: RunSpec, config: Any, family: str, precision: str) -> None:
    """What accelerate's FSDP plugin is told beyond fsdp.json: gradients are added up as asked (by itself it would add
    them in half), and memory is pinned only where there is a device to pin it for."""
    parallel, dtype = spec.parallel, DTYPES[precision]
    second = catalog.STRATEGIES[parallel.strategy].version == 2
    reduce = torch.float32 if parallel.reduce_precision == "fp32" else dtype
    policy: Any = MixedPrecisionPolicy if second else MixedPrecision
    config.fsdp_plugin_args["mixed_precision_policy"] = policy(param_dtype=dtype, reduce_dtype=reduce)
    if parallel.cpu_offload and second:
        pin = parallel.pin_memory and family != "cpu"
        config.fsdp_plugin_args["cpu_offload"] = CPUOffloadPolicy(pin_memory=pin)


def slices(spec: RunSpec, world: int, precision: str) -> dict[str, Any]:
    """How a model is loaded if every rank takes a slice of each layer."""
    if catalog.STRATEGIES[spec.parallel.strategy].engine != "tensor":
        return {}
    size = spec.parallel.tensor
    shards = world // size
    return {
        "distributed_config": DistributedConfig(
            tp_size=size, fsdp_size=shards, fsdp_mixed_precision=shards > 1 and precision == "bf16"
        )
    }


def whole(spec: RunSpec, trainer: Any) -> dict[str, Any] | None:
    """The weights gathered from all ranks, on rank 0; None where each rank holds them whole. All ranks must call it."""
    row = catalog.STRATEGIES[spec.parallel.strategy]
    if not row.spread or not dist.is_initialized():
        return None
    if row.engine == "deepspeed":
        return dict(trainer.accelerator.get_state_dict(trainer.model_wrapped) or {})
    found = get_model_state_dict(trainer.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return dict(found)


class Disk:
    """The NVMe folder of a run, held while it lives: DeepSpeed's files have fixed names, so two runs in one folder
    would overwrite each other's state. `clear` deletes what DeepSpeed leaves there, gigabytes."""

    def __init__(self, spec: RunSpec) -> None:
        """Take the folder. Raises TrainError if another run has it."""
        parallel, stage = spec.parallel, catalog.STRATEGIES[spec.parallel.strategy].stage
        used = stage == 3 and "nvme" in (parallel.offload_optimizer, parallel.offload_parameters)
        self.folder = Path(parallel.nvme_path).expanduser() if used else None
        if self.folder is None or os.environ.get("LOCAL_RANK", "0") != "0":
            return
        if not parallel.nvme_path or not self.folder.is_dir():
            raise TrainError(f"parallel.nvme_path: there is no folder {parallel.nvme_path or '(empty)'}.")
        self._lock = (self.folder / "footplate.lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise TrainError(f"parallel.nvme_path: another run works in {self.folder}: name another folder.") from None

    def clear(self) -> None:
        """Delete the state; the run is over."""
        if self.folder is not None and os.environ.get("LOCAL_RANK", "0") == "0":
            shutil.rmtree(self.folder / "zero_stage_3", ignore_errors=True)


def held(trainer: Any) -> dict[str, Any]:
    """What drives the model, and the numbers that this rank holds of parameters and of the optimizer's state."""
    optimizer: Any = trainer.optimizer
    while hasattr(optimizer, "optimizer"):  # accelerate's wrapper, then the engine's
        optimizer = optimizer.optimizer
    tensors = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    engine = trainer.model_wrapped
    return {
        "engine": str(trainer.accelerator.distributed_type.value),
        "stage": engine.zero_optimization_stage() if hasattr(engine, "zero_optimization_stage") else 0,
        "optimizer_class": type(optimizer).__name__,
        "parameters": sum(_local(p).numel() for p in trainer.model.parameters()),
        "optimizer": sum(_local(t).numel() for t in tensors if t.dim()),
    }


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return getattr(tensor, "ds_tensor", tensor)
