"""The page as one ASGI app: own routes, static files, ONE mounted Gradio page, and the guard around all of it.

Floor 6. Imports: api, guard, pages, gradio. Never imports torch; matplotlib only when a picture is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import gradio as gr
from fastapi import FastAPI
from starlette.responses import Response
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles

from webui import api, pages
from webui.api.desk import Desk
from webui.guard import LOOPBACK, Guard, Login, known_hosts

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
    page: gr.Blocks | None = None,
    *,
    bound: str = LOOPBACK[0],
    hosts: Iterable[str] = (),
    login: Login | None = None,
) -> Guard:
    """The app over the folder `runs`, which exists. `page` instead of the real one is for tests.

    `bound` is the address that it is served at, `hosts` further names that it answers to.
    """
    desk = Desk(runs)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> Any:
        desk.machine.refresh()
        yield

    routes = [*api.routes(desk), Mount("/footplate", Fresh(directory=STATIC))]
    app = FastAPI(routes=routes, lifespan=lifespan, openapi_url=None)
    _mount(app, page)
    return Guard(app, known_hosts(bound, hosts), login)


def _mount(app: FastAPI, page: gr.Blocks | None) -> None:
    look: dict[str, Any] = pages.mounting() if page is None else {"run_history": False, "footer_links": []}
    blocks = pages.build() if page is None else page
    gr.mount_gradio_app(app, blocks, "/", ssr_mode=False, mcp_server=False, show_error=False, **look)
    queue = getattr(blocks, "_queue", None)
    for name in ("sleep_when_free", "progress_update_sleep_when_free"):
        if hasattr(queue, name):
            setattr(queue, name, IDLE_SECONDS)
