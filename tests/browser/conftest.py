"""A real server on a free port and a real Chromium; a failing test leaves a screenshot in tests/screenshots/."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

from backend.paths import HOME
from backend.run.folder import ALIVE, runs

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
MARK = "FOOTPLATE_TEST_SERVER"  # in the environment of everything that a test's server starts


def carriers(mark: str) -> list[int]:
    """Processes whose environment holds `mark`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


class Server:
    """The page's server, started as a user starts it; `kill` is a crash, `start` the next morning."""

    def __init__(self, runs: Path) -> None:
        self.runs = runs
        self.mark = f"{MARK}={runs}"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "webui", "--port", str(self.port), "--runs", str(self.runs)]
        name, _, value = self.mark.partition("=")
        own = {name: value, "OMP_NUM_THREADS": "1"}  # others train beside it: threads that wait would burn their cores
        log = open(self.runs.with_suffix(".log"), "ab")  # noqa: SIM115 - the child's, until it ends
        self.process = subprocess.Popen(command, cwd=HOME, env={**os.environ, **own}, stdout=log, stderr=log)
        log.close()
        for _ in range(240):
            if self.process.poll() is not None:
                raise RuntimeError(self.runs.with_suffix(".log").read_text())
            try:
                urllib.request.urlopen(self.url, timeout=2).close()
                return
            except OSError:
                time.sleep(0.25)
        raise RuntimeError("the server does not answer")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(20)


@pytest.fixture
def server(tmp_path):
    made = Server(tmp_path / "runs")
    made.start()
    yield made
    made.stop()
    for run in runs(made.runs):  # what a failed test left going; none is left by one that passed
        if run.state in ALIVE:
            run.stop(save=False)
    deadline = time.monotonic() + 60
    while carriers(made.mark) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert carriers(made.mark) == []


@pytest.fixture(scope="module")  # playwright keeps an event loop in this thread until it is left
def chromium():
    assert CHROMIUM, "these tests need Debian's chromium: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(chromium, request):
    context = chromium.new_context(viewport={"width": 1440, "height": 1000})
    page = context.new_page()
    page.errors = []
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    asked = []
    page.on("request", lambda r: asked.append(f"{time.monotonic():.1f} asked {r.method} {r.url}"))
    page.on("requestfinished", lambda r: asked.append(f"{time.monotonic():.1f} came {r.url}"))
    page.on("requestfailed", lambda r: asked.append(f"{time.monotonic():.1f} failed {r.url} {r.failure}"))
    yield page
    if request.node.stash.get(FAILED, False):
        print("the page's last requests:", *asked[-40:], sep="\n")
        print(page.evaluate("document.querySelector('#fp-run-page')?.outerHTML.slice(0, 3000)"))
        folder = HOME / "tests" / "screenshots"
        folder.mkdir(exist_ok=True)
        page.screenshot(path=folder / f"{request.node.name}.png", full_page=True)
    errors = page.errors
    context.close()
    assert errors == []


FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    if call.when == "call":
        item.stash[FAILED] = outcome.get_result().failed
