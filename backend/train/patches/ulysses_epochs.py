"""DeepSpeed's data loader for sequence parallelism starts a new epoch only after it has raised StopIteration.

deepspeed runtime/sequence_parallel/ulysses_sp.py, `UlyssesSPDataLoaderAdapter.__iter__` returns itself. The Trainer
reads exactly the batches of an epoch, so the end of an epoch is raised at the first batch of the next one, and the
Trainer skips that optimizer step. Without the patch a run of N epochs ends N - 1 steps early, before the learning rate
schedule does. The adapter also lacks `set_epoch`: a resumed run would repeat the order of the first epoch.
"""

from __future__ import annotations

import importlib
from contextlib import suppress
from typing import Any

LIBRARY, SEEN_IN = "deepspeed", "0.19.8"


def set_epoch(adapter: Any, epoch: int) -> None:
    """Ends the previous epoch, and sets the order of the examples for `epoch`, with which a resumed run may begin."""
    if getattr(adapter, "began", False):
        with suppress(StopIteration):  # refill() begins a new epoch before it raises
            adapter.refill()
    adapter.dl.set_epoch(epoch)


def start_epoch(adapter: Any) -> Any:
    """`adapter` after the batches that a resumed run skips."""
    adapter.began, skipped = True, getattr(adapter, "skipped", 0)
    adapter.skipped = 0
    for _ in range(skipped):
        next(adapter)
    return adapter


def apply() -> None:
    """Replace `__iter__` of the adapter, and add `set_epoch`."""
    _adapter().__iter__, _adapter().set_epoch = start_epoch, set_epoch


def _adapter() -> Any:
    module = importlib.import_module("deepspeed.runtime.sequence_parallel.ulysses_sp")
    return module.UlyssesSPDataLoaderAdapter
