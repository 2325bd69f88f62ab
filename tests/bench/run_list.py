"""The list of 10,000 runs: scans, the server's responses, 50 polling clients, the first draw, the command line."""

import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

from playwright.sync_api import sync_playwright

from backend.runs import LOCK, METRICS, PLAN, PROGRESS, RESULT, SPEC, STATE
from backend.runs.listing import RunList
from tests.browser.served import CHROMIUM, FLAGS, HOME, Server

Measurement = tuple[str, list[float], str]
RUNS, CLIENTS, SECONDS = 10_000, 50, 10
# Notes when the first row is on the screen.
WATCH = """() => {
  const done = () => requestAnimationFrame(() => setTimeout(() => { window.firstRow = performance.now(); }));
  const observer = new MutationObserver(() => {
    if (!document.querySelector('.fp-runs-link')) return;
    observer.disconnect();
    done();
  });
  observer.observe(document, { childList: true, subtree: true });
}"""
TIMES = """() => {
  const [list] = performance.getEntriesByType('resource').filter(({ name }) => name.includes('api/runs?'));
  return { total: window.firstRow, draw: window.firstRow - list.responseEnd };
}"""


def measure(folder: Path) -> Iterator[Measurement]:
    """Every measurement of the list."""
    root = folder / "many"
    make_runs(root, RUNS)
    yield "first list, nothing read before", [_seconds(RunList(root).all)], "s"
    yield "first list of a later process", [1000 * _seconds(RunList(root).all) for _ in range(5)], "ms"
    yield "list, nothing changed", list(_repeated(root)), "ms"
    command = [sys.executable, "-m", "backend", "list", "--runs", str(root), "--search", "lr>1e-4 state:failed"]
    yield "footplate list", [_seconds(lambda: subprocess.run(command, cwd=HOME, stdout=subprocess.DEVNULL))], "s"
    server = Server(root)
    server.start()
    try:
        first, known = _request(server, "")
        yield "response to the first request", [1000 * first], "ms"
        tag = json.loads(known)["etag"]
        yield "response without changes", [1000 * _request(server, tag)[0] for _ in range(20)], "ms"
        yield f"response with {CLIENTS} clients", list(_clients(server, tag)), "ms"
        yield from _first_draw(server)
    finally:
        server.stop()


def make_runs(root: Path, count: int) -> None:
    """Folders as runs leave them behind: half done, a quarter failed, a quarter stopped."""
    for number in range(count):
        created = datetime(2026, 1, 1) + timedelta(minutes=number)
        path = root / f"{created:%Y-%m-%d_%H%M%S}_run-{number}"
        path.mkdir(parents=True)
        about = {"model": f"model-{number % 9}", "method": "LoRA", "dataset": "trains", "strategy": "zero3"}
        about["learning_rate"] = 10.0 ** -(number % 6)
        plan = {"name": f"run {number}", "created": created.timestamp(), "about": about, "argv": ["true"]}
        end = ("done", "failed", "done", "stopped")[number % 4]
        began = created.timestamp()
        points = [{"step": s, "loss": 3 / s, "learning_rate": 1e-4, "tokens_per_second": 900} for s in range(1, 40)]
        state = {"started": began, "ended": began + 600, "end": end, "exit_code": int(end == "failed")}
        files = {SPEC: "{}\n", PLAN: json.dumps(plan), LOCK: "supervisor", STATE: json.dumps(state)}
        files[METRICS] = "".join(json.dumps(point) + "\n" for point in points)
        files[PROGRESS] = json.dumps({"phase": "done", "step": 40, "max_steps": 40, "time": began})
        if end == "done":
            files[RESULT] = json.dumps({"eval_loss": 1.5, "seconds": 500, "tokens": 10**6, "peak_bytes": [2**34]})
        for name, text in files.items():
            (path / name).write_text(text)


def _seconds(work: object) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _repeated(root: Path) -> Iterator[float]:
    listed = RunList(root)
    listed.all()
    for _ in range(20):
        listed.expire()
        yield 1000 * _seconds(listed.all)


def _request(server: Server, tag: str) -> tuple[float, bytes]:
    begin = time.perf_counter()
    with urllib.request.urlopen(f"{server.url}/api/runs?have={tag}") as response:
        body = response.read()
    return time.perf_counter() - begin, body


def _clients(server: Server, tag: str) -> list[float]:
    """Each client asks once a second, while one run changes each second."""
    times, end = [], time.monotonic() + SECONDS

    def poll(number: int) -> None:
        have = tag
        time.sleep(number / CLIENTS)
        while time.monotonic() < end:
            seconds, body = _request(server, have)
            times.append(1000 * seconds)
            have = json.loads(body)["etag"] if body else have
            time.sleep(1)

    threads = [threading.Thread(target=poll, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    changed = min(server.runs.glob("2*"))
    while time.monotonic() < end:
        os.utime(changed / PLAN)
        time.sleep(1)
    for thread in threads:
        thread.join()
    return times


def _first_draw(server: Server) -> Iterator[Measurement]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        found = []
        for _ in range(5):
            page = browser.new_page(viewport={"width": 1440, "height": 1000})
            page.add_init_script(f"({WATCH})()")
            page.goto(f"{server.url}/?tab=runs")
            page.wait_for_function("window.firstRow")
            found.append(page.evaluate(TIMES))
            page.close()
        browser.close()
    yield "response to first rows drawn", [each["draw"] for each in found], "ms"
    yield "page opened to first rows drawn", [each["total"] / 1000 for each in found], "s"
