"""The running part of the engines: one class for each class in `backend/engines`, under the same name.

`train_engine(spec, run)` returns the one for a run.
"""

from __future__ import annotations

from collections.abc import Mapping

from backend.config import RunSpec
from backend.resolve import ResolvedRun
from backend.train.engines.base import TrainEngine
from backend.train.engines.ddp import TrainDDP
from backend.train.engines.deepspeed import TrainDeepSpeed
from backend.train.engines.fsdp import TrainFSDP
from backend.train.engines.tensor_parallel import TrainTensorParallel

TRAIN_ENGINES: Mapping[str, type[TrainEngine]] = {
    "": TrainEngine,
    "ddp": TrainDDP,
    "deepspeed": TrainDeepSpeed,
    "fsdp": TrainFSDP,
    "tensor": TrainTensorParallel,
}


def train_engine(spec: RunSpec, run: ResolvedRun, world_size: int) -> TrainEngine:
    """The engine of a run that has `world_size` processes now; an elastic run may have fewer than were planned."""
    return TRAIN_ENGINES[run.engine.strategy.engine](spec, run, world_size)
