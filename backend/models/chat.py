"""The chat with the models of a run: what it offers, and the job that holds the models.

A run has at most one such job. After the job has ended, a new one continues the same conversation. The process of the
job is `backend/inference`; `chat_files.py` has the files that it exchanges with its clients.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend import registry
from backend.config import RunSpec
from backend.models import chat_files, system_prompt, trained
from backend.models.spec import read_spec
from backend.models.trained import TrainedModel
from backend.runs import MODEL, jobs
from backend.runs.folder import ALIVE, Run, RunError, StopTimeouts

IDLE_SECONDS = 300.0  # the process ends after this time without a client
# A generation ends within a token, and there is nothing to save.
TIMEOUTS = StopTimeouts(save=30.0, discard=15.0, sigterm=10.0)
CHAT, TEXT, SCORE = "chat", "text", "score"


@dataclass(frozen=True)
class Offer:
    """What a chat can do with a run's models. `mode`: they continue a conversation or a text, or score two completions;
    `steps`: the models (None: the final model); `without_base`: why there is no base model to compare with, as a
    sentence; `system` and `template_kwargs`: those of training, unless a request sets another system prompt; `history`:
    whether the model has learned from conversations of several turns."""

    mode: str
    steps: tuple[int | None, ...]
    without_base: str
    system: str
    template_kwargs: dict[str, Any]
    history: bool

    def as_json(self) -> dict[str, Any]:
        """For the page."""
        return {
            "mode": self.mode,
            "steps": list(self.steps),
            "without_base": self.without_base,
            "system": self.system,
            "template_kwargs": self.template_kwargs,
            "history": self.history,
        }


def offer(run: Run) -> Offer:
    """Raises RunError if no model of the run can be loaded here."""
    found = loadable(run)
    spec = read_spec(run)
    mode = mode_of(spec, found[0].folder)
    without = "A reward model has no base model to compare with: its base has no trained head." if mode == SCORE else ""
    system = system_prompt.of_training(spec) if mode != TEXT else ""
    steps = tuple(model.step for model in found)
    kwargs = dict(spec.data.template_kwargs) if mode != TEXT else {}
    return Offer(mode, steps, without, system, kwargs, mode == CHAT and system_prompt.has_earlier_turns(spec))


def loadable(run: Run) -> list[TrainedModel]:
    """The models of the run, the final one first, then the newest checkpoint. Raises RunError if there is none."""
    if found := trained.models(run):
        return found
    raise RunError(
        "This run has no model to load: no final model was saved, and its checkpoints are sharded or missing. If "
        f"the run saved its model on another machine, copy it to {run.path / MODEL}."
    )


def mode_of(spec: RunSpec, folder: Path) -> str:
    """How the model in `folder` is used: as it was trained."""
    if registry.STAGES[spec.train.stage].is_reward_model:
        return SCORE
    return CHAT if trained.has_template(folder) and not trained.continues_text(spec) else TEXT


def current(run: Run) -> Run | None:
    """The job of the run's chat, whatever its state is; None if it was never started."""
    return next(iter(jobs.find_all(run, jobs.CHAT)), None)


def start(run: Run, idle_seconds: float = IDLE_SECONDS) -> Run:
    """The chat of the run, started unless it is alive. Raises RunError."""
    offer(run)
    with jobs.alone(run):
        job = current(run)
        if job and job.state in ALIVE:
            return job
        job = _created(run, job, idle_seconds)
        job.start(timeouts=TIMEOUTS)
        return job


def _created(run: Run, earlier: Run | None, idle_seconds: float) -> Run:
    """A new job with the conversation of the earlier job, which is deleted. An ended job is not restarted itself,
    because the run may have been moved, or Footplate updated."""
    kept = chat_files.conversation(earlier.path) if earlier else {}
    env, devices = jobs.place(run, is_light=True)
    job = jobs.create(run, jobs.CHAT, {"idle_seconds": idle_seconds}, env, devices, kept)
    if earlier and earlier.path != job.path and earlier.path.is_dir():  # a job without a result is deleted already
        earlier.delete()
    return job
