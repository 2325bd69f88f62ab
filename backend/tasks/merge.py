"""Merging the adapter of a run into its base model: a job of the run, whose process is `backend.export`."""

from __future__ import annotations

import json

from backend.models import trained
from backend.runs import MERGE, jobs
from backend.runs.folder import Run, RunError

KIND = "merge"
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # memory decides, and trainings need the GPUs


def start(run: Run, step: int | None) -> Run:
    """Start merging the adapter of a checkpoint, or of the final model (None). Raises RunError."""
    which = f"checkpoint {step}" if step is not None else "the final model"
    found = trained.at_step(run, step)
    if found is None:
        steps = ", ".join(str(model.step) for model in trained.models(run) if model.step is not None)
        raise RunError(
            f"{run.id} has no weights of {which} that can be loaded. "
            + (
                f"It has those of the checkpoints {steps}."
                if steps
                else "Checkpoints of DeepSpeed and FSDP are sharded."
            )
        )
    if not found.base:
        raise RunError(f"{which[0].upper()}{which[1:]} of {run.id} has full weights: there is no adapter to merge.")
    if busy := [job for job in jobs.alive(run) if job.about().get("kind") == KIND]:
        raise RunError(f"An adapter of this run is being merged ({busy[0].id}). Wait for its end, or stop it.")
    job = jobs.create(run, KIND, "backend.export", {MERGE: json.dumps({"step": step})}, ON_CPU, {})
    job.start()
    return job
