"""Endpoints of serving a run's model with an OpenAI-compatible API: start, stop, delete, the API token."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from starlette.responses import Response

from backend.models import serve
from backend.runs import jobs
from webui.api.jobs import find_job
from webui.api.requests import RequestBody, json
from webui.api.runs import PathRun

Text = Annotated[str, Field(max_length=4000, pattern=r"^[^\x00]*$")]


class ServeRequest(RequestBody):
    """See backend.models.serve.Settings. The API token is random, or that of the environment of Footplate."""

    file: Text = ""
    format: Text = ""
    port: int = 0
    context: int = 0
    parallel: int = 1
    threads: int = 1


def start(run: PathRun, body: ServeRequest) -> Response:
    """Start to serve a GGUF file of the run."""
    return json(serve.as_json(serve.start(run, serve.Settings(**body.model_dump()), serve.own_token())), 201)


def stop(run: PathRun, job: str) -> dict[str, Any]:
    """Request a stop."""
    found = find_job(run, job, jobs.SERVE)
    found.stop(save=False)
    return serve.as_json(found)


def remove(run: PathRun, job: str) -> dict[str, Any]:
    """Delete a server that has ended."""
    find_job(run, job, jobs.SERVE).delete()
    return {"id": job}


def token(run: PathRun, job: str) -> dict[str, str]:
    """The API token of a running server. Raises RunError once it has ended."""
    return {"token": serve.token_of(find_job(run, job, jobs.SERVE))}
