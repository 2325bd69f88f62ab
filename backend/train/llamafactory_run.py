"""Trains with LLaMA-Factory, and reports to the run's folder what Footplate's own trainer reports.

A copy of this file is in the run's folder, next to one of rendezvous.py. A launcher starts it with the Python of
LLaMA-Factory's environment, so it imports nothing else of Footplate. It adds one callback to `run_exp`: metrics and
progress, stop requests that save a checkpoint, and marks of complete checkpoints. Argument: --from-scratch starts at
step 0.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from llamafactory.train.tuner import run_exp
from torch.distributed.elastic.multiprocessing.errors import record
from transformers import TrainerCallback

CONFIG, METRICS, PROGRESS, RESULT, STOP = "train.yaml", "metrics.jsonl", "progress.json", "result.json", "stop"
CHECKPOINTS, COMPLETE, MODEL, LOCK, EVENTS = "checkpoints", "complete", "model", "lock", "events.jsonl"
LOGGED = ("loss", "learning_rate", "grad_norm", "epoch", "eval_loss")
# What LLaMA-Factory writes next to the model.
NOT_MODEL = ("trainer_log.jsonl", "running_log.txt", "trainer_state.json", "training_args.bin")
DISCARD, SAVE = 1, 2  # stop requests
PROGRESS_SECONDS = 0.25
MAX_NONFINITE = 3  # as train.max_nonfinite_steps is by default
RANK = int(os.environ.get("RANK", "0"))


class Stopped(Exception):
    """The user stopped the run; nothing else is saved."""


class Diverged(Exception):
    """The loss is NaN or infinite, and training does not recover."""


Diverged.__module__ = "backend.train"  # as runs/failure.py knows errors of Footplate, which is not installed here


def steps_in_backward(args: Any, optimizer: Any) -> bool:
    """Whether this is LOMO, or layer-wise GaLore or APOLLO of llamafactory 0.9.5 (train/trainer_utils.py,
    DummyOptimizer). They free each gradient in the backward pass, so the Trainer logs a gradient norm of 0."""
    is_layerwise = hasattr(getattr(optimizer, "optimizer", optimizer), "optimizer_dict")  # accelerate wraps it
    return is_layerwise or getattr(args, "optim", "") in ("lomo", "adalomo")


class Report(TrainerCallback):
    """Writes what happens to the run's folder, and stops all ranks at the same step."""

    def __init__(self) -> None:
        self.began = time.time()
        self.first: dict[str, Any] = {}
        self.start_step, self.request, self.written, self.skipped = 0, 0, 0.0, 0
        self.phase, self.since, self.evaluated = "", 0.0, 0
        self.nonfinite = 0  # logged losses in a row
        self.evaluated_step = -1  # of the last evaluation in the metrics
        self.result: dict[str, Any] = {}

    def on_train_begin(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, lr_scheduler: Any = None, **_: Any
    ) -> None:
        """Note the step that this start continues from. The Trainer restores the learning rate and the logging, eval
        and save intervals of the checkpoint; use those of this run."""
        state.compute_steps(args, state.max_steps)
        if optimizer is not None and lr_scheduler is not None:
            use_own_rate(args, optimizer, lr_scheduler)
        note_best(args, state)
        self.start_step, self.began = state.global_step, time.time()  # loading model and data is no training
        if RANK == 0 and Path(METRICS).exists():
            append(METRICS, {"event": "resumed", "step": state.global_step, "time": time.time()})
        if RANK == 0 and (Path(METRICS).exists() or Path(EVENTS).exists()):
            text = f"Resumed after step {state.global_step}." if state.global_step else "Restarted at step 0."
            append(EVENTS, {"kind": "resumed", "step": state.global_step, "time": time.time(), "text": text})
        self.progress(state, "training", "Training.")

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        """Write progress, count a skipped step, and agree with the other ranks on a stop."""
        self.skipped += bool(getattr(optimizer, "step_was_skipped", False))
        if state.global_step == self.start_step + 1:
            self.first = {"first_step": state.global_step, "first_step_time": time.time()}
        self.progress(state, "training", f"Step {state.global_step} of {state.max_steps}")
        self.request = agreed(stop_request(), args.device)
        if self.request == DISCARD:
            raise Stopped
        if self.request == SAVE:
            control.should_save = control.should_training_stop = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log the last steps, also if their number is no multiple of the logging interval; the Trainer logs no step
        twice."""
        control.should_log = control.should_log or control.should_training_stop

    def on_prediction_step(self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **_: Any) -> None:
        """Write the progress of an evaluation."""
        self.evaluated += 1
        self.progress(state, "evaluating", f"Evaluating after step {state.global_step}", batch_count(eval_dataloader))

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The evaluation is complete."""
        self.evaluated = 0
        self.progress(state, "training", f"Step {state.global_step} of {state.max_steps}")

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, optimizer: Any = None, **_: Any
    ) -> None:
        """Append a point to the metrics. LLaMA-Factory evaluates once more after the training; that loss belongs to the
        saved model, which may be the best one, of an earlier step."""
        point = {key: value for key, value in (logs or {}).items() if key in LOGGED and isinstance(value, (int, float))}
        if steps_in_backward(args, optimizer):
            point.pop("grad_norm", None)
        point |= {"skipped_steps": self.skipped} if self.skipped and "loss" in point else {}
        if self.result and "eval_loss" in point:
            self.result["eval_loss"] = finite(point["eval_loss"])
            if self.result["model_step"] != state.global_step or self.evaluated_step == state.global_step:
                return
        if "eval_loss" in point:
            self.evaluated_step = state.global_step
        if RANK == 0 and ("loss" in point or "eval_loss" in point):
            append(METRICS, {"step": state.global_step, "time": time.time(), **point})
        if "loss" in point:
            self.nonfinite = 0 if math.isfinite(point["loss"]) else self.nonfinite + 1
        if self.nonfinite == MAX_NONFINITE:
            raise Diverged(
                f"Training diverged: the last {MAX_NONFINITE} logged losses, until step {state.global_step}, are NaN "
                "or infinite. Start a new run with a lower learning rate."
            )

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Mark a checkpoint as complete once all ranks have written their part."""
        note_best(args, state)
        if dist.is_initialized():
            dist.barrier()
        if RANK == 0:
            name = f"checkpoint-{state.global_step}"
            Path(args.output_dir, name, COMPLETE).write_text(json.dumps({"start": current_start()}), encoding="utf-8")
            event = {"kind": "saved", "step": state.global_step, "time": time.time(), "text": f"Saved {name}."}
            append(EVENTS, event)
        if self.request == SAVE:
            raise Stopped

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Collect what the result has; the process group is gone afterwards. Raise an error if nothing was trained."""
        steps = state.global_step - self.start_step
        if not self.request and 0 < steps <= self.skipped:
            raise RuntimeError(
                f"Nothing was trained: all {steps} optimizer steps of this start were skipped because gradients were "
                "NaN or infinite. In fp16, train for more steps, or use bf16."
            )
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
        peaks: list[Any] = [None] * (dist.get_world_size() if dist.is_initialized() else 1)
        if dist.is_initialized():
            dist.all_gather_object(peaks, peak)
        else:
            peaks = [peak]
        self.result = {"steps": state.global_step, "train_loss": mean_loss(state.log_history)}
        # Afterwards the Trainer loads the best checkpoint, if it is told to.
        best = state.best_model_checkpoint if args.load_best_model_at_end else None
        step = int(best.rpartition("-")[2]) if best else state.global_step
        points = [point for point in state.log_history if "eval_loss" in point and point["step"] == step]
        evals = [finite(point["eval_loss"]) for point in points]
        self.result |= {"eval_loss": evals[-1] if evals else None, "model_step": step, "peak_bytes": peaks}
        self.result |= {"seconds": round(time.time() - self.began, 2)}
        self.result |= {"skipped_steps": self.skipped} if self.skipped else {}
        self.progress(state, "saving", "Saving the model.")

    def progress(self, state: Any, phase: str, text: str, batches: int = 0) -> None:
        """Replace progress.json, at most four times a second within a phase; `batches` of an evaluation."""
        steps, now = {"step": state.global_step, "max_steps": state.max_steps}, time.time()
        if new := phase != self.phase:
            self.phase, self.since = phase, now
        is_last = state.global_step >= state.max_steps and phase == "training"
        if RANK or (not new and not is_last and now - self.written < PROGRESS_SECONDS):
            return
        parts = {"done": self.evaluated, "total": batches, "unit": "batch"} if batches else {}
        fraction = self.evaluated / batches if batches else state.global_step / max(1, state.max_steps)
        self.written = now
        found = {**steps, **self.first, **parts, "phase": phase, "text": text, "fraction": fraction}
        replace(PROGRESS, {**found, "since": self.since, "time": now})


