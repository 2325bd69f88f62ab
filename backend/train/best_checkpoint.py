"""The best checkpoint of another run, from which this run resumes.

trainer_state.json names it relative to the process (/proc/self/cwd), so that a run can be renamed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import TrainerState

OWN_FOLDER = "/proc/self/cwd/"


@contextmanager
def best_checkpoint_in(start: Path | None) -> Iterator[None]:
    """While the Trainer loads the state of the checkpoint `start`, the best one is that of the run of `start`."""
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
