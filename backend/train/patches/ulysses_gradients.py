"""Below ZeRO-3, DeepSpeed multiplies gradients by the size of a sequence parallel group.

deepspeed runtime/zero/stage_1_and_2.py divides the sum of the gradients of all ranks by the number of groups, because
it expects each rank to return the loss of its part of the sequences. transformers' `deepspeed_sp_compute_loss` returns
the mean over the group on every rank. Without the patch gradients, their norm, and so the clipping threshold, are wrong
by that factor.
"""

from __future__ import annotations

from typing import Any

import transformers.trainer

LIBRARY, SEEN_IN = "deepspeed", "0.19.8"
FUNCTION = "deepspeed_sp_compute_loss"


class ScaledLoss:
    """Calls `original`; the loss is the same, its gradient divided by `size`."""

    def __init__(self, original: Any, size: int) -> None:
        self.original, self.size = original, size

    def __call__(self, accelerator: Any, model: Any, inputs: Any, return_outputs: bool, pc: Any) -> Any:
        """The loss, or loss and outputs."""
        loss, outputs = self.original(accelerator, model, inputs, True, pc)
        share = loss / self.size
        loss = share + (loss - share).detach()
        return (loss, outputs) if return_outputs else loss


def apply(size: int) -> None:
    """Replace the function in the Trainer; `size` ranks share a sequence."""
    setattr(transformers.trainer, FUNCTION, ScaledLoss(getattr(transformers.trainer, FUNCTION), size))