def mean_loss(history: list[dict[str, Any]]) -> float | None:
    """The mean loss of all steps, None if it is not finite; each logged loss is the mean of the steps since the one
    before."""
    total, done = 0.0, 0
    for point in history:
        if "loss" in point:
            total, done = total + point["loss"] * (point["step"] - done), point["step"]
    return finite(total / done) if done else None


def use_own_rate(args: Any, optimizer: Any, scheduler: Any) -> None:
    """Multiply the learning rates that a checkpoint has restored, so that the first group has that of this run. LoRA+
    has other rates in the groups after it."""
    scheduler = getattr(scheduler, "scheduler", scheduler)
    peaks = getattr(scheduler, "base_lrs", None)
    if not peaks or not peaks[0] or peaks[0] == args.learning_rate:
        return
    factor = args.learning_rate / peaks[0]
    scheduler.base_lrs = [factor * peak for peak in peaks]
    scheduler._last_lr = [factor * rate for rate in scheduler.get_last_lr()]
    for group in optimizer.param_groups:
        group.update({name: factor * group[name] for name in ("lr", "initial_lr") if name in group})


def note_best(args: Any, state: Any) -> None:
    """The best checkpoint is the one with the lowest eval loss; if losses are equal, the earlier one. transformers 5.23
    looks for the lowest eval loss of all steps, and keeps the previous best checkpoint if that step has no
    checkpoint."""
    losses = {point["step"]: point["eval_loss"] for point in state.log_history if "eval_loss" in point}
    steps = [step for step, loss in losses.items() if math.isfinite(loss)]
    saved = [step for step in steps if Path(args.output_dir, f"checkpoint-{step}").is_dir()]
    if saved:
        state.best_model_checkpoint = f"{args.output_dir}/checkpoint-{min(saved, key=lambda step: losses[step])}"


