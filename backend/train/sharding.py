"""What this rank really has of parameters and optimizer state: the proof of sharding in result.json."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from backend.train import optimizers


def loaded_bytes(weights: torch.nn.Module) -> int:
    """The bytes of parameters that this rank has in memory."""
    own = (_local(p) for p in weights.parameters())
    return sum(p.nbytes for p in own if not p.is_meta)


def summary(trainer: Any) -> dict[str, Any]:
    """The engine and the backend that are really used, and the sizes of parameters and optimizer state on this rank."""
    optimizer: Any = optimizers.unwrap(trainer.optimizer)
    tensors = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    engine = trainer.model_wrapped
    return {
        "engine": str(trainer.accelerator.distributed_type.value),
        "zero_stage": engine.zero_optimization_stage() if hasattr(engine, "zero_optimization_stage") else 0,
        "backend": dist.get_backend() if dist.is_initialized() else "",
        "optimizer_class": type(optimizer).__name__,
        "local_parameters": sum(_local(p).numel() for p in trainer.model.parameters()),
        "local_storage_bytes": storage_bytes(trainer.model),
        "local_optimizer_elements": sum(_local(t).numel() for t in tensors if t.dim()),
    }


def storage_bytes(weights: torch.nn.Module) -> int:
    """The bytes of the storages that the parameters of this rank are in; a view of a larger tensor keeps all of it."""
    storages = {s.data_ptr(): s.nbytes() for p in weights.parameters() for s in [_local(p).untyped_storage()]}
    return sum(storages.values())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The shard of a tensor that this rank has."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return getattr(tensor, "ds_tensor", tensor)
