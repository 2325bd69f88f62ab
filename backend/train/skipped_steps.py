"""Counts the optimizer steps that are skipped because a gradient is NaN or infinite; ends a run that skips all steps.

torch's GradScaler (fp16) and DeepSpeed (any precision) skip such a step without an error: weights and learning rate
stay as they are.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from backend.train import rehearsal
from backend.train.context import TrainContext
from backend.train.run_log import TrainError
from backend.wording import counted

SKIPPED = "skipped_steps"  # in logs, metrics.jsonl and result.json
FP16 = (
    "In fp16, the loss scale starts high and is lowered after each skipped step: train for more steps, or use bf16 or "
    "fp32, which have no loss scale."
)
OTHER = "Train a few steps with the strategy single and precision.compute fp32 to see whether the data are the cause."


class SkippedSteps(TrainerCallback, ExportableState):
    """The number of steps that the run has skipped so far, those before the checkpoint it resumed from included."""

    def __init__(self, context: TrainContext) -> None:
        self.context, self.count = context, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Continue the count of the checkpoint."""
        saved = state.stateful_callbacks.get(type(self).__name__, {})
        self.count = saved["attributes"]["count"] if isinstance(saved, dict) and saved else 0

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        """Count the step if it was skipped; accelerate's wrappers of all engines know that."""
        self.count += bool(optimizer.step_was_skipped)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"args": {}, "attributes": {"count": self.count}}

    def logged(self) -> dict[str, int]:
        """The count for logs and results; nothing where no step was skipped."""
        return {SKIPPED: self.count} if self.count else {}

    def check(self, steps: int) -> None:
        """Raise TrainError on all ranks if all of the run's `steps` were skipped. A collective call."""
        fp16 = self.context.run.compute_dtype == "fp16"
        if rehearsal.is_rehearsal() and fp16:  # after two steps, the loss scale may still be too high
            return
        if self.context.group.agree(int(0 < steps <= self.count)):
            raise TrainError(
                f"Nothing was trained: all {counted(steps, 'optimizer step')} were skipped because gradients were NaN "
                f"or infinite, so the weights are still those of the base model. {FP16 if fp16 else OTHER}"
            )
