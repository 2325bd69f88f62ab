"""Ranks of ZeRO-3 compare the order of their modules at the start of every forward pass.

runtime/zero/partitioned_param_coordinator.py, `reset_step`: while the order is being recorded, all ranks must call it
equally often. TRL's `unwrap_model_for_generation` gathers the weights and removes DeepSpeed's other hooks, but not this
one. Without the patch a rank that generates fewer tokens than the others makes them wait forever.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LIBRARY, SEEN_IN = "deepspeed", "0.19.8"


@contextmanager
def apply(coordinator: Any) -> Iterator[None]:
    """Do not compare the ranks within this context."""
    coordinator.reset_step = lambda: None
    try:
        yield
    finally:
        del coordinator.reset_step
