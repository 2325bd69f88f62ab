"""How every route is asked and answers: JSON in, JSON out, and a sentence for whatever goes wrong.

Floor 6. Imports: options (SpecError), run.folder (RunError), guard (refusal). Handlers are plain functions on the
desk and run in a thread, for they read files.
"""

from __future__ import annotations

import errno
import secrets
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from backend.config.options import SpecError
from backend.runs.folder import RunError
from webui.api.app_state import Desk
from webui.drafts import DraftError


class Refusal(Exception):
    """An answer with an error: the status, the sentence, and what else the page needs (`field`, `findings`)."""

    def __init__(self, status: int, sentence: str, **more: Any) -> None:
        super().__init__(sentence)
        self.status = status
        self.more = more


@dataclass(frozen=True)
class Ask:
    """What a request says. `body` is {} where none is sent."""

    path: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=dict)

    def whole(self, name: str, default: int) -> int:
        """A whole number of the query. Raises Refusal."""
        text = self.query.get(name, "")
        if not text:
            return default
        try:
            return int(text[:20])
        except ValueError:
            raise Refusal(400, f"{name} must be a whole number.", field=name) from None

    def number(self, name: str) -> float | None:
        """A number of the query, None without it. Raises Refusal."""
        text = self.query.get(name, "")
        try:
            return float(text) if text else None
        except ValueError:
            raise Refusal(400, f"{name} must be a number.", field=name) from None

    def table(self, name: str) -> Mapping[str, Any]:
        """A JSON object of the body. Raises Refusal."""
        value: Mapping[str, Any] = self._of(name, dict, "an object")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A text of the body. Raises Refusal."""
        return str(self._of(name, str, "a text", default))

    def flag(self, name: str, default: bool) -> bool:
        """True or false of the body. Raises Refusal."""
        return bool(self._of(name, bool, "true or false", default))

    def _of(self, name: str, kind: type, words: str, default: Any = None) -> Any:
        value = self.body.get(name, default)
        if not isinstance(value, kind):
            raise Refusal(400, f"{name} must be {words}.", field=name)
        return value


Handler = Callable[[Desk, Ask], Any]


def json(value: Any, status: int = 200) -> Response:
    """`value` as strict JSON; NaN and infinity become null."""
    return Response(orjson.dumps(value), status, media_type="application/json", headers={"cache-control": "no-store"})


def nothing() -> Response:
    """Nothing new."""
    return Response(status_code=204)


def route(desk: Desk, method: str, path: str, handler: Handler) -> Route:
    """`handler` at `path`. What it returns becomes JSON, unless it is a Response; None is 404."""

    async def answer(request: Request) -> Response:
        try:
            ask = Ask(request.path_params, request.query_params, await _body(request))
            value = await run_in_threadpool(handler, desk, ask)
        except ClientDisconnect:
            return nothing()  # nobody reads it
        except Exception as error:
            return failed(error)
        return value if isinstance(value, Response) else json(value)

    return Route(path, answer, methods=[method])


async def _body(request: Request) -> Mapping[str, Any]:
    if request.method != "POST":
        return {}
    raw = await request.body()
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # other kinds can be sent from a foreign page without asking
        raise Refusal(415, "Send JSON, with content-type application/json.")
    try:
        value = orjson.loads(raw or b"{}")
    except orjson.JSONDecodeError as error:
        raise Refusal(400, f"The body is no JSON: {error}.") from None
    if not isinstance(value, dict):
        raise Refusal(400, "The body must be a JSON object.")
    return value


def failed(error: Exception) -> Response:
    """The answer to an error. The page gets a sentence; a traceback goes to the server's own terminal."""
    if isinstance(error, Refusal):
        return json({"error": str(error), **error.more}, error.status)
    if isinstance(error, SpecError):
        first = error.problems[0]
        named = (f"{p.field}: {p.message}" if p.field else f"The text {p.message}" for p in error.problems)
        return json({"error": "; ".join(named) + ".", "field": first.field}, 422)
    if isinstance(error, DraftError):
        return json({"error": str(error)}, 400)
    if isinstance(error, RunError):
        return json({"error": str(error)}, 409)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return json({"error": "The disk that holds the runs is full. Free some space, then try again."}, 507)
    mark = secrets.token_hex(4)
    trace = "".join(traceback.format_exception(error))
    sys.stderr.write(f"Footplate, error {mark}:\n{trace}\n")
    if isinstance(error, OSError) and error.strerror:
        return json({"error": f"{error.filename or 'A file'}: {error.strerror} (error {mark})."}, 500)
    return json({"error": f"Footplate made a mistake. The server's terminal tells more under {mark}."}, 500)
