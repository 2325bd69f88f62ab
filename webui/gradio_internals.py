"""Everything in Python that depends on how Gradio works inside, next to static/gradio.js and static/gradio.css.

Nothing else in `webui` reads a private attribute or patches a function of Gradio. When Gradio is upgraded: read the
three files, run tests/browser, then change TESTED_VERSION.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.routing import Mount
from starlette.types import ASGIApp, Message, Receive, Scope, Send

TESTED_VERSION = "6.31"
IDLE_SECONDS = 0.1
# The paths that the page loads (6.31), all by GET. The page uses no Python events, so it needs no queue, uploads,
# files, proxy or streams.
PAGE_PATHS = ("/", "/config", "/theme.css")
PAGE_FOLDERS = ("/assets/", "/static/")

# Gradio's loading screen is removed while its timer runs. The timer then requests an animation frame 60 times a second
# as long as the page is open (6.31, statustracker). Gradio looks up requestAnimationFrame once, while the page loads.
# So this script replaces the function until the page is ready. Gradio's copy of the replacement waits an hour from then
# on, and all other code uses the browser's own function.
SLOW_TIMER = b"""<script>
(() => {
  const native = window.requestAnimationFrame.bind(window);
  let ready = false;
  window.requestAnimationFrame = (draw) => (ready ? setTimeout(() => draw(performance.now()), 3600000) : native(draw));
  addEventListener("footplate-ready", () => {
    ready = true;
    window.requestAnimationFrame = native;
  });
})();
</script>"""

logger = logging.getLogger(__name__)


def check_version(installed: str | None = None) -> bool:
    """Whether the installed Gradio is the tested minor version. Logs a warning if not."""
    installed = installed or version("gradio")
    if ".".join(installed.split(".")[:2]) == TESTED_VERSION:
        return True
    logger.warning(
        "Gradio %s is installed; Footplate's page was tested with Gradio %s. If the form looks wrong or does not work, "
        "run `pip install 'gradio==%s.*'`.",
        installed,
        TESTED_VERSION,
        TESTED_VERSION,
    )
    return False


@contextmanager
def without_stub_files() -> Iterator[None]:
    """Halves the time of `import gradio`, and prevents writes into its package.

    On import, each component class parses its own source to write a .pyi file next to it
    (gradio.component_meta.create_or_modify_pyi in 6.31), and skips that if inspect.getfile raises OSError. If a version
    of Gradio works differently, this changes nothing.
    """
    original = inspect.getfile

    def getfile(thing: Any) -> str:
        if type(thing).__name__ == "ComponentMeta" or getattr(thing, "__name__", "") == "BlocksEvents":
            raise OSError("no stub file")
        return original(thing)

    inspect.getfile = getfile  # type: ignore[assignment]
    try:
        yield
    finally:
        inspect.getfile = original


def slow_down_idle_queue(blocks: Any) -> None:
    """Poll Gradio's event queue every 100 ms instead of every millisecond, which takes 4.4 % of a core (6.31).
    Footplate queues no events."""
    queue = getattr(blocks, "_queue", None)
    for name in ("sleep_when_free", "progress_update_sleep_when_free"):
        if hasattr(queue, name):
            setattr(queue, name, IDLE_SECONDS)


class PageOnly:
    """Gradio's app without the routes that the page does not load: uploads without a quota, files, a proxy to other
    hosts, event queues, and whatever later versions add."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """404 for all other paths and methods."""
        path = scope.get("path", "")
        loaded = path in PAGE_PATHS or (path.startswith(PAGE_FOLDERS) and ".." not in path.split("/"))
        if scope["type"] == "lifespan" or (scope["type"] == "http" and scope["method"] in ("GET", "HEAD") and loaded):
            await self.app(scope, receive, _with_slow_timer(send) if path == "/" else send)
        elif scope["type"] == "http":
            await PlainTextResponse("Not found", 404)(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})


def _with_slow_timer(send: Send) -> Send:
    """`send` that begins the head of a page with SLOW_TIMER. Gradio sends a page in one piece."""
    start: Message = {}

    async def send_page(message: Message) -> None:
        nonlocal start
        if message["type"] == "http.response.start":
            start = message
            return
        if start:
            before, head, after = message.get("body", b"").partition(b"<head>")
            if head:
                message = {**message, "body": before + head + SLOW_TIMER + after}
                MutableHeaders(scope=start)["content-length"] = str(len(message["body"]))
            await send(start)
            start = {}
        await send(message)

    return send_page


def serve_only_the_page(app: Starlette) -> None:
    """Close the routes of the mounted Gradio app that the page does not load. Raises ValueError if none is mounted."""
    mounted = [route for route in app.routes if isinstance(route, Mount) and route.path == ""]
    if not mounted:
        raise ValueError("Gradio is not mounted at /")
    for route in mounted:
        route.app = PageOnly(route.app)
