"""The page as one ASGI app: API routes, static files, the mounted Gradio page, and access control around all of it.

Never imports torch; matplotlib only for run images.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import gradio as gr
from fastapi import FastAPI
from starlette.responses import Response
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles

from backend.machine import Machine, probe
from backend.runs.folder import finish_deletions
from webui import api, gradio_internals, pages
from webui.api.app_state import AppState
from webui.auth import LOOPBACK, AccessControl, known_hosts
from webui.login import Login

STATIC = Path(__file__).resolve().parent / "static"


class RevalidatedFiles(StaticFiles):
    """Static files that the browser revalidates on each load (304 by ETag): an update shows at once."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers["cache-control"] = "no-cache"
        return response


def create_app(
    runs: Path,
    page: Callable[[], gr.Blocks] = pages.build,
    *,
    bound: str = LOOPBACK[1],
    hosts: Iterable[str] = (),
    login: Login | None = None,
    detect_machine: Callable[[Path], Machine] = probe,
) -> AccessControl:
    """The app over the folder `runs`, which exists. Tests pass a smaller `page`.

    `bound` is the address it is served at, `hosts` are further host names it answers to, `detect_machine` describes the
    machine that runs start on. Must be called outside an event loop.
    """
    state = AppState(runs, detect_machine)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        state.machine.refresh()
        threading.Thread(target=state.runs_list.all, daemon=True).start()  # the first page does not wait for it
        threading.Thread(target=finish_deletions, args=(runs,), daemon=True).start()
        yield

    app = FastAPI(routes=[Mount("/footplate", RevalidatedFiles(directory=STATIC))], lifespan=lifespan, openapi_url=None)
    app.state.footplate = state
    app.include_router(api.router())
    asyncio.run(_mount(app, page))
    return AccessControl(app, known_hosts(bound, hosts), login)


async def _mount(app: FastAPI, page: Callable[[], gr.Blocks]) -> None:
    """Build and mount the Gradio page inside an event loop: outside of an event loop, each lock that Gradio creates
    leaves an open loop behind."""
    blocks = page()
    closed: dict[str, Any] = {"ssr_mode": False, "mcp_server": False, "show_error": False, "allowed_paths": []}
    gr.mount_gradio_app(app, blocks, "/", app_kwargs={"openapi_url": None}, **closed, **pages.mount_arguments())
    gradio_internals.slow_down_idle_queue(blocks)
    gradio_internals.serve_only_the_page(app)
