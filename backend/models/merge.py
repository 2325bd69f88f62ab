"""Merging the adapter of a run into its base model: a job of the run, whose process is `backend.export`."""

from __future__ import annotations

from typing import Any

from backend.models import trained
from backend.runs import MODEL, jobs
from backend.runs.folder import ALIVE, Run, RunError

ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # memory decides, and trainings need the GPUs


def start(run: Run, step: int | None) -> Run:
    """The job that merges, or has merged, the adapter of a checkpoint or of the final model (None); started if there is
    none. Raises RunError."""
    model = _find_adapter(run, step)
    with jobs.alone(run):
        if (job := find(run, model)) and (job.state in ALIVE or job.result()):
            return job
        jobs.require_ended(run, jobs.MERGE, "Another adapter of this run is being merged")
        for earlier in jobs.find_all(run, jobs.MERGE):
            if _step(earlier) == step:  # failed, or of an adapter that was replaced
                earlier.delete()
        job = jobs.create(run, jobs.MERGE, {"step": step}, ON_CPU, {})
        job.start()
        return job


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


def find(run: Run, model: trained.TrainedModel) -> Run | None:
    """The newest job for this adapter, unless it merged an earlier adapter of this step, or its model was deleted."""
    for job in jobs.find_all(run, jobs.MERGE):
        if _step(job) == model.step and (job.state in ALIVE or _is_current(job, model)):
            return job
    return None


def _is_current(job: Run, model: trained.TrainedModel) -> bool:
    is_newer = jobs.is_newer(job, jobs.MERGE, model.folder)
    return is_newer and (not job.result() or (job.path / MODEL).is_dir())


def _step(job: Run) -> Any:
    """That of the adapter; -1 if it is unknown."""
    return jobs.request(job.path, jobs.MERGE).get("step", -1)


def as_json(job: Run) -> dict[str, Any]:
    """For the page: the job, and the merged model once there is one."""
    model = trained.find(job) if job.result() else None
    return {**jobs.as_json(job), "model": model.as_json() if model else None}
