"""A process that imports the libraries once for several runs on CPU, one after the other (`warm_python.py`)."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

from backend.runs import LOG, PLAN, RUN_MARKER, Plan, files, start_env, warm_python
from backend.runs.folder import PACKAGES, Run


def warmed(plan: Plan) -> Plan:
    """`plan` with processes that the warm server in the parent folder of its run forks."""
    argv = (plan.argv[0], "-I", "-S", warm_python.__file__, *plan.argv[1:])
    return replace(plan, argv=argv, env={**plan.env, warm_python.SOCKET: f"../{warm_python.NAME}"})


class WarmProcess:
    """The warm server of a folder with runs. It ends with the process that has started it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, run: Run) -> None:
        """Start the server with the environment of `run`, unless it was started before. If that fails, the runs import
        the libraries themselves."""
        if self._process:
            return
        plan = json.loads(files.read_text(run.path / PLAN))
        environment = {**start_env(os.environ, plan["defaults"], plan["env"]), RUN_MARKER: str(self.folder)}
        command = [plan["argv"][0], "-m", "backend.train.warm_server", str(self.folder), str(os.getpid())]
        with contextlib.suppress(OSError), files.open_to_append(self.folder / LOG) as log:
            self._process = subprocess.Popen(
                command, cwd=PACKAGES, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def end(self) -> None:
        """End the server, and delete its socket and its program."""
        if not self._process:
            return
        self._process.kill()
        self._process.wait()
        self._process = None
        for name in (warm_python.NAME, warm_python.STAND_IN):
            with contextlib.suppress(OSError):
                (self.folder / name).unlink()
