"""Endpoint for exporting a run's model as a quantized checkpoint."""

from __future__ import annotations

from starlette.responses import Response

from backend.models import quantized
from webui.api.requests import ApiError, RequestBody, json
from webui.api.runs import PathRun


class QuantizedRequest(RequestBody):
    """The step of the checkpoint, None for the final model; the format of the weights."""

    step: int | None = None
    format: str


def start(run: PathRun, body: QuantizedRequest) -> Response:
    """Start the export, or return the job that makes or has made the same one. Raises ApiError."""
    if body.format not in quantized.FORMATS:
        raise ApiError(422, f"The format {body.format} is not one of {', '.join(quantized.FORMATS)}.")
    return json(quantized.as_json(quantized.start(run, body.step, body.format)), 201)
