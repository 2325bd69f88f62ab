"""Requests and responses of the API: validated by pydantic models, answered as JSON, one sentence for every error.

Endpoints are plain functions, because they read files: FastAPI calls them in its thread pool.
"""

from __future__ import annotations

import asyncio
import errno
import secrets
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, nullcontext
from functools import wraps
from typing import Annotated, Any

import orjson
from fastapi import Depends
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from backend.config import RunSpec
from backend.config.data import MAX_SOURCES
from backend.config.options import MESSAGES, SpecError, with_integers
from backend.runs.files import IrregularFile
from backend.runs.folder import RunError, damage
from backend.runs.json_values import as_unicode
from webui.api.app_state import AppState
from webui.drafts import DraftError
from webui.uploads import UploadError


class ApiError(Exception):
    """An error response: its status, one sentence, and details for the page (`field`, `findings`)."""

    def __init__(self, status: int, sentence: str, **details: Any) -> None:
        super().__init__(sentence)
        self.status = status
        self.details = details


class RequestBody(BaseModel):
    """A JSON object. Types are strict: "yes" is not true. Unknown keys are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")


class FormRequest(RequestBody):
    """The form's values, and the machine they are checked for ('' is this machine)."""

    values: dict[str, Any]
    machine: str = ""


class DatasetRequest(FormRequest):
    """`dataset`: the number of a dataset, from 0."""

    dataset: Annotated[int, Field(ge=0, le=MAX_SOURCES)] = 0

    def dataset_of(self, spec: RunSpec) -> int:
        """The number of a dataset that `spec` has."""
        return min(self.dataset, len(spec.data.datasets) - 1)


async def _app_state(request: Request) -> AppState:
    state: AppState = request.app.state.footplate
    return state


CHECKING = ("/api/check", "/api/fix", "/api/import", "/api/export", "/api/sweeps/check")
BUSY_SECONDS = 30.0

State = Annotated[AppState, Depends(_app_state)]


def json(value: Any, status: int = 200) -> Response:
    """`value` as JSON. NaN and infinity become null."""
    try:
        text = orjson.dumps(value)
    except TypeError:  # an integer of more than 64 bits, such as the bytes of an absurd model; a lone surrogate
        text = orjson.dumps(as_unicode(_in_64_bits(value)))
    return Response(text, status, media_type="application/json", headers={"cache-control": "no-store"})


def _in_64_bits(value: Any) -> Any:
    if isinstance(value, int) and abs(value) >= 2**63:
        return float(min(value, 10**300)) if value > 0 else float(max(value, -(10**300)))
    if isinstance(value, Mapping):
        return {name: _in_64_bits(part) for name, part in value.items()}
    return [_in_64_bits(part) for part in value] if isinstance(value, list | tuple) else value


def no_content() -> Response:
    """204: nothing new since the last request."""
    return Response(status_code=204)


def json_endpoint(endpoint: Callable[..., Any]) -> Callable[..., Response]:
    """`endpoint` with its return value serialized by orjson: FastAPI's encoder takes 20 ms for 10,000 numbers."""

    @wraps(endpoint)
    def respond(*args: Any, **kwargs: Any) -> Response:
        value = endpoint(*args, **kwargs)
        return value if isinstance(value, Response) else json(value)

    return respond


class _JsonRequest(Request):
    """A request whose body is parsed by orjson: Python's own parser accepts NaN."""

    async def json(self) -> Any:
        return orjson.loads(await self.body())


class ApiRoute(APIRoute):
    """A route that accepts only JSON bodies and turns every error into a JSON response."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                if request.method == "POST":
                    _require_json(request)
                async with _turn(request) if self.path in CHECKING else nullcontext():
                    return await handler(_JsonRequest(request.scope, request.receive))
            except ClientDisconnect:
                return no_content()  # nobody reads the response
            except Exception as error:
                return error_response(error)

        return handle


@asynccontextmanager
async def _turn(request: Request) -> AsyncIterator[None]:
    """Make a request that checks a spec wait while too many others are being checked: slow checks must leave threads
    for other requests. Raises ApiError after BUSY_SECONDS."""
    state: AppState = request.app.state.footplate
    try:
        await asyncio.wait_for(state.checks.acquire(), BUSY_SECONDS)
    except TimeoutError:
        raise ApiError(503, "The server is busy with other checks. Try again in a minute.") from None
    try:
        yield
    finally:
        state.checks.release()


def _require_json(request: Request) -> None:
    """Require JSON: browsers send other content types across origins without a preflight request. Raises ApiError."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "The request body must be JSON, with the header content-type: application/json.")


def error_response(error: Exception) -> Response:
    """The response to an error: one sentence. A traceback goes to the server's terminal only."""
    match error:
        case ApiError():
            return json({"error": str(error), **error.details}, error.status)
        case RequestValidationError():
            return json(_invalid_request(error), 400)
        case HTTPException():
            return json({"error": f"{error.detail}."}, error.status_code)
        case SpecError():
            named = (f"{p.field}: {p.message}" if p.field else p.message for p in error.problems)
            return json({"error": "; ".join(named) + ".", "field": error.problems[0].field}, 422)
        case DraftError() | UploadError():
            return json({"error": str(error)}, 400)
        case RunError() | IrregularFile():
            return json({"error": damage(error) if isinstance(error, OSError) else str(error)}, 409)
        case OSError(errno=errno.ENOSPC):
            return json({"error": "The disk that stores the runs is full. Free some space, then try again."}, 507)
        case RecursionError():
            return json({"error": "A value or a file is nested too deeply."}, 422)
    error_id = secrets.token_hex(4)
    trace = "".join(traceback.format_exception(error))
    sys.stderr.write(f"Footplate, error {error_id}:\n{trace}\n")
    if isinstance(error, OSError) and error.strerror:
        return json({"error": f"{error.filename or 'A file'}: {error.strerror} (error {error_id})."}, 500)
    return json({"error": f"Internal error. The traceback is in the server's terminal, under {error_id}."}, 500)


PROBLEMS = {
    **MESSAGES,
    "missing": "is missing",
    "string_type": "must be a string",
    "string_pattern_mismatch": "has characters that are not allowed",
    "dict_type": "must be an object",
    "list_type": "must be a list",
    "int_parsing_size": "is too large",
    "less_than": "must be below {lt}",
    "literal_error": "must be {expected}",
    "too_short": "must not be empty",
    "too_long": "must have at most {max_length} entries",
    "string_too_long": "must have at most {max_length} characters",
}


def _invalid_request(error: RequestValidationError) -> dict[str, str]:
    """The first validation error, with the field that is wrong."""
    first = error.errors()[0]
    kind, field = first["type"], ".".join(str(part) for part in first["loc"][1:])
    if kind == "json_invalid":
        return {"error": f"The request body is not valid JSON: {first['ctx']['error']}."}
    if not field:
        return {"error": "The request body must be a JSON object."}
    limits = with_integers(first.get("ctx", {}))
    known = PROBLEMS[kind].format(**limits) if kind in PROBLEMS else first["msg"]
    problem = str(limits["error"]) if kind == "value_error" else known
    return {"error": f"{field} {problem}.", "field": field}
