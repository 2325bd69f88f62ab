"""Endpoints for exporting a run's model as a GGUF file: start, stop, delete, download."""

from __future__ import annotations

from starlette.responses import FileResponse, Response

from backend.models import gguf
from backend.models.gguf import DEFAULT
from backend.runs import jobs
from webui.api.jobs import find_job
from webui.api.requests import ApiError, RequestBody, json
from webui.api.runs import PathRun


class GgufRequest(RequestBody):
    """The step of the checkpoint, None for the final model; the format of the weights."""

    step: int | None = None
    format: str = DEFAULT


def start(run: PathRun, body: GgufRequest) -> Response:
    """Start an export, or return the job that makes or has made the same one."""
    return json(gguf.as_json(gguf.start(run, body.step, body.format)), 201)


def download(run: PathRun, job: str, name: str) -> Response:
    """The GGUF file, its certificate or its Modelfile. Raises ApiError."""
    file = gguf.file_of(find_job(run, job, jobs.GGUF))
    if not file or name not in gguf.names(file):
        raise ApiError(404, "This export has no such file.")
    if (file.parent / name).is_symlink():
        raise ApiError(409, f"{file.parent / name} is a symbolic link: replace it with the file to download it.")
    return FileResponse(file.parent / name, media_type="application/octet-stream", filename=name)
