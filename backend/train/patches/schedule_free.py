"""transformers' schedule-free optimizers: warm-up of a share of all steps, and what is saved.

- trainer_optimizer.py, `_get_schedule_free_optimizer` passes `warmup_steps` on unchanged, even if it is a ratio (below
  1). Without `set_warmup_steps` a warm-up of 10 % becomes one of 0.1 steps.
- To load FSDP2's state, torch 2.13 first takes a step with a learning rate of 0 (checkpoint/state_dict.py,
  `_init_optim_state`). Without `allow_step` the optimizers refuse that step, because they are not in training mode yet.
- trainer.py calls `optimizer.eval()`, which puts the average into the weights, only for evaluations. Without
  `use_average`, checkpoints and the trained model hold the weights of the last gradient instead of the average.
"""

from __future__ import annotations

from typing import Any

LIBRARY, SEEN_IN = "transformers", "5.23.0"


def set_warmup_steps(optimizer: Any, steps: int) -> None:
    """Let the optimizer warm up for `steps`; only schedule-free optimizers have this option."""
    for group in optimizer.param_groups:
        if "warmup_steps" in group:
            group["warmup_steps"] = steps


def use_average(optimizer: Any) -> None:
    """Set the weights to their average, if the optimizer is schedule-free."""
    if hasattr(optimizer, "eval"):
        optimizer.eval()


def allow_step(optimizer: Any) -> None:
    """Let the optimizer take a step. Without a state, the optimizer's own `train` would do the same, but also create an
    empty state for each weight, which torch mistakes for a complete one."""
    for group in optimizer.param_groups:
        if "train_mode" in group:
            group["train_mode"] = True
