"""The strategy: what the Trainer is told of it, how its engine starts, and what each rank really holds.

Beside the floors. Imports spec, catalog, run, device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from backend import catalog
from backend.run import DEEPSPEED
from backend.spec import RunSpec
from backend.train import device


def arguments(spec: RunSpec, run: Path, family: str, world: int) -> dict[str, Any]:
    """The Trainer's arguments that belong to the strategy."""
    common: dict[str, Any] = {"dataloader_pin_memory": family == "cuda"}
    if spec.parallel.strategy in catalog.DEEPSPEED:
        return {**common, "deepspeed": str(run / DEEPSPEED), "ddp_timeout": spec.parallel.timeout}
    if world == 1:
        return common
    return {
        **common,
        "ddp_backend": device.backend(family),
        "ddp_timeout": spec.parallel.timeout,
        "ddp_find_unused_parameters": spec.parallel.find_unused_parameters,
        "ddp_bucket_cap_mb": spec.parallel.bucket_mb,
    }


def held(trainer: Any) -> dict[str, int]:
    """DeepSpeed's stage, and the numbers that this rank holds of parameters and of the optimizer's state."""
    optimizer: Any = trainer.optimizer
    while hasattr(optimizer, "optimizer"):  # accelerate's wrapper, then the engine's
        optimizer = optimizer.optimizer
    tensors = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    engine = trainer.model_wrapped
    return {
        "stage": engine.zero_optimization_stage() if hasattr(engine, "zero_optimization_stage") else 0,
        "parameters": sum(getattr(p, "ds_tensor", p).numel() for p in trainer.model.parameters()),
        "optimizer": sum(t.numel() for t in tensors if t.dim()),
    }
