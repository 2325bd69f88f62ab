"""The engine that TRL computes reference log-probabilities with leaves its hooks on the trained model under ZeRO-3.

trainer/dpo_trainer.py and kto_trainer.py, `_precompute_ref_logps`: with precompute_ref_log_probs and no reference
model, TRL wraps the model in a second DeepSpeed engine. Its hooks gather the weights in every later forward pass too.
When TRL gathers the whole model for generation, it removes only the hooks of the training engine. Without the patch,
ranks that generate different numbers of tokens wait for one another forever. TRL's `remove_hooks` also leaves the hook
that begins a new trace (deepspeed parameter_offload.py, fwd_pre_hook): training fails at its first step if the
reference took only one batch, and at the second with modules_to_save of an adapter.
"""

from __future__ import annotations

from typing import Any

from trl.models.utils import remove_hooks

LIBRARY, SEEN_IN = "trl", "1.16.0"


def apply(trainer: Any) -> None:
    """Remove the hooks of the second engine, which is not needed once the trainer is constructed."""
    engine = getattr(trainer, "_precompute_engine", None)
    if engine is not None and engine.zero_optimization_partition_weights():
        remove_hooks(engine)
        getattr(engine.optimizer, "parameter_offload", engine.optimizer).fwd_pre_hook.remove()
        trainer._precompute_engine = None
