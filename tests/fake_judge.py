"""An OpenAI-compatible endpoint on 127.0.0.1 that stands in for an LLM judge, and keeps each request."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Asked:
    """One request: its path, headers and JSON, and the texts between the tags of its question."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]

    @property
    def pair(self) -> tuple[str, str]:
        """Responses A and B."""
        return self.part("response_A"), self.part("response_B")

    def part(self, tag: str) -> str:
        """The text in a tag of the question."""
        found = re.search(rf"<{tag}>\n(.*?)\n</{tag}>", self.body["messages"][-1]["content"], re.DOTALL)
        assert found, self.body
        return found[1]


Reply = str | tuple[int, str] | tuple[int, str, dict[str, str]] | float
"""The text of an answer; an HTTP status with body and headers; or seconds without any answer."""


@dataclass
class FakeJudge:
    """`replies` are used up first, then `decide` replies to each request."""

    decide: Callable[[Asked], Reply]
    replies: list[Reply] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    url: str = ""

    def handle(self, asked: Asked) -> Reply:
        self.asked.append(asked)
        return self.replies.pop(0) if self.replies else self.decide(asked)


def completion(text: Any) -> str:
    return json.dumps({"object": "chat.completion", "choices": [{"index": 0, "message": {"content": text}}]})


@contextmanager
def serve_judge(decide: Callable[[Asked], Reply], *replies: Reply) -> Iterator[FakeJudge]:
    judge = FakeJudge(decide, list(replies))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            reply = judge.handle(Asked(self.path, dict(self.headers), body))
            if isinstance(reply, float):
                time.sleep(reply)
                return
            status, text, *more = (200, completion(reply)) if isinstance(reply, str) else reply
            self.send_response(status)
            for name, value in (more[0] if more else {}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.encode())

        def do_GET(self) -> None:
            judge.asked.append(Asked(self.path, dict(self.headers), {}))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    judge.url = f"http://127.0.0.1:{server.server_port}/v1"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield judge
    finally:
        server.shutdown()
        server.server_close()
