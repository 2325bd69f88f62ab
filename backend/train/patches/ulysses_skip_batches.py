"""accelerate cannot skip the batches of DeepSpeed's data loader for sequence parallelism.

accelerate data_loader.py, `skip_first_batches`: it makes a new DataLoader, and does not know the wrapper that splits
sequences over the ranks of a group. Without the patch a resumed run with Ulysses fails, or trains on whole sequences on
every rank.
"""

from __future__ import annotations

from typing import Any

import transformers.trainer

LIBRARY, SEEN_IN = "accelerate", "1.15.0"
WRAPPER = "UlyssesSPDataLoaderAdapter"


class SkipBatches:
    """Calls `original`; for DeepSpeed's wrapper, skipped batches are read and dropped."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def __call__(self, loader: Any, number: int = 0) -> Any:
        """`loader` after its first `number` batches."""
        if type(loader).__name__ != WRAPPER:
            return self.original(loader, number)
        loader.skipped = number  # ulysses_epochs skips them once the epoch is known
        return loader


def apply() -> None:
    """Replace the function in the Trainer."""
    transformers.trainer.skip_first_batches = SkipBatches(transformers.trainer.skip_first_batches)
