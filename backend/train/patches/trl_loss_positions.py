"""TRL computes the logits of every position on devices without Triton.

trl/trainer/utils.py: only on devices with Triton does the loss skip positions whose label is -100; elsewhere every
position is scored, because some compilers need fixed shapes. A CPU does not. Without the patch training on a CPU takes
up to a third longer, with the same losses.
"""

from __future__ import annotations

import trl.trainer.utils

LIBRARY, SEEN_IN = "trl", "1.16.0"


def apply() -> None:
    """Skip positions without a label. Only for CPU runs."""
    if hasattr(trl.trainer.utils, "_use_triton"):
        trl.trainer.utils._use_triton = lambda device: True
