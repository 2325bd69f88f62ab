"""A mixture of experts gets infinite gradients where a rank's part of the sequences is padding only.

transformers models/*/modeling_*.py, load_balancing_loss_func: it divides by the number of tokens in the attention mask.
integrations/deepspeed.py, deepspeed_sp_compute_loss, gives the loss of such a rank no weight, but its gradient is 0
times NaN. DeepSpeed then skips every step without an error. Without the patch such a mixture is not trained at all.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers.trainer

LIBRARY, SEEN_IN = "transformers", "5.23.0"
FUNCTION = "deepspeed_sp_compute_loss"


class WithoutEmptyMasks:
    """Calls `original`; an attention mask without a token becomes one of all tokens. Ulysses does not use the mask, and
    the loss of the rank has no weight."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def __call__(self, accelerator: Any, model: Any, inputs: Any, *more: Any) -> Any:
        """The loss, or loss and outputs."""
        mask = inputs.get("attention_mask")
        if mask is not None:
            inputs = {**inputs, "attention_mask": torch.where(mask.any(), mask, torch.ones_like(mask))}
        return self.original(accelerator, model, inputs, *more)


def apply() -> None:
    """Replace the function in the Trainer."""
    setattr(transformers.trainer, FUNCTION, WithoutEmptyMasks(getattr(transformers.trainer, FUNCTION)))
