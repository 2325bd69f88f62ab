"""Where a run continues whose steps have another number of examples than those before its checkpoint.

transformers 5.23 (trainer.py, _init_training_state) computes the position in the epochs from the number of steps, as if
all of them had had today's global batch size. After a node has joined an elastic run, that would be behind the end of
its epochs: the run would be done at once. After a node has left, examples would be trained again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Position:
    """After `epochs`, and `batches` of each rank in the next one. `num_epochs`: how many the loop has to begin."""

    epochs: int
    batches: int
    num_epochs: int
    max_steps: int


def find(
    step: int, epoch: float, steps_per_epoch: int, batches_per_epoch: int, accumulation: int, max_steps: int,
    by_epochs: bool,
) -> Position | None:  # fmt: skip
    """Where to continue after `step`, whose position in epochs is `epoch`; None where that is this step of the run.
    `by_epochs`: `max_steps`, counted from step 0, follows from a number of epochs, of which the rest is trained."""
    epochs = int(epoch + 1e-9)
    steps = max(0, math.ceil((epoch - epochs) * batches_per_epoch / accumulation - 1e-6))
    done = epochs * steps_per_epoch + steps
    epochs, steps = done // steps_per_epoch, done % steps_per_epoch  # the rest of an epoch may be less than a batch
    if not epoch or done == step:
        return None
    left = max(0, max_steps - (done if by_epochs else step))
    num_epochs = epochs + max(1, math.ceil((steps + left) / steps_per_epoch))
    return Position(epochs, steps * accumulation, num_epochs, step + left)


def owes_evaluation(args: Any, state: Any, ended_epoch: bool) -> bool:
    """Whether the model of this checkpoint should have been evaluated, but the run was stopped or ended before.
    `args`, `state`: of the Trainer; `ended_epoch`: whether the checkpoint is at the end of an epoch."""
    step = state.global_step
    if not step or any(point.get("step") == step and "eval_loss" in point for point in state.log_history):
        return False
    if args.eval_strategy == "epoch":
        return ended_epoch and bool(args.eval_delay <= state.epoch)
    return args.eval_strategy == "steps" and step % state.eval_steps == 0 and bool(args.eval_delay <= step)
