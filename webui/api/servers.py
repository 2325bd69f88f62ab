"""Endpoints for serving a run's model with an OpenAI-compatible API: start, the API token."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from starlette.responses import Response

from backend.models import serve
from backend.runs import jobs
from webui.api.jobs import find_job
from webui.api.requests import RequestBody, json
from webui.api.runs import PathRun

Text = Annotated[str, Field(max_length=4000, pattern=r"^[^\x00]*$")]


class ServeRequest(RequestBody):
    """See backend.models.serve.Settings. The API token is random, or comes from Footplate's environment."""

    engine: Text = ""
    file: Text = ""
    format: Text = ""
    port: int = 0
    context: int = 0
    parallel: int = 0
    threads: int = 1
    step: int | None = None
    merged: bool = False
    dtype: Text = "auto"
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9


def start(run: PathRun, body: ServeRequest) -> Response:
    """Start to serve a model of the run."""
    return json(serve.as_json(serve.start(run, serve.Settings(**body.model_dump()), serve.own_token())), 201)


def token(run: PathRun, job: str) -> dict[str, str]:
    """The API token of a running server. Raises RunError once it has ended."""
    return {"token": serve.token_of(find_job(run, job, jobs.SERVE))}
