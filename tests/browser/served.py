"""The browser, and the page's server as a process. Asserts at the end that no process of it or of its runs is left.

An import of the server takes seconds. So one process imports it, and forks a server for each test. The libraries that
train take even longer: with FOOTPLATE_TEST_PYTHON, a program that stands in for Python, the fork server of
tests/process forks the runs and inspections of a server.
"""

import atexit
import json
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
from functools import cache
from pathlib import Path

import psutil
from playwright.sync_api import Browser, BrowserContext

from backend.paths import HOME
from backend.runs.folder import ALIVE, runs

# Debian's Chromium without windows and without a desktop browser's services, such as autofill, which examines all
# fields of a form after each change. A page takes half as much CPU time as in the full browser.
CHROMIUM = shutil.which("chromium-headless-shell") or shutil.which("chromium") or shutil.which("chromium-browser")
# The list of suggestions below the address bar is a page of its own for each window, and takes a second of CPU time.
# Chromium reads the last list only, so the others are those of playwright.
DISABLED = (
    "WebUIOmniboxPopup", "WebUIOmniboxAimPopup", "AimEnabled", "AvoidUnnecessaryBeforeUnloadCheckSync",
    "DestroyProfileOnBrowserClose", "HttpsUpgrades", "HttpsFirstBalancedModeAutoEnable", "LensOverlay", "MediaRouter",
    "OptimizationHints", "PaintHolding", "ThirdPartyStoragePartitioning",
)  # fmt: skip
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    f"--disable-features={','.join(DISABLED)}",
]
FORK_SERVER = """
import json, os, signal, sys
from webui import __main__ as page
page._import_server()
# Each server would measure the CPU, with libraries that take seconds to import. tests/process/test_measure_cpu.py does.
sys.modules["backend.preflight"].inspect_cpu = lambda *_, **__: {}
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing waits for servers: they must not become zombies
for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if child:
        print(child, flush=True)
        continue
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0), os.dup2(log, 1), os.dup2(log, 2)
    os.environ.clear(), os.environ.update(request["variables"])
    if seconds := os.environ.get("FOOTPLATE_TEST_START_SECONDS"):
        sys.modules["webui.api.runs"].INSPECTION_SECONDS = int(seconds)
    sys.executable = os.environ.get("FOOTPLATE_TEST_PYTHON", sys.executable)
    sys.exit(page.main(request["arguments"]))
"""
TIMEOUT = 60_000  # ms; other tests use the same cores, so that a page may take half a minute to open
FAKE = "fake-inference"  # file in a run's folder: the program that stands in for its chats and evaluations
MARKER_VARIABLE = "FOOTPLATE_TEST_SERVER"  # environment variable of every process that a test's server starts


def new_context(browser: Browser) -> BrowserContext:
    context = browser.new_context(viewport={"width": 1440, "height": 1000})
    context.set_default_timeout(TIMEOUT)
    return context


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


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs: psutil's own `is_running` counts zombies."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@cache
def fork_server() -> "subprocess.Popen[str]":
    """The process that forks servers; it ends with this one."""
    # One thread, here and in each server: other tests train on the same cores.
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", FORK_SERVER]
    process = subprocess.Popen(
        command, cwd=HOME, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(process.communicate)  # closes its input, so that it ends
    return process


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
        self.process: psutil.Process | None = None

    def start(self) -> None:
        arguments = ["--port", str(self.port), "--runs", str(self.runs), *([] if self.login else ["--no-login"])]
        name, _, value = self.mark.partition("=")
        variables = {**os.environ, name: value, "OMP_NUM_THREADS": "1", **self.variables}
        self.process = self._launch(arguments, variables, self.runs.with_suffix(".log"))
        for _ in range(240):
            if not is_alive(self.process):
                raise RuntimeError(self.runs.with_suffix(".log").read_text())
            try:
                urllib.request.urlopen(self.url, timeout=2).close()
                return
            except urllib.error.HTTPError:  # it responds: log in first
                return
            except OSError:
                time.sleep(0.25)
        raise RuntimeError("the server does not respond")

    def _launch(self, arguments: list[str], variables: dict[str, str], log: Path) -> psutil.Process:
        with log.open("ab") as output:
            command = [sys.executable, "-m", "webui", *arguments]
            return psutil.Popen(command, cwd=HOME, env=variables, stdout=output, stderr=output)

    def printed_url(self) -> str:
        """The last URL that the server printed."""
        return re.findall(r"Footplate is at (\S+)", self.runs.with_suffix(".log").read_text())[-1]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if is_alive(self.process):
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(60)


class ForkedServer(Server):
    """A server from `fork_server`. Its environment in /proc is that of the fork server."""

    def _launch(self, arguments: list[str], variables: dict[str, str], log: Path) -> psutil.Process:
        forks = fork_server()
        forks.stdin.write(json.dumps({"arguments": arguments, "variables": variables, "log": str(log)}) + "\n")
        forks.stdin.flush()
        return psutil.Process(int(forks.stdout.readline()))


@contextmanager
def serving(folder: Path, login: bool = False, forked: bool = True, **variables: str):
    """A server for the runs in `folder`, by default without a login and forked. Asserts at the end that no process of
    it or of its runs is left."""
    server = (ForkedServer if forked else Server)(folder, login, **variables)
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
    assert not server.process.is_running()
