"""Seconds of a whole run: start, steps, evaluations and checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from backend.inspect import InputFacts
from backend.memory.disk import checkpoint_bytes, final_model_bytes
from backend.memory.steps import run_steps
from backend.runs.resume_point import step_of
from backend.timing.batch import expected_batch
from backend.timing.computing import Part, estimates_kl, forward_seconds, reference_passes
from backend.timing.context import TimeContext
from backend.timing.rates import DISK_RATE

STEPS, TOKENIZING = "Steps", "tokenizing the data"
COMPILING = "compiling, which takes minutes in the first step"
START, PRECOMPUTATION = "Start and loading", "Reference log-probabilities"
# The uncertainty factor of everything but steps: loading, evaluations and checkpoints were never compared with
# measurements.
REST = 3.0
START_SECONDS = 30  # imports, process groups, and the inspection of files, if no earlier run has measured it


@dataclass(frozen=True)
class RunTime:
    """The items of a run, which add up to it, its optimizer steps, and what is not included. `start_seconds`: from the
    start to the first step without loading the weights, and the number of earlier runs that it was measured in."""

    items: tuple[Part, ...]
    steps: int
    not_included: tuple[str, ...]
    start_seconds: float = START_SECONDS
    start_runs: int = 0

    @property
    def seconds(self) -> float:
        """Seconds from the start to the end."""
        return sum(item.seconds for item in self.items)

    @property
    def step_seconds(self) -> float:
        """Seconds of all optimizer steps."""
        return sum(item.seconds for item in self.items if item.label == STEPS)

    @property
    def assumed_seconds(self) -> float:
        """Seconds that were not compared with measurements: all but the steps and a start that was measured."""
        return self.seconds - self.step_seconds - (self.start_seconds if self.start_runs else 0)

    def with_start(self, seconds: float, runs: int) -> RunTime:
        """The same with a start that took `seconds` in that many earlier runs on this machine."""
        start, *others = self.items
        loading = start.formula.partition(", and ")[2]
        source = f"median of {runs} earlier runs" if runs > 1 else "measured in an earlier run"
        measured = f"{seconds:.0f} s ({source}, including preparing the data), and {loading}"
        item = Part(START, start.seconds - self.start_seconds + seconds, measured)
        left = tuple(missing for missing in self.not_included if missing not in (TOKENIZING, COMPILING))
        return replace(self, items=(item, *others), not_included=left, start_seconds=seconds, start_runs=runs)


def run_time(ctx: TimeContext, facts: InputFacts, step_seconds: float) -> RunTime | None:
    """The time of all steps of `step_seconds` and of everything else that a run does; None if the number of steps is
    unknown."""
    whole = run_steps(ctx.memory.spec, ctx.memory.run, facts.used_lengths)
    if whole is None:
        return None
    steps = max(0, whole - _trained(ctx, facts, whole))
    items = [
        _start(ctx),
        _precomputation(ctx),
        Part(STEPS, steps * step_seconds, f"{steps:,} steps x {step_seconds:.3g} s"),
        _evaluations(ctx, facts, steps, whole),
        _checkpoints(ctx, steps, whole),
    ]
    spec, missing = ctx.memory.spec, []
    if not facts.is_downloaded:
        missing.append("downloads")
    if spec.eval.num_generations:
        missing.append("generated outputs of evaluations")
    if spec.train.torch_compile:
        missing.append(COMPILING)
    if spec.preference.precompute_ref_log_probs and ctx.memory.stage.uses_reference_model:
        missing += [] if ctx.memory.run.num_train_examples else ["precomputed log-probabilities of the reference model"]
    missing.append(TOKENIZING)
    return RunTime(tuple(item for item in items if item.seconds > 0), steps, tuple(missing))


def _trained(ctx: TimeContext, facts: InputFacts, steps: int) -> int:
    """How many of the steps of the whole run the checkpoint of save.resume_path has behind it."""
    spec = ctx.memory.spec
    if spec.save.resume_from != "path":
        return 0
    if facts.checkpoint_epoch and spec.train.duration == "epochs":
        return round(steps * facts.checkpoint_epoch / spec.train.num_train_epochs)
    return max(0, step_of(Path(spec.save.resume_path)))


def _start(ctx: TimeContext) -> Part:
    size = ctx.memory.shape.parameters * 2
    least, most = START_SECONDS / REST, START_SECONDS * REST
    formula = f"{START_SECONDS} s (assumed, {least:g} s to {most:g} s), and {size:,} bytes of weights at {_disk(ctx)}"
    return Part(START, START_SECONDS + size / _disk_rate(ctx), formula)


def _precomputation(ctx: TimeContext) -> Part:
    """The forward passes of the reference model over all examples, before the first step."""
    memory, spec = ctx.memory, ctx.memory.spec
    if not memory.stage.uses_reference_model or not spec.preference.precompute_ref_log_probs:
        return Part("", 0, "")
    evaluated = 0 if spec.eval.strategy == "no" else memory.run.num_eval_examples or 0
    examples, passes = (memory.run.num_train_examples or 0) + evaluated, 1 + estimates_kl(ctx)
    seconds = passes * examples * _forward_seconds(ctx) / memory.run.data_parallel_size
    return Part(PRECOMPUTATION, seconds, f"{passes} x forward passes over {examples:,} examples")


def _evaluations(ctx: TimeContext, facts: InputFacts, steps: int, whole: int) -> Part:
    """Forward passes over the validation set, which is not packed."""
    memory, spec = ctx.memory, ctx.memory.spec
    examples = memory.run.num_eval_examples or 0
    count = _count(ctx, steps, whole, spec.eval.strategy, spec.eval.steps) * (1 + reference_passes(ctx))
    if spec.data.packing:
        ctx = replace(ctx, batch=expected_batch(memory, facts.used_lengths, is_packed=False))
    seconds = count * examples * _forward_seconds(ctx) / memory.run.data_parallel_size
    return Part("Evaluations", seconds, f"{count} x forward passes over {examples:,} examples")


def _forward_seconds(ctx: TimeContext) -> float:
    """A forward pass of one example, without gradients."""
    return forward_seconds(ctx) / ctx.memory.batch_size


def _checkpoints(ctx: TimeContext, steps: int, whole: int) -> Part:
    save, each = ctx.memory.spec.save, sum(checkpoint_bytes(ctx.memory))
    count = _count(ctx, steps, whole, save.strategy, save.steps)
    size = count * each + (final_model_bytes(ctx.memory) if save.final_model else 0)
    formula = f"{count} x {each:,} bytes, and the final model, at {_disk(ctx)}"
    return Part("Checkpoints and final model", size / _disk_rate(ctx), formula)


def _count(ctx: TimeContext, steps: int, whole: int, strategy: str, interval: int) -> int:
    """How often something happens in the last `steps` steps, of `whole` ones of the run, that is done each epoch or
    every `interval` steps. The Trainer also does it at the end, after a part of an epoch or interval (transformers 5.23
    trainer_callback.py, DefaultFlowCallback)."""
    train, each, done = ctx.memory.spec.train, ctx.memory.run.steps_per_epoch, whole - steps
    if strategy == "no" or not steps:
        return 0
    if strategy == "epoch" and train.duration == "epochs":
        return math.ceil(train.num_train_epochs) - math.floor(train.num_train_epochs * done / whole)
    size = interval if strategy == "steps" else each
    return math.ceil(whole / size) - done // size if size else 1


def _disk_rate(ctx: TimeContext) -> int:
    return ctx.memory.machine.disk_rate or DISK_RATE


def _disk(ctx: TimeContext) -> str:
    assumed = "" if ctx.memory.machine.disk_rate else " (assumed)"
    return f"{_disk_rate(ctx) / 1e9:g} GB/s{assumed}"
