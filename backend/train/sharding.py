"""What this rank really holds of weights and optimizer state: the proof of sharding in result.json.

Imports optimizers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from backend.train import optimizers


def loaded(weights: torch.nn.Module) -> int:
    """The bytes of weights that this rank has in memory."""
    own = (_local(p) for p in weights.parameters())
    return sum(p.nbytes for p in own if not p.is_meta)


def held(trainer: Any) -> dict[str, Any]:
    """What drives the model, what its ranks talk by, and the numbers that this rank holds of parameters and of the
    optimizer's state."""
    optimizer: Any = optimizers.unwrap(trainer.optimizer)
    tensors = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    engine = trainer.model_wrapped
    return {
        "engine": str(trainer.accelerator.distributed_type.value),
        "stage": engine.zero_optimization_stage() if hasattr(engine, "zero_optimization_stage") else 0,
        "backend": dist.get_backend() if dist.is_initialized() else "",
        "optimizer_class": type(optimizer).__name__,
        "parameters": sum(_local(p).numel() for p in trainer.model.parameters()),
        "optimizer": sum(_local(t).numel() for t in tensors if t.dim()),
    }


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return getattr(tensor, "ds_tensor", tensor)
