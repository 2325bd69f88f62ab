"""Ends a run whose loss stays NaN or infinite, and keeps weights that are not finite out of the checkpoints.

Steps are counted on the device and read only when the Trainer logs, evaluates or saves, where it waits for the device
anyway.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from backend.config import RunSpec
from backend.train import checkpoints
from backend.train.device import ProcessGroup
from backend.train.run_log import RunLog, TrainError

# The loss of step 1 is that of the untrained model, so this is no divergence, and no other learning rate helps.
FROM_THE_START = (
    "The loss is NaN or infinite from step 1 on, before training has changed any weight, so a lower learning rate does "
    "not help. The weight files of the model or adapter probably have NaN or infinite values: download or convert them "
    "again. With fp16, large values may overflow: set precision.compute to bf16 or fp32."
)
FINITE, WEIGHTS = 0, 1  # what the ranks agree on; a larger number is WEIGHTS + the steps with a loss that is not finite


class DivergenceCallback(TrainerCallback):
    """Counts the last steps in a row with a loss that is NaN or infinite on any rank."""

    def __init__(self, spec: RunSpec, run: Path, group: ProcessGroup, run_log: RunLog) -> None:
        self.limit, self.run, self.group, self.run_log = spec.train.max_nonfinite_steps, run, group, run_log
        self._step: Any = 0  # whether a batch of this step had such a loss, a tensor
        self._steps: Any = 0  # steps in a row, a tensor

    def add(self, loss: torch.Tensor) -> None:
        """Take note of the loss of a batch."""
        self._step = torch.logical_or(~torch.isfinite(loss.detach()), torch.as_tensor(self._step, device=loss.device))

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Raise TrainError on all ranks if the training diverged. A collective call."""
        self._steps, self._step = (self._steps + 1) * self._step, 0
        last = state.global_step >= state.max_steps or control.should_training_stop
        if not (last or control.should_log or control.should_evaluate or control.should_save):
            return
        found = self._agree(model if last or control.should_save else None)
        steps = found - WEIGHTS
        if steps >= self.limit or (last and found and not self._stopped_by_user(state, control)):
            raise TrainError(self._error(state.global_step, steps))
        self._skip_save(found, state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Check before the checkpoint of an epoch."""
        if control.should_save:
            self._skip_save(self._agree(model), state, control)

    def _agree(self, model: Any) -> int:
        """FINITE, WEIGHTS, or more, on any rank; the weights of `model` are checked if it is given."""
        steps = int(self._steps)
        if steps:
            return self.group.agree(WEIGHTS + steps)
        return self.group.agree(FINITE if model is None or weights_are_finite(model) else WEIGHTS)

    def _stopped_by_user(self, state: Any, control: Any) -> bool:
        return bool(control.should_training_stop and state.global_step < state.max_steps)

    def _skip_save(self, found: int, state: Any, control: Any) -> None:
        if found and control.should_save:
            control.should_save = False
            self.run_log.info(f"checkpoint-{state.global_step} is not saved: loss or weights are NaN or infinite.")

    def _error(self, step: int, steps: int) -> str:
        if steps >= step:
            return FROM_THE_START
        if steps <= 0:
            what = f"the trained weights are NaN or infinite after step {step}"
        elif steps == 1:
            what = f"the loss of step {step} is NaN or infinite"
        else:
            what = f"the loss of steps {step - steps + 1} to {step} is NaN or infinite"
        saved = checkpoints.complete(self.run)
        kept = f"The last finite weights are in {saved[-1].name}" if saved else "No checkpoint was saved before"
        return (
            f"Training diverged: {what}. {kept}. Start a new run with a lower train.learning_rate or more "
            "train.warmup_steps, and with bf16 or fp32 if it uses fp16."
        )


def weights_are_finite(model: torch.nn.Module) -> bool:
    """Whether no trained weight that this rank holds is NaN or infinite."""
    norms: dict[torch.device, list[torch.Tensor]] = defaultdict(list)
    for weight in _trained(model):
        # The largest absolute value, without a temporary copy of the weight.
        norms[weight.device].append(torch.linalg.vector_norm(weight, float("inf")).float())
    return all(bool(torch.stack(found).isfinite().all()) for found in norms.values())


def _trained(model: torch.nn.Module) -> Iterable[torch.Tensor]:
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            weight: Any = _shard(parameter) if hasattr(parameter, "ds_tensor") else parameter.detach()
            weight = weight.to_local() if hasattr(weight, "to_local") else weight
            if weight.numel() and not weight.is_meta:
                yield weight


def _shard(parameter: Any) -> torch.Tensor:
    """The part of a ZeRO-3 parameter that this rank holds, empty while it is on NVMe.

    All shards have the same size. DeepSpeed never writes the padding at the end of the last ones, so it may be NaN.
    """
    shard = parameter.ds_tensor.detach().flatten()
    size = parameter.ds_tensor.ds_numel
    if shard.numel() != size:  # NVMe offload leaves a buffer of one element
        return shard[:0]
    start = dist.get_rank(parameter.ds_process_group) * size
    return shard[: max(0, parameter.ds_numel - start)]
