"""Trainer does not count the trained tokens of a step if the model's class says that its own loss takes no count.

transformers trainer.py, `Trainer.__init__`: `accepts_loss_kwargs` is false in classes with a vision or audio tower
(Gemma 3n and 4), but TRL's SFTTrainer computes the loss itself. Without the patch the SFT loss of these models
is a mean of the means of micro-batches and ranks, in which a token of a short example counts more than one of a long
example, and it depends on how a global batch is divided.
"""

from __future__ import annotations

from typing import Any

LIBRARY, SEEN_IN = "trl", "1.16.0"


def apply(trainer: Any) -> None:
    """Let SFTTrainer divide by the trained tokens of the step. With sequence parallelism, transformers computes the
    loss."""
    parallel = trainer.accelerator.parallelism_config
    if parallel is None or not parallel.sp_enabled:
        trainer.model_accepts_loss_kwargs = True
