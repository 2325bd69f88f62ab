"""The best checkpoint: which one it is, and where it is if this run resumes from another run.

trainer_state.json names it relative to the process (/proc/self/cwd), so that a run can be renamed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import TrainerState

from backend.train.checkpoints import step_of

OWN_FOLDER = "/proc/self/cwd/"


def note_best(state: TrainerState) -> None:
    """Before the checkpoint of this step is saved: note whether it or an earlier one is the best.

    transformers 5.23 (trainer.py, _save_checkpoint) takes the step with the lowest eval loss of all, and keeps the
    previous best checkpoint if that step has no checkpoint, because checkpoints are saved less often than evaluated.
    """
    losses = {point["step"]: point["eval_loss"] for point in state.log_history if "eval_loss" in point}
    best = step_of(Path(state.best_model_checkpoint)) if state.best_model_checkpoint else None
    lowest = math.inf if best is None else losses.get(best, math.inf)
    state.best_global_step = state.global_step if losses.get(state.global_step, math.nan) < lowest else best


def note_start(state: TrainerState, args: Any, start: Path) -> None:
    """After an evaluation of the checkpoint `start`, from which this run continues: note it if it is the best one."""
    note_best(state)
    if args.metric_for_best_model and state.best_global_step == state.global_step:
        own = Path(args.output_dir) / start.name
        state.best_model_checkpoint = str(own if own.is_dir() else start.resolve())


@contextmanager
def best_checkpoint_in(start: Path | None) -> Iterator[None]:
    """While the Trainer loads the state of the checkpoint `start`, the best one is in the run that `start` belongs
    to."""
    run = Path(start).resolve().parent.parent if start else Path.cwd()
    if run == Path.cwd().resolve():
        yield
        return
    original = TrainerState.load_from_json.__func__

    def load(kind: type[TrainerState], path: str) -> TrainerState:
        state = original(kind, path)
        best = state.best_model_checkpoint or ""
        if best.startswith(OWN_FOLDER):
            state.best_model_checkpoint = str(run / best.removeprefix(OWN_FOLDER))
        return state

    TrainerState.load_from_json = classmethod(load)
    try:
        yield
    finally:
        TrainerState.load_from_json = classmethod(original)
