"""What a training does differently while it rehearses: two steps on the longest examples, a crash, and a record of its
phases.

FOOTPLATE_REHEARSAL in the environment switches it on: it is no option of a spec, because the rest of a rehearsal is an
ordinary run of a spec with two steps (backend/tasks/rehearsal.py).
"""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

from transformers import TrainerCallback

from backend.config import RunSpec
from backend.resolve import ResolvedRun
from backend.runs import LOCK, REHEARSAL, REHEARSED, files
from backend.train import device
from backend.train.context import TrainContext

STEPS = 2
SEQUENCES_PER_PACK = 4  # examples to read for each packed sequence: the longest ones leave little room for others
RECORDED_BY_CALLBACK = ("training", "evaluating", "checkpoint")  # phases of the run log that are recorded below


def is_rehearsal() -> bool:
    """Whether this process rehearses."""
    return bool(os.environ.get(REHEARSAL))


def dataset_sizes(run: ResolvedRun, spec: RunSpec) -> tuple[int, int] | None:
    """How many of the longest training and validation examples to use; None: all, as outside of a rehearsal."""
    if not is_rehearsal():
        return None
    train = STEPS * run.global_batch_size * (SEQUENCES_PER_PACK if spec.data.packing else 1)
    evaluated = run.data_parallel_size * spec.eval.per_device_eval_batch_size
    return train, max(evaluated, spec.eval.num_generations)


def trainer_arguments() -> dict[str, Any]:
    """The TrainingArguments that keep the longest examples first."""
    return {"train_sampling_strategy": "sequential"} if is_rehearsal() else {}


def callbacks(context: TrainContext) -> list[TrainerCallback]:
    """The callback that records the phases of a rehearsal; it must come last, after the one that completes
    checkpoints."""
    return [RehearsalCallback(context)] if is_rehearsal() else []


class RehearsalCallback(TrainerCallback):
    """Records each phase on rank 0, and kills rank 0 once the checkpoint of the first step is complete."""

    def __init__(self, context: TrainContext) -> None:
        self.context, self.since = context, (context.folder / LOCK).stat().st_mtime  # the start of the run
        context.run_log.end_phase = self._end_phase
        self.record("starting")

    def _end_phase(self, phase: str) -> None:
        if phase not in RECORDED_BY_CALLBACK:
            self.record(phase)

    def record(self, phase: str) -> None:
        """Append a phase that has ended, with its time and the peak memory of this process so far."""
        if self.context.group.rank:
            return
        device.synchronize(self.context.run.device)
        now, peak = time.time(), device.peak_bytes(self.context.run.device)
        line = {"phase": phase, "seconds": round(now - self.since, 3), "time": now, "peak_bytes": peak}
        with files.open_to_append(self.context.folder / REHEARSED) as file:
            file.write(json.dumps(line).encode() + b"\n")
        self.since = time.time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """An optimizer step has ended."""
        self.record(f"step {state.global_step}")

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """An evaluation has ended."""
        self.record("evaluating")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A checkpoint is complete. After the first one rank 0 kills itself, as the kernel's OOM killer would."""
        self.record("checkpoint")
        if state.global_step == 1 and self.context.group.rank == 0 and not args.save_only_model:
            self.record("killed")
            os.kill(os.getpid(), signal.SIGKILL)
