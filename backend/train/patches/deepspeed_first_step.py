"""ZeRO-0 in bf16 and fp16 takes an optimizer step with gradients of zero before the first one.

fp16/unfused_optimizer.py and fp16/fused_optimizer.py, `initialize_optimizer_states` (deepspeed 0.19): this step
allocates the optimizer state. But it also counts: Adam corrects the bias of its averages as if the first step was the
second one. Without the patch the first update is 0.74 times what Adam computes, and the weights decay once more than
they should. The optimizer allocates its state in its first step, too.
"""

from __future__ import annotations

from typing import Any

LIBRARY, SEEN_IN = "deepspeed", "0.19.8"


def take_no_step(optimizer: Any) -> None:
    """In place of the step."""


def apply() -> None:
    """Replace the methods. Only for ZeRO-0."""
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer  # noqa: PLC0415 - takes a second
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer  # noqa: PLC0415

    FP16_Optimizer.initialize_optimizer_states = FP16_UnfusedOptimizer.initialize_optimizer_states = take_no_step