def batch_count(loader: Any) -> int:
    """How many batches an evaluation has; 0 if that is unknown. torch 2.13: a DataLoader over an IterableDataset raises
    TypeError for len() and for bool()."""
    try:
        return len(loader)
    except TypeError:
        return 0


def stop_request() -> int:
    """What the stop file requests, on rank 0."""
    if RANK:
        return 0
    try:
        return DISCARD if "discard" in Path(STOP).read_text(encoding="utf-8", errors="replace") else SAVE
    except OSError:
        return 0


def agreed(request: int, device: Any) -> int:
    """The request of rank 0, on all ranks."""
    if not dist.is_initialized():
        return request
    flag = torch.tensor([request], device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return int(flag.item())


def append(name: str, point: dict[str, Any]) -> None:
    """Append a line to the metrics or the events; JSON has no NaN and no infinity."""
    clean = {key: finite(value) if isinstance(value, float) else value for key, value in point.items()}
    with contextlib.suppress(OSError), open(name, "a", encoding="utf-8") as file:  # a full disk
        file.write(json.dumps(clean) + "\n")


def finite(number: float) -> float | None:
    """The number; None for NaN and infinity."""
    return number if math.isfinite(number) else None


def replace(name: str, value: dict[str, Any]) -> None:
    """Replace a file of the run's folder."""
    new = Path(f".{name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        new.write_text(json.dumps(value), encoding="utf-8")
        new.replace(name)


def arguments(from_scratch: bool) -> dict[str, Any]:
    """The configuration, with the checkpoint to continue from."""
    found: dict[str, Any] = yaml.safe_load(Path(CONFIG).read_text(encoding="utf-8"))
    try:
        folders = list(Path(CHECKPOINTS).iterdir())
    except FileNotFoundError:
        folders = []
    folders = [path for path in folders if path.name.startswith("checkpoint-")]
    saved = [path for path in folders if os.path.isfile(path / COMPLETE)]
    saved = [path for path in saved if not from_scratch or is_of_this_start(path / COMPLETE)]
    if not saved and not from_scratch and (step := last_saved()):
        sys.exit(
            f"checkpoint-{step} is missing in {Path(CHECKPOINTS).resolve()} or cannot be read, although the run has "
            "saved it. Restore it, or restart from scratch."
        )
    if from_scratch and RANK == 0:
        for folder in {*folders} - {*saved}:
            shutil.rmtree(folder, ignore_errors=True)
    if saved:
        found["resume_from_checkpoint"] = str(max(saved, key=lambda path: int(path.name.rpartition("-")[2])))
    found["overwrite_output_dir"] = True  # LLaMA-Factory would continue from a checkpoint that is incomplete
    return found


def current_start() -> str:
    """The id of the run's last start; '' if it is not known."""
    try:
        return Path(LOCK).read_text(encoding="utf-8").partition("\n")[2].strip()
    except OSError:
        return ""


def is_of_this_start(mark: Path) -> bool:
    """Whether this start has completed a checkpoint, as in runs/resume_point.py: ranks that torchrun restarts belong to
    the same start, so they resume from what it has saved."""
    try:
        return bool(json.loads(mark.read_text(encoding="utf-8")).get("start") == (current_start() or "unknown"))
    except (OSError, ValueError, AttributeError):  # rank 0 has deleted the checkpoint, or an earlier version wrote it
        return False


def last_saved() -> int:
    """The step of the last checkpoint that was recorded as saved since the run last began at step 0; 0 for none."""
    steps: list[int] = []
    with contextlib.suppress(OSError), open(EVENTS, encoding="utf-8", errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                event = json.loads(line)
                kind, step = event["kind"], int(event["step"])
                if kind == "resumed":
                    steps = [earlier for earlier in steps if earlier <= step]
                if kind == "saved":
                    steps.append(step)
    return max(steps, default=0)


def move_model() -> None:
    """LLaMA-Factory saves the model next to the checkpoints."""
    Path(MODEL).mkdir(exist_ok=True)
    for path in Path(CHECKPOINTS).iterdir():
        if path.is_file() and path.name not in NOT_MODEL and not path.name.endswith("_results.json"):
            os.replace(path, Path(MODEL) / path.name)


def main() -> None:
    """Train."""
    # With several processes on a CPU, transformers 5.6 loads the optimizer state to cpu:0, which torch 2.13 does not
    # know (serialization.py, default_restore_location).
    torch.serialization.register_package(5, lambda _: None, lambda data, where: data if where == "cpu:0" else None)
    importlib.import_module("rendezvous").apply()
    report = Report()
    if RANK == 0:
        start = {"phase": "loading model", "text": "Starting LLaMA-Factory.", "fraction": None, "time": time.time()}
        replace(PROGRESS, start)
    try:
        run_exp(arguments("--from-scratch" in sys.argv), [report])
    except Stopped:
        print("Stopped.", flush=True)
        sys.stdout.flush()
        os._exit(0)  # threads of native libraries may abort the process while Python finalizes
    if RANK == 0:
        move_model()
        replace(RESULT, {**report.result, "model": MODEL})


if __name__ == "__main__":
    record(main)()
