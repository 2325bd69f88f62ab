"""A small server on 127.0.0.1 in place of the Hugging Face Hub: one account, and models that it may or may not read."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

GOOD = "hf_" + "goodGOOD" * 4
BAD = "hf_" + "badBADba" * 4
ACCOUNT = {"name": "ada", "auth": {"accessToken": {"displayName": "workbench", "role": "read"}}}
# Of each model: the status, and the header X-Error-Code, for the account.
MODELS = {
    "ada/open": (200, ""),
    "big/gated": (403, "GatedRepo"),
    "big/fine-grained": (403, ""),
    "big/missing": (404, "RepoNotFound"),
    "big/broken": (503, ""),
}


class FakeHub(BaseHTTPRequestHandler):
    """Answers whoami, auth-check, and requests for files with the status of the model."""

    def do_GET(self) -> None:
        if self.headers["authorization"] not in (None, f"Bearer {GOOD}"):
            self._answer(401, {"error": "Invalid credentials in Authorization header"})
        elif self.path == "/api/whoami-v2":
            self._answer(200, ACCOUNT)
        else:
            model = "/".join(self.path.removeprefix("/api/models").split("/")[1:3])
            status, code = MODELS.get(model, (404, "RepoNotFound"))
            self._answer(status, {}, code)

    do_HEAD = do_GET

    def _answer(self, status: int, body: dict[str, Any], code: str = "") -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        for name, value in {"X-Error-Code": code, "X-Error-Message": str(body.get("error", ""))}.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@contextmanager
def fake_hub() -> Iterator[str]:
    """The address of a running FakeHub."""
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeHub) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
