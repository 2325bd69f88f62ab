"""The browser, and the page's server as a process. Asserts at the end that no process of it or of its runs is left."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

from backend.paths import HOME
from backend.runs.folder import ALIVE, runs

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
MARKER_VARIABLE = "FOOTPLATE_TEST_SERVER"  # environment variable of every process that a test's server starts


def marked_processes(mark: str) -> list[int]:
    """Processes whose environment holds `mark`."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                pids.append(int(path.parent.name))
        except OSError:
            continue
    return pids


class Server:
    """The page's server, started as a user starts it. `kill` simulates a crash, after which `start` restarts it.

    Most tests serve without a login. With `login`, `printed_url` has the token, unless `variables` set a password."""

    def __init__(self, runs: Path, login: bool = False, **variables: str) -> None:
        self.login = login
        self.variables = variables
        self.runs = runs
        self.mark = f"{MARKER_VARIABLE}={runs}"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "webui", "--port", str(self.port), "--runs", str(self.runs)]
        command += [] if self.login else ["--no-login"]
        name, _, value = self.mark.partition("=")
        # One thread: other tests train on the same cores.
        variables = {name: value, "OMP_NUM_THREADS": "1", **self.variables}
        log = open(self.runs.with_suffix(".log"), "ab")  # noqa: SIM115 - the child uses it until it ends
        self.process = subprocess.Popen(command, cwd=HOME, env={**os.environ, **variables}, stdout=log, stderr=log)
        log.close()
        for _ in range(240):
            if self.process.poll() is not None:
                raise RuntimeError(self.runs.with_suffix(".log").read_text())
            try:
                urllib.request.urlopen(self.url, timeout=2).close()
                return
            except urllib.error.HTTPError:  # it responds: log in first
                return
            except OSError:
                time.sleep(0.25)
        raise RuntimeError("the server does not respond")

    def printed_url(self) -> str:
        """The last URL that the server printed."""
        return re.findall(r"Footplate is at (\S+)", self.runs.with_suffix(".log").read_text())[-1]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(20)


@contextmanager
def serving(folder: Path, login: bool = False, **variables: str):
    """A server for the runs in `folder`, by default without a login. Asserts at the end that no process of it or of its
    runs is left."""
    server = Server(folder, login, **variables)
    server.start()
    try:
        yield server
    finally:
        server.stop()
    for run in runs(server.runs):  # left running by a failed test
        if run.state in ALIVE:
            run.stop(save=False)
    deadline = time.monotonic() + 60
    while marked_processes(server.mark) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert marked_processes(server.mark) == []
