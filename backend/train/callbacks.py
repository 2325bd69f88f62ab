"""Trainer callbacks: metrics, progress and log lines; complete checkpoints; stopping on request."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import EarlyStoppingCallback, TrainerCallback, TrainerState

from backend.config import RunSpec
from backend.engines import engine_of
from backend.runs import validation
from backend.runs.health import LAST_LOSSES
from backend.runs.throughput import duration
from backend.train import checkpoints, disk_space, resumed_options
from backend.train.device import ProcessGroup
from backend.train.monitor import Monitor
from backend.train.run_log import RunLog
from backend.wording import counted

LOGGED = ("loss", "learning_rate", "grad_norm", "epoch", "skipped_steps", "eval_loss")
DATASET_LOSS = "eval_loss_"  # and the number of the dataset, from 1
# Metrics of preference trainers under one name each: TRL's reward trainer uses different names.
PREFERENCE_METRICS = {
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


MEASURE = 4  # what rank 0 adds to the number that the ranks agree on after a step; see RunLog.stop_requested


class StepTimer:
    """Seconds spent on training steps, without evaluations and checkpoints."""

    def __init__(self) -> None:
        self.busy, self._since, self._paused = 0.0, time.perf_counter(), True

    def begin_step(self) -> None:
        """Start a step. The time since the last step counts too, unless something else happened between them."""
        if self._paused:
            self._since, self._paused = time.perf_counter(), False

    def end_step(self) -> float:
        """End a step; returns its seconds."""
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        self.busy += seconds
        return seconds

    def since_step(self) -> float:
        """Seconds since the last step ended."""
        return time.perf_counter() - self._since

    def pause(self) -> None:
        """Do not count the time until the next step starts."""
        self._paused = True


class EarlyStopping(EarlyStoppingCallback):
    """The Trainer's early stopping, with a line in the run log. A resumed run continues the count."""

    def __init__(self, patience: int, threshold: float, run_log: RunLog) -> None:
        super().__init__(patience, threshold)
        self.run_log = run_log

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count the evaluations before the checkpoint that this start resumes from."""
        earlier = TrainerState()
        for value in (logs["eval_loss"] for logs in state.log_history if "eval_loss" in logs):
            self.check_metric_value(args, earlier, control, value)
            best = math.inf if earlier.best_metric is None else earlier.best_metric
            earlier.best_metric = value if value < best else best  # min would keep a loss that is NaN

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **more: Any) -> None:
        """Count evaluations without improvement."""
        super().on_evaluate(args, state, control, metrics, **more)
        continues = state.global_step < state.max_steps  # otherwise the training has ended anyway
        if continues and self.early_stopping_patience_counter >= self.early_stopping_patience:
            limit = state.best_metric - self.early_stopping_threshold
            evaluations = counted(self.early_stopping_patience_counter, "evaluation")
            self.run_log.info(
                f"Stopping early after step {state.global_step}: {evaluations} in a row "
                f"without an eval loss below {limit:.6g}."
            )


class ProgressCallback(TrainerCallback):
    """Writes what the Trainer does to the run log."""

    def __init__(self, run_log: RunLog, monitor: Monitor) -> None:
        self.run_log, self.monitor, self.clock = run_log, monitor, StepTimer()
        self.tokens, self._logged_tokens, self._logged_busy = 0, 0, 0.0
        self._start_step, self._first_seconds, self._eval_batches = 0, 0.0, 0
        self._evaluated: Any = None  # the batches that are evaluated
        self.began, self.earlier_tokens, self.earlier_seconds = time.time(), 0, 0.0  # the last two: of earlier starts
        self.router_loss_weight = 0.0  # weight of the auxiliary loss that is added to the loss of a mixture of experts

    def on_train_begin(self, args: Any, state: Any, control: Any, lr_scheduler: Any = None, **_: Any) -> None:
        """Log the number of steps, and the step that this start resumes from."""
        self._start_step, self.began = state.global_step, time.time()
        if state.max_steps == 1 and lr_scheduler and not any(lr_scheduler.get_last_lr()):  # packing: known only now
            self.run_log.info(
                "The learning rate of the only step is 0, because warmup starts at 0, so the model will not change. "
                "Set train.warmup_steps to 0, or train longer."
            )
        self.monitor.begin(args.device)
        more = f", resuming after step {state.global_step}" if state.global_step else ""
        coef = {"router_loss_weight": self.router_loss_weight} if self.router_loss_weight else {}
        if coef:
            self.run_log.info(validation.router_note(coef))
        text = f"Training for {counted(state.max_steps, 'step')}{more}."
        self.run_log.start_phase("training", text, **_steps(state), **coef)

    def resume(self, state: Any, tokens: int, seconds: float) -> None:
        """Continue from the `totals` of a checkpoint. One of an earlier version may have no tokens: then the
        largest count in the log history is used."""
        points = [entry["num_tokens"] for entry in state.log_history if "num_tokens" in entry]
        self.earlier_tokens, self.earlier_seconds = int(tokens or max(points, default=0)), seconds

    def totals(self, tokens: int) -> dict[str, Any]:
        """Tokens and seconds of training of all starts, of which this one has trained `tokens`."""
        return {
            "tokens": self.earlier_tokens + tokens,
            "seconds": round(self.earlier_seconds + time.time() - self.began, 2),
        }

    def mean_speed(self) -> dict[str, float]:
        """Tokens per second of the steps of this start, without evaluations and saving; empty without any."""
        busy = self._logged_busy
        return {"tokens_per_second": round(self._logged_tokens / busy, 1)} if busy and self._logged_tokens else {}

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Check how the losses of the whole training developed."""
        if self.run_log.rank == 0:
            self.monitor.end(state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the timer of a step."""
        self.clock.begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write progress after each optimizer step."""
        self.monitor.end_step(self.clock.end_step())
        more: dict[str, Any] = {}
        if state.global_step == self._start_step + 1:  # the slowest: kernels are selected, memory is allocated
            self._first_seconds = self.clock.busy
            more |= {"first_step": state.global_step, "first_step_time": time.time()}
        else:
            more |= {"step_seconds": round(self._step_seconds(state), 4)}
        show_step(self.run_log, state, evaluations_left=evaluations_left(args, state), **more)
        if state.global_step >= state.max_steps:
            control.should_log = True  # also if the number of steps is no multiple of logging.steps

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Write metrics and a log line."""
        logs = logs or {}
        point = {key: logs[key] for key in LOGGED if key in logs} | dataset_losses(logs) | preference_metrics(logs)
        if "eval_loss" in logs:  # early stopping may end the training before the next point with a loss
            self.tokens = int(logs.get("eval_num_tokens", self.tokens))
        if "loss" in logs:
            self.tokens = int(logs.get("num_tokens", 0))
            spent = self.clock.busy - self._logged_busy
            point["tokens_per_second"] = round((self.tokens - self._logged_tokens) / spent, 1) if spent > 0 else None
            point["tokens"] = self.earlier_tokens + self.tokens
            self._logged_tokens, self._logged_busy = self.tokens, self.clock.busy
        elif "eval_loss" not in logs:
            return  # the Trainer's summary at the end of training
        # Nothing is left to stop; a request would end the generations.
        is_last = state.global_step >= state.max_steps or control.should_training_stop
        if self.run_log.rank == 0:
            self.monitor.stops = self.monitor.stops and not is_last
            point |= self.monitor.add(point, state.global_step)
        self.run_log.metrics({"step": state.global_step, "time": time.time(), **point})
        self.run_log.info(self._line(state, point, is_last))
        if "eval_loss" in point and not is_last:
            self.run_log.compare_with_sweep(state.global_step)

    def on_prediction_step(self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **_: Any) -> None:
        """Write progress after each batch of an evaluation."""
        self.clock.pause()
        if eval_dataloader is not self._evaluated:  # an evaluation, or its next dataset, has begun
            self._eval_batches, self._evaluated = 0, eval_dataloader
        self._eval_batches += 1
        total = len(eval_dataloader) if eval_dataloader is not None else 0
        fraction = min(1.0, self._eval_batches / total) if total else 0.0
        show_evaluation(self.run_log, state, fraction, done=self._eval_batches, total=total, unit="batch")

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Pause the timer: the evaluation is complete. With several datasets, the last one ends it."""
        self._eval_batches = 0
        self.clock.pause()
        trained = state.global_step > self._start_step
        show_step(self.run_log, state, **({"evaluation_seconds": round(self.clock.since_step(), 2)} if trained else {}))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Pause the timer: a checkpoint was written."""
        self.clock.pause()

    def _line(self, state: Any, point: dict[str, Any], is_last: bool) -> str:
        width = len(str(state.max_steps))
        start = f"step {state.global_step:>{width}}/{state.max_steps}"
        if "eval_loss" in point:
            each = [
                f"dataset {name.removeprefix(DATASET_LOSS)}: {_number(loss)}"
                for name, loss in dataset_losses(point).items()
            ]
            of_each = f" ({', '.join(each)})" if each else ""
            loss = f"validation loss {_number(point['eval_loss'])}{of_each}"
            return "  ".join([start, loss, *_preference_words(point, "eval_")])
        words = [start, f"loss {_number(point['loss'])}", f"lr {point.get('learning_rate', 0):.2e}"]
        if "grad_norm" in point:
            words.append(f"grad norm {_number(point['grad_norm'])}")
        if skipped := point.get("skipped_steps"):
            words.append(f"{counted(skipped, 'step')} skipped")
        words += _preference_words(point)
        if point.get("tokens_per_second"):
            words.append(f"{point['tokens_per_second']:,.0f} tokens/s")
        if not is_last:
            words.append(f"{duration(self._left(state))} of training left")
        return "  ".join(words)

    def _left(self, state: Any) -> float:
        """Estimated seconds of the remaining steps, from the steps after the first."""
        return self._step_seconds(state) * int(state.max_steps - state.global_step)

    def _step_seconds(self, state: Any) -> float:
        """Mean seconds of the steps after the first."""
        done = state.global_step - self._start_step
        return float((self.clock.busy - self._first_seconds) / (done - 1) if done > 1 else self.clock.busy)


class CheckpointCallback(TrainerCallback):
    """Marks checkpoints as complete, deletes old ones, and ends the training when a stop is requested."""

    def __init__(
        self, spec: RunSpec, run: Path, group: ProcessGroup, run_log: RunLog, monitor: Monitor, examples: str = ""
    ) -> None:
        self.keep, self.keep_best = spec.save.total_limit, spec.save.keep_best
        self.run, self.group, self.run_log = run, group, run_log
        # retry.py continues from a checkpoint before a spike or a rise, which must still exist when this is reported
        # and the next checkpoint is saved.
        retries = spec.train.half_lr_retries or spec.train.stop_on_spike
        self.unusual_steps = LAST_LOSSES * spec.logging.steps + 1 if retries else 0
        self.monitor = monitor
        self.options = resumed_options.compared(spec, examples)
        self.spec = spec
        self.stopped = 0  # 1: stop without a checkpoint, 2: with one, as in RunLog.stop_requested

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Set the timeout of collectives, now that the engine has created its process groups."""
        self.group.limit_collectives()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Agree with all ranks on a stop after each step, so that all of them end at the same step."""
        asked = 0
        if self.group.rank == 0:
            asked = self.run_log.stop_requested() + (MEASURE if self.monitor.is_due() else 0)
        measures, requested = divmod(self.group.agree_on_step(asked), MEASURE)
        if measures:
            self.monitor.measure(state.global_step)
        if requested and state.global_step < state.max_steps:
            self.stopped = requested
            control.should_training_stop, control.should_evaluate = True, False
            control.should_save = requested == 2 and self._can_save(args)

    def _can_save(self, args: Any) -> bool:
        """Whether a checkpoint can be saved now: the run should be able to resume from it, so it gets the optimizer
        state if the engine can restore that."""
        engine = engine_of(self.spec.parallel.strategy)
        args.save_only_model = not engine.restores_optimizer(self.spec)
        if not args.save_only_model:
            return True
        why = f"{engine.strategy.label} cannot restore the optimizer state of this run"
        is_whole = engine.checkpoint_format(self.spec) != "sharded"  # sharded checkpoints need the optimizer state
        what = "The checkpoint has the weights only" if is_whole else "No checkpoint is saved for this stop"
        self.run_log.info(f"{what}: {why}.")
        return is_whole

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Skip evaluation and checkpoint where a stop ends the epoch early."""
        if self.stopped:
            control.should_evaluate = control.should_save = False

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Mark the checkpoint as complete once all ranks have written their part, and the points before it are on the
        disk too."""
        self.group.agree()
        saved = Path(args.output_dir) / f"checkpoint-{state.global_step}"

        def complete() -> None:
            self.run_log.flush()
            checkpoints.mark_complete(saved, self.options)

        disk_space.on_rank_0(self.group, lambda: disk_space.retry(self.run_log, saved.name, complete))
        if self.group.rank == 0:
            with contextlib.suppress(OSError):  # if the disk is read-only now, the next checkpoint tries again
                best = state.best_model_checkpoint if args.load_best_model_at_end else None  # set by every evaluation
                before = state.global_step - self.unusual_steps if self.unusual_steps else None
                checkpoints.rotate(self.run, self.keep, best, self.keep_best, state.log_history, before)
            self.run_log.info(f"Saved {saved.name}.")
            self.monitor.saved(saved, state.global_step)
        show_step(self.run_log, state)


def dataset_losses(logs: Mapping[str, Any]) -> dict[str, Any]:
    """The validation losses of single datasets in `logs`."""
    return {name: loss for name, loss in logs.items() if name.startswith(DATASET_LOSS)}


def preference_metrics(logs: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of preference training in `logs`, of training and evaluation, under the names above."""
    sides = (
        (f"{side}{library}", f"{side}{name}") for side in ("", "eval_") for library, name in PREFERENCE_METRICS.items()
    )
    return {name: logs[library] for library, name in sides if library in logs}


def _preference_words(point: Mapping[str, Any], side: str = "") -> list[str]:
    """For the log: the share of pairs whose chosen completion has the higher reward, and by how much."""
    share, margin = point.get(f"{side}reward_accuracy"), point.get(f"{side}reward_margin")
    words = [] if share is None else [f"reward accuracy {share:.0%}"]
    return words if margin is None else [*words, f"reward margin {_number(margin)}"]


def evaluations_left(args: Any, state: Any) -> int:
    """Evaluations after the current step, until the end of the training."""
    if args.eval_strategy == "steps" and state.eval_steps:
        return int(state.max_steps // state.eval_steps - state.global_step // state.eval_steps)
    ended = math.floor(state.epoch + 1e-6) if state.epoch else 0
    return max(0, int(state.num_train_epochs) - ended) if args.eval_strategy == "epoch" else 0


def show_step(run_log: RunLog, state: Any, **more: Any) -> None:
    """Write the last training step to progress.json."""
    text, fraction = f"Step {state.global_step} of {state.max_steps}", state.global_step / max(1, state.max_steps)
    run_log.progress("training", text, fraction, **_steps(state), **more)


def show_evaluation(run_log: RunLog, state: Any, fraction: float = 0.0, **more: Any) -> None:
    """Write to progress.json that the model is evaluated."""
    run_log.progress("evaluating", f"Evaluating after step {state.global_step}", fraction, **_steps(state), **more)


def show_checkpoint(run_log: RunLog, state: Any) -> None:
    """Write to progress.json that a checkpoint is saved."""
    run_log.progress("checkpoint", f"Saving checkpoint-{state.global_step}", **_steps(state))


def _steps(state: Any) -> dict[str, Any]:
    return {"step": state.global_step, "max_steps": state.max_steps}


def _number(value: Any) -> str:
    return f"{float(value):.4g}"
