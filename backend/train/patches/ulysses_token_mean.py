"""With Ulysses, the loss of a step is a mean of the means of micro-batches and of groups of ranks.

transformers integrations/deepspeed.py, `deepspeed_sp_compute_loss`, divides by the trained tokens of a micro-batch, and
Trainer counts no tokens of a step, since the batches have no `labels`. Without the patch, a token of a micro-batch with
few trained tokens counts more than others, and the loss depends on how a global batch is divided.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import transformers.trainer

LIBRARY, SEEN_IN = "transformers", "5.23.0"
FUNCTION = "deepspeed_sp_compute_loss"


class TokenMean:
    """Calls `loss_of` for a micro-batch, and `batches_of` for those of a step; both are the original functions."""

    def __init__(self, loss_of: Any, batches_of: Any) -> None:
        self.loss_of, self.batches_of = loss_of, batches_of
        self.shares: Iterator[float] = iter(())  # of each micro-batch in the step, relative to an equal share

    def loss(self, accelerator: Any, model: Any, inputs: Any, return_outputs: bool, pc: Any) -> Any:
        """The loss, or loss and outputs. Trainer divides it by the number of micro-batches, and averages the groups."""
        loss, outputs = self.loss_of(accelerator, model, inputs, True, pc)
        loss = loss * next(self.shares)
        return (loss, outputs) if return_outputs else loss

    def batches(self, iterator: Any, number: int, device: Any) -> Any:
        """The micro-batches of the next step; all ranks call it together."""
        found, count = self.batches_of(iterator, number, device)
        if found:
            tokens = torch.stack([(batch["shift_labels"] != -100).sum() for batch in found]).to(device)
            dist.all_reduce(tokens, group=_group())  # each of its ranks has a part of each sequence
            total = tokens.sum()
            dist.all_reduce(total)
            shares = tokens * len(found) * dist.get_world_size() / total.clamp(min=1)
            self.shares = iter(shares.tolist())
        return found, count


def _group() -> Any:
    """The ranks that share a sequence; DeepSpeed makes the group when training starts."""
    from deepspeed.utils import groups  # noqa: PLC0415 - takes seconds, and few runs need it

    return groups._get_sequence_parallel_group()


def apply(trainer: Any) -> None:
    """Replace both functions, if the ranks share sequences."""
    parallel = trainer.accelerator.parallelism_config
    if parallel is None or not parallel.sp_enabled:
        return
    mean = TokenMean(getattr(transformers.trainer, FUNCTION), trainer.get_batch_samples)
    setattr(transformers.trainer, FUNCTION, mean.loss)
    trainer.get_batch_samples = mean.batches
