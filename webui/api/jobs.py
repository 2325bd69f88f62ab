"""The jobs of a run in requests and responses."""

from __future__ import annotations

from typing import Any

from backend.runs import jobs
from backend.runs.folder import Run, RunError
from webui.api.app_state import AppState
from webui.api.requests import ApiError
from webui.api.runs_list import with_names


def find_job(run: Run, job: str, kind: str) -> Run:
    """The job of a run with this id and kind. Raises ApiError."""
    try:
        found = jobs.find(run, job)
    except RunError as error:
        raise ApiError(404, str(error)) from None
    if found.about().get("kind") != kind:
        raise ApiError(404, f"The job {job} is not of the kind {kind}.")
    return found


def with_run_names(state: AppState, job: dict[str, Any]) -> dict[str, Any]:
    """A job as it is shown, with the names of the runs that it waits for instead of their ids."""
    return {**job, "sentence": with_names(state, job["sentence"])} if job["state"] == "queued" else job
