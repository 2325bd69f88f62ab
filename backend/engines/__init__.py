"""The training engines: what each shards, offloads and loads, and its configuration file.

A strategy is a row of `registry.STRATEGIES` and names its engine; `engine_of` returns that engine for the row. A new
engine is one class here, one row in the registry and one module in `backend/train/engines`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from backend import registry
from backend.engines.base import DDP, Engine, TensorParallel
from backend.engines.deepspeed import DeepSpeed
from backend.engines.fsdp import FSDP

ENGINES: Mapping[str, type[Engine]] = {
    "": Engine,
    "ddp": DDP,
    "deepspeed": DeepSpeed,
    "fsdp": FSDP,
    "tensor": TensorParallel,
}


@cache
def engine_of(strategy: str) -> Engine:
    """The engine of a strategy of `registry.STRATEGIES`."""
    row = registry.STRATEGIES[strategy]
    return ENGINES[row.engine](row)
