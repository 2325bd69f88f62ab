"""Endpoints for merging a run's adapter into its base model: start, stop, delete, download."""

from __future__ import annotations

from starlette.responses import Response

from backend.models import merge, trained
from backend.runs import jobs
from webui.api.jobs import find_job
from webui.api.model_zip import model_response
from webui.api.requests import ApiError, RequestBody, json
from webui.api.runs import PathRun


class MergeRequest(RequestBody):
    """The step of the adapter's checkpoint; None for the final model."""

    step: int | None = None


def start(run: PathRun, body: MergeRequest) -> Response:
    """Start a merge, or return the job that makes or has made the same one."""
    return json(merge.as_json(merge.start(run, body.step)), 201)


def download(run: PathRun, job: str) -> Response:
    """The merged model as a zip file. Raises ApiError."""
    model = trained.find(find_job(run, job, jobs.MERGE))
    if not model:
        raise ApiError(404, "This merge has no model.")
    return model_response(model, f"{run.id}-merged")
