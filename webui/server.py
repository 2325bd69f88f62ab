"""The page as one ASGI app: own routes, static files, ONE mounted Gradio page, and the guard around all of it.

Floor 6. Imports: machine, api, guard, pages, gradio. Never imports torch; matplotlib only when a picture is asked for.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import gradio as gr
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from backend.machine import Machine, probe
from webui import api, pages
from webui.api.app_state import Desk
from webui.auth import LOOPBACK, Guard, Login, known_hosts

STATIC = Path(__file__).resolve().parent / "static"
IDLE_SECONDS = 0.1  # Gradio looks for work every millisecond: 4.4 % of a core; nothing here is queued


class Fresh(StaticFiles):
    """Files that a browser asks about again each time (304 by ETag): after an update nobody sees the old page."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers["cache-control"] = "no-cache"
        return response


def make(
    runs: Path,
    page: Callable[[], gr.Blocks] = pages.build,
    *,
    bound: str = LOOPBACK[1],
    hosts: Iterable[str] = (),
    login: Login | None = None,
    machine: Callable[[Path], Machine] = probe,
) -> Guard:
    """The app over the folder `runs`, which exists. Another `page` than the real one is for tests.

    `bound` is the address that it is served at, `hosts` further names that it answers to, `machine` looks at the
    machine that runs start on. Called outside an event loop.
    """
    desk = Desk(runs, machine)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        desk.machine.refresh()
        yield

    script = Route(f"/footplate/{pages.SCRIPT}", _script)
    routes = [*api.routes(desk), script, Mount("/footplate", Fresh(directory=STATIC))]
    app = FastAPI(routes=routes, lifespan=lifespan, openapi_url=None)
    asyncio.run(_mount(app, page))
    return Guard(app, known_hosts(bound, hosts), login)


def _script(request: Request) -> Response:
    """All scripts, one after the other; 304 where the browser has them."""
    body = "\n;\n".join((STATIC / name).read_text(encoding="utf-8") for name in pages.SCRIPTS)
    tag = f'"{hashlib.blake2s(body.encode(), digest_size=8).hexdigest()}"'
    headers = {"cache-control": "no-cache", "etag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(body, media_type="text/javascript", headers=headers)


async def _mount(app: FastAPI, page: Callable[[], gr.Blocks]) -> None:
    """Build and mount the page inside a loop: outside of one each lock that Gradio makes leaves a loop open."""
    blocks = page()
    closed: dict[str, Any] = {"ssr_mode": False, "mcp_server": False, "show_error": False, "allowed_paths": []}
    gr.mount_gradio_app(app, blocks, "/", app_kwargs={"openapi_url": None}, **closed, **pages.mounting())
    queue = getattr(blocks, "_queue", None)
    for name in ("sleep_when_free", "progress_update_sleep_when_free"):
        if hasattr(queue, name):
            setattr(queue, name, IDLE_SECONDS)
