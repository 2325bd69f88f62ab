"""Access to a vLLM server, as an ASGI middleware (`vllm serve --middleware`). vLLM's own check of the API key covers
paths below /v1 and a few others, and not /invocations, /tokenize or /metrics (vllm 0.33,
entrypoints/serve/middleware/authenticate.py). Runs in vLLM's environment, and imports nothing else.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

KEY = "VLLM_API_KEY"  # environment variable, which vLLM reads too
OPEN = "/health"  # says only that the server is running
REFUSED = b'{"error":{"message":"The API token is missing or wrong.","type":"Unauthorized","code":401}}'


class RequireToken:
    """Refuses every request without the API token, except to /health."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app, self.expected = app, f"Bearer {os.environ[KEY]}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Callable[..., Awaitable[None]]) -> None:
        """Answer with 401, or pass the request on."""
        kind = scope["type"]
        if kind not in ("http", "websocket") or scope["path"] == OPEN or self._has_token(scope):
            await self.app(scope, receive, send)
        elif kind == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(REFUSED)).encode())]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": REFUSED})

    def _has_token(self, scope: dict[str, Any]) -> bool:
        sent = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return secrets.compare_digest(sent, self.expected)
