"""DeepSpeed's data loader for sequence parallelism starts a new epoch only after it has raised StopIteration.

deepspeed runtime/sequence_parallel/ulysses_sp.py, `UlyssesSPDataLoaderAdapter.__iter__` returns itself. The Trainer
reads exactly the batches of an epoch, so the end of an epoch is raised at the first batch of the next one, and the
Trainer skips that optimizer step. Without the patch a run of N epochs ends N - 1 steps early, before the learning rate
schedule does.
"""

from __future__ import annotations

import importlib
import inspect
from contextlib import suppress
from typing import Any

LIBRARY, SEEN_IN = "deepspeed", "0.19.8"


def start_epoch(adapter: Any) -> Any:
    """`adapter` with its next batches already read: if it was exhausted, those of a new epoch."""
    if not adapter.micro_batches:
        with suppress(StopIteration):  # refill() begins a new epoch before it raises
            adapter.refill()
    return adapter


def apply() -> None:
    """Replace `__iter__` of the adapter."""
    _adapter().__iter__ = start_epoch


def obsolete() -> bool:
    """Whether `__iter__` begins an epoch."""
    own = _adapter().__iter__
    return own is not start_epoch and inspect.getsource(own).split()[-2:] != ["return", "self"]


def _adapter() -> Any:
    module = importlib.import_module("deepspeed.runtime.sequence_parallel.ulysses_sp")
    return module.UlyssesSPDataLoaderAdapter
