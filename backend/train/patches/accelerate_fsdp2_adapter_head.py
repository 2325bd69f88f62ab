"""accelerate's FSDP2 leaves the output layer of a model with an adapter sharded in the forward pass.

accelerate utils/fsdp_utils.py, `_find_final_norm`, looks for the norm before the output layer in the children of the
base model, and takes peft's model for it. The two share a unit that is gathered when the norm is called; without the
norm, the unit waits for a call of the output layer, and TRL's losses read its weights only. Without the patch, a
trained output layer (lora.modules_to_save) gets on each rank the gradient of this rank's examples alone.
"""

from __future__ import annotations

from typing import Any

from accelerate.utils import fsdp_utils

LIBRARY, SEEN_IN = "accelerate", "1.15.0"
original = fsdp_utils._find_final_norm


def norm_before_head(model: Any) -> Any:
    """The final norm of a model, also of one with an adapter; None if there is none."""
    return original(model.get_base_model() if hasattr(model, "get_base_model") else model)


def apply() -> None:
    """Replace the function."""
    fsdp_utils._find_final_norm = norm_before_head
