"""Merging the adapter of a run into its base model: a job of the run, whose process is `backend.export`."""

from __future__ import annotations

from typing import Any

from backend.models import trained
from backend.models.exports import Exports
from backend.runs import jobs
from backend.runs.folder import ALIVE, Run, RunError


def start(run: Run, step: int | None) -> Run:
    """The job that merges, or has merged, the adapter of a checkpoint or of the final model (None); started if there is
    none. Raises RunError."""
    model = _find_adapter(run, step)
    return MERGES.start(run, {"step": step}, model, "Another adapter of this run is being merged")


def find_model(run: Run, step: int | None) -> trained.TrainedModel:
    """The model in the checkpoint of a `step`, or the final model (None). Raises RunError."""
    model = trained.at_step(run, step)
    if model is None:
        steps = ", ".join(str(other.step) for other in trained.models(run) if other.step is not None)
        sharded = "Its checkpoints, if there are any, are sharded by DeepSpeed or FSDP: let the run finish."
        others = f"Choose one of its checkpoints: {steps}." if steps else sharded
        raise RunError(f"{run.id} has no weights of {name(step)} that can be loaded. {others}")
    return model


def _find_adapter(run: Run, step: int | None) -> trained.TrainedModel:
    model = find_model(run, step)
    if not model.base:
        raise RunError(f"{_subject(step)} of {run.id} has full weights: there is no adapter to merge.")
    return model


def find_merged(run: Run, step: int | None) -> Run:
    """The job that has merged the adapter of a checkpoint or of the final model (None). Raises RunError."""
    job = find(run, _find_adapter(run, step))
    if job and job.result().get("model"):
        return job
    if job and job.state in ALIVE:
        raise RunError(f"{_subject(step)} of {run.id} is being merged ({job.id}). Try again when that has finished.")
    command = f"footplate merge {run.id}" + (f" --step {step}" if step is not None else "")
    raise RunError(
        f"{_subject(step)} of {run.id} is an adapter that is not merged into its base model. Merge it first: "
        f"`{command}`, or Merge into base model on the run's page."
    )


def _subject(step: int | None) -> str:
    return name(step)[0].upper() + name(step)[1:]


def name(step: int | None) -> str:
    """The model of a step, in a sentence."""
    return f"checkpoint {step}" if step is not None else "the final model"


MERGES = Exports(jobs.MERGE)
find = MERGES.find


def as_json(job: Run) -> dict[str, Any]:
    """For the page: the job, and the merged model once there is one."""
    model = trained.find(job) if job.result() else None
    return {**jobs.as_json(job), "model": model.as_json() if model else None}
