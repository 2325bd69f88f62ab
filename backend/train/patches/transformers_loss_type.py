"""The first token of a sequence has no loss, because nothing predicts it. The Trainer divides the loss by a number of
tokens that includes these first tokens, unless the name of the model's class contains ForCausalLM.

transformers/trainer.py, `_loss_shifts_labels`. GPT2LMHeadModel and others have the same loss. Without the patch, theirs
is too small by the share of first tokens.
"""

from __future__ import annotations

from typing import Any

from transformers.loss.loss_utils import LOSS_MAPPING

LIBRARY, SEEN_IN = "transformers", "5.23.0"


def apply(model: Any) -> None:
    """Name the loss that the language model uses."""
    if getattr(model, "loss_type", None) not in LOSS_MAPPING:
        model.loss_type = "ForCausalLM"
