"""`python -m backend.serve .` in the folder of a job: serves a model until it is stopped, as serve.json says
(backend/models/serve.py)."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from backend.environments.server_process import ServerProcess
from backend.runs import PROGRESS, RESULT, STOP, TOKEN, files, jobs
from backend.runs.folder import Run
from backend.serve import llama_cpp, vllm
from backend.serve.client import ServeError

LOADING, READY = "loading model", "ready"  # phases of the job
POLL_SECONDS = 0.1
ENGINES = {"llama.cpp": llama_cpp, "vllm": vllm}


def main() -> int:
    """Serve, and print why that failed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # a stop: the token is removed
    folder, parent = files.held(Path(sys.argv[1])), os.getppid()
    with contextlib.suppress(OSError):  # if memory is short, the kernel kills the server rather than a training
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")

    def wanted() -> bool:
        """Whether the server should keep running: no stop was requested, and its supervisor is alive."""
        return not (folder / STOP).exists() and os.getppid() == parent

    try:
        request = jobs.required_request(folder, jobs.SERVE)
        token = _token(folder)
        server = _start(folder, request, token, wanted)
        try:
            _serve(folder, request, token, server, wanted)
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


def _start(folder: Path, request: dict[str, Any], token: str, wanted: Callable[[], bool]) -> ServerProcess:
    """The server, once it answers. Raises ServeError."""
    engine, jobs = ENGINES[request["engine"]], Run(folder).path.parent  # the run may have been renamed since the start
    _report(folder, LOADING, f"Loading {engine.what(jobs, request)}.")
    server: ServerProcess = engine.start(folder, jobs, request, token, wanted)
    if not wanted():
        server.close()
        sys.exit(1)
    return server


def _serve(
    folder: Path, request: dict[str, Any], token: str, server: ServerProcess, wanted: Callable[[], bool]
) -> None:
    """Wait for a stop, or for the end of the supervisor; then write the result. Raises ServeError if the server has
    ended."""
    started, engine = time.monotonic(), ENGINES[request["engine"]]
    address = f"{server.address}/v1"
    _report(folder, READY, f"Serving at {address}.", address=address, **engine.about(server, request, token))
    while wanted():
        if how := server.ending():
            raise ServeError(f"{engine.NAME}'s server {how}. Its last message: {server.last_line()}")
        time.sleep(POLL_SECONDS)
    seconds = round(time.monotonic() - started, 1)
    files.write_json(folder / RESULT, {"text": "The server was stopped.", "seconds": seconds})


def _report(folder: Path, phase: str, text: str, **more: Any) -> None:
    print(f"{time.strftime('%T')} {text}", flush=True)
    files.write_json(folder / PROGRESS, {"phase": phase, "text": text, "time": time.time(), **more})


if __name__ == "__main__":
    sys.exit(main())
