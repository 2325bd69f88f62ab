"""What happens on the way: points, progress and log lines; complete checkpoints; the agreed stop.

Beside the floors. Imports spec, checkpoints, device, journal.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from backend.config import RunSpec
from backend.train import checkpoints
from backend.train.device import ProcessGroup
from backend.train.run_log import RunLog

SHOWN = ("loss", "learning_rate", "grad_norm", "epoch", "eval_loss")
# What trainers that compare answers tell, under one name each: TRL's reward trainer has names of its own.
COMPARED = {
    "rewards/chosen": "reward_chosen",
    "rewards/rejected": "reward_rejected",
    "rewards/margins": "reward_margin",
    "rewards/accuracies": "reward_accuracy",
    "margin": "reward_margin",
    "accuracy": "reward_accuracy",
    "mean_reward": "reward_mean",
    "logps/chosen": "logp_chosen",
    "logps/rejected": "logp_rejected",
    "kl": "kl",
}


class StepTimer:
    """Seconds spent on steps, evaluations and savings left out."""

    def __init__(self) -> None:
        self.busy, self._since, self._paused = 0.0, time.perf_counter(), True

    def begin_step(self) -> None:
        """A step begins: time since the last one counts too, unless something else lay between."""
        if self._paused:
            self._since, self._paused = time.perf_counter(), False

    def end_step(self) -> None:
        """A step is done."""
        now = time.perf_counter()
        self.busy, self._since = self.busy + now - self._since, now

    def pause(self) -> None:
        """Something else than a step was done."""
        self._paused = True


class ProgressCallback(TrainerCallback):
    """Tells rank 0's journal what the Trainer does."""

    def __init__(self, journal: RunLog) -> None:
        self.journal, self.clock = journal, StepTimer()
        self.tokens, self._told, self._told_busy = 0, 0, 0.0
        self._first, self._first_seconds, self._predicted = 0, 0.0, 0
        self.began = time.time()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The plan is known: how many steps, and where this start begins."""
        self._first, self.began = state.global_step, time.time()
        more = f" from step {state.global_step} on" if state.global_step else ""
        self.journal.begin("training", f"Training {state.max_steps} steps{more}.", **_steps(state))

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A step's first batch is at hand."""
        self.clock.begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Progress after each optimizer step."""
        self.clock.end_step()
        more = _steps(state)
        if state.global_step == self._first + 1:  # the slowest one: kernels are chosen, pages are touched
            self._first_seconds = self.clock.busy
            more |= {"first_step": state.global_step, "first_step_time": time.time()}
        text, fraction = f"Step {state.global_step} of {state.max_steps}", state.global_step / state.max_steps
        self.journal.phase("training", text, fraction, **more)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """A point of the curves, and a line of the log."""
        logs = logs or {}
        point = {key: logs[key] for key in SHOWN if key in logs} | compared(logs)
        if "loss" in logs:
            self.tokens = int(logs.get("num_tokens", 0))
            spent = self.clock.busy - self._told_busy
            point["tokens_per_second"] = round((self.tokens - self._told) / spent, 1) if spent > 0 else None
            self._told, self._told_busy = self.tokens, self.clock.busy
        elif "eval_loss" not in logs:
            return  # the Trainer's summary at the end
        self.journal.point({"step": state.global_step, "time": time.time(), **point})
        self.journal.say(self._line(state, point))

    def on_prediction_step(self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **_: Any) -> None:
        """A batch of the evaluation is done."""
        self.clock.pause()
        self._predicted += 1
        of = len(eval_dataloader) if eval_dataloader is not None else 0
        fraction = min(1.0, self._predicted / of) if of else None
        self.journal.phase("evaluating", "Evaluating.", fraction, **_steps(state))

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The evaluation is done."""
        self._predicted = 0
        self.clock.pause()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A checkpoint is written."""
        self.clock.pause()

    def _line(self, state: Any, point: dict[str, Any]) -> str:
        width = len(str(state.max_steps))
        start = f"step {state.global_step:>{width}}/{state.max_steps}"
        if "eval_loss" in point:
            return "  ".join([start, f"validation loss {_number(point['eval_loss'])}", *_better(point, "eval_")])
        words = [start, f"loss {_number(point['loss'])}", f"lr {point.get('learning_rate', 0):.2e}"]
        if "grad_norm" in point:
            words.append(f"grad {_number(point['grad_norm'])}")
        words += _better(point)
        if point.get("tokens_per_second"):
            words.append(f"{point['tokens_per_second']:,.0f} tokens/s")
        return "  ".join([*words, f"{duration(self._left(state))} left"])

    def _left(self, state: Any) -> float:
        """Seconds that the remaining steps will take, at the pace of those after the first."""
        done = state.global_step - self._first
        pace = (self.clock.busy - self._first_seconds) / (done - 1) if done > 1 else self.clock.busy
        return float(pace * (state.max_steps - state.global_step))


class CheckpointCallback(TrainerCallback):
    """Marks checkpoints complete, deletes old ones, and ends the training when a stop is asked for."""

    def __init__(self, spec: RunSpec, run: Path, team: ProcessGroup, journal: RunLog) -> None:
        self.keep, self.run, self.team, self.journal = spec.save.total_limit, run, team, journal
        self.stopped = 0  # 1 without, 2 with a checkpoint, as Journal.stop_asked

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """All ranks look at the same step, so all of them end at the same step."""
        asked = self.team.agree(self.journal.stop_asked() if self.team.rank == 0 else 0)
        if asked and state.global_step < state.max_steps:
            self.stopped = asked
            args.save_only_model = False  # a stop that saves is meant to be resumed
            control.should_training_stop, control.should_evaluate = True, False
            control.should_save = asked == 2

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A stop within an epoch is not the end of the epoch."""
        if self.stopped:
            control.should_evaluate = control.should_save = False

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """All ranks have written their part: the checkpoint is complete."""
        self.team.agree()
        if self.team.rank == 0:
            checkpoints.mark(Path(args.output_dir) / f"checkpoint-{state.global_step}")
            checkpoints.rotate(self.run, self.keep, state.best_model_checkpoint)
            self.journal.say(f"Checkpoint of step {state.global_step} is complete.")


def compared(logs: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of compared answers among `logs`, of training and evaluation, under our names."""
    sides = ((f"{side}{theirs}", f"{side}{ours}") for side in ("", "eval_") for theirs, ours in COMPARED.items())
    return {ours: logs[theirs] for theirs, ours in sides if theirs in logs}


def _better(point: Mapping[str, Any], side: str = "") -> list[str]:
    """How often, and by how much, the better answer is ahead."""
    share, margin = point.get(f"{side}reward_accuracy"), point.get(f"{side}reward_margin")
    words = [] if share is None else [f"{share:.0%} right"]
    return words if margin is None else [*words, f"margin {_number(margin)}"]


def duration(seconds: float) -> str:
    """1:05, or 2:03:04."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _steps(state: Any) -> dict[str, Any]:
    return {"step": state.global_step, "max_steps": state.max_steps}


def _number(value: Any) -> str:
    return f"{float(value):.4g}"
