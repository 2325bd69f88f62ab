"""llama.cpp's server from the environment gguf, in a process of its own, because an unusable GGUF file or a lack of
memory may crash it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from backend.environments import PACKAGES
from backend.environments.server_process import END_SECONDS, ServerError, ServerProcess

SCRIPT = Path(__file__).parent / "llama_cpp_server.py"
QUANTIZER = Path(__file__).parent / "llama_cpp_quantize.py"
ERROR = re.compile(r"^[\d.]+ E (.+)$", re.MULTILINE)  # a line of llama.cpp's log: time, level, function and message


@dataclass(frozen=True)
class Settings:
    """`file`: the GGUF file; `key`: what every request has to send as its Bearer token; `name`: the model's name for
    clients, '' for that in the file; `context`: tokens of a request with its output; `port`: of 127.0.0.1, 0 for a free
    one; `parallel`: requests at the same time; `template_kwargs`: variables of the chat template; `adapter`: a LoRA
    adapter for the model in `file`."""

    file: Path
    key: str = field(repr=False)
    context: int
    name: str = ""
    port: int = 0
    parallel: int = 1
    threads: int = 1  # trainings need the others
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    adapter: Path | None = None


class LlamaCppServer(ServerProcess):
    """The server from its start to `close`; it also ends when the process that has started it ends. `environment` is
    the folder of the environment gguf, `log` the file for the server's messages. The constructor returns when the
    server answers requests. Raises ServerError."""

    def __init__(self, environment: Path, settings: Settings, log: Path) -> None:
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(SCRIPT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                cwd=settings.file.parent,  # so that clients get the name of the file and not its path
                env={**os.environ, "PYTHONPATH": str(environment / PACKAGES)},
            )
        assert self._process.stdin and self._process.stdout
        adapter = str(settings.adapter) if settings.adapter else ""
        request = {**asdict(settings), "model": settings.file.name, "file": None, "adapter": adapter}
        with contextlib.suppress(OSError):  # the process has ended
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        self.address = self._process.stdout.readline().strip()  # http://127.0.0.1:PORT
        if not self.address:
            self.close()
            first = ERROR.search(self._text())  # later errors follow from the first one
            raise ServerError(
                " ".join(first[1].split()) if first else f"its process {self.ending()}. {self.last_line()}"
            )

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
