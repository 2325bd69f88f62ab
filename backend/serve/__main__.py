"""`python -m backend.serve .` in the folder of a job: serves a GGUF file until it is stopped, as serve.json says
(backend/models/serve.py)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from backend.environments.llama_cpp import ServerError, ServerProcess, Settings
from backend.runs import PROGRESS, RESULT, STOP, TOKEN, files, jobs
from backend.runs.folder import Run

LOADING, READY = "loading model", "ready"  # phases of the job
LOG_FILE = "llama.cpp.txt"
DEFAULT_CONTEXT = 4096  # tokens of a request: models may have 100 times as many, whose cache takes gigabytes
POLL_SECONDS = 0.1
REQUEST_SECONDS = 60.0  # for the first request, which needs no generation


class ServeError(Exception):
    """Why the file cannot be served, and how to fix it, in one or two sentences."""


def main() -> int:
    """Serve, and print why that failed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # a stop: the token is removed
    folder, parent = files.held(Path(sys.argv[1])), os.getppid()
    with contextlib.suppress(OSError):  # if memory is short, the kernel ends the server, and not a training
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    try:
        request = jobs.required_request(folder, jobs.SERVE)
        token = _token(folder)
        server = _start(folder, request, token)
        try:
            _serve(folder, request, token, server, parent)
        finally:
            server.close()
    except ServeError as error:
        print(f"backend.serve.ServeError: {error}", file=sys.stderr)  # runs/failure.py shows the sentence
        return 1
    finally:
        (folder / TOKEN).unlink(missing_ok=True)
    return 0


def _token(folder: Path) -> str:
    """Raises ServeError."""
    try:
        return files.read_text(folder / TOKEN)
    except OSError:
        raise ServeError("The API token of this server was removed when it ended. Start another server.") from None


def _start(folder: Path, request: dict[str, Any], token: str) -> ServerProcess:
    """The server, once it answers. Raises ServeError."""
    jobs = Run(folder).path.parent  # it may have been renamed since the start
    file = jobs / request["file"]
    if not file.is_file():
        raise ServeError("The GGUF file was deleted. Export it again, then serve it.")
    _report(folder, LOADING, f"Loading {file.name}.")
    context = request["context"] or DEFAULT_CONTEXT
    others = {name: request[name] for name in ("name", "port", "parallel", "threads", "template_kwargs")}
    adapter = jobs / request["adapter"] if request.get("adapter") else None
    settings = Settings(file, token, context, adapter=adapter, **others)
    try:
        server = ServerProcess(Path(request["environment"]), settings, folder / LOG_FILE)
    except ServerError as error:
        if "couldn't bind" in str(error):
            raise ServeError(
                f"Port {request['port']} of 127.0.0.1 is used by another program. Choose another port, or 0 for a free "
                "one."
            ) from error
        raise ServeError(f"llama.cpp cannot serve the GGUF file: {error}") from error
    return server


def _serve(folder: Path, request: dict[str, Any], token: str, server: ServerProcess, parent: int) -> None:
    """Wait for a stop, or for the end of the supervisor, `parent`; then write the result. Raises ServeError if the
    server has ended."""
    started = time.monotonic()
    model = _ask(server, token, "/v1/models")["data"][0]["meta"]
    if request["context"] > model["n_ctx_train"]:
        raise ServeError(
            f"A context of {request['context']:,} tokens exceeds that of the model, {model['n_ctx_train']:,} tokens. "
            "Set the context to that or less."
        )
    template = _ask(server, token, "/props")["chat_template_caps"]
    address, found = f"{server.address}/v1", {"context": model["n_ctx"], "has_tools": template["supports_tools"]}
    _report(folder, READY, f"Serving at {address}.", address=address, **found)
    while not (folder / STOP).exists() and os.getppid() == parent:
        if how := server.ending():
            raise ServeError(f"llama.cpp's server {how}. Its last message: {server.last_line()}")
        time.sleep(POLL_SECONDS)
    seconds = round(time.monotonic() - started, 1)
    files.write_json(folder / RESULT, {"text": "The server was stopped.", "seconds": seconds})


def _ask(server: ServerProcess, token: str, path: str) -> Any:
    """The JSON of a route. Raises ServeError."""
    request = urllib.request.Request(server.address + path, headers={"Authorization": f"Bearer {token}"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=REQUEST_SECONDS) as response:
            return json.load(response)
    except (OSError, ValueError) as error:
        raise ServeError(
            f"llama.cpp's server does not answer ({error}). Its last message: {server.last_line()}"
        ) from error


def _report(folder: Path, phase: str, text: str, **more: Any) -> None:
    print(f"{time.strftime('%T')} {text}", flush=True)
    files.write_json(folder / PROGRESS, {"phase": phase, "text": text, "time": time.time(), **more})


if __name__ == "__main__":
    sys.exit(main())
