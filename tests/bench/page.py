"""The page: cold start and memory, edit to report, log line and metric to the screen, long runs."""

import json
import math
import random
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import psutil
from playwright.sync_api import sync_playwright

from backend import presets
from backend.machine import probe
from backend.preflight import preflight
from backend.runs import LOG, METRICS, Plan
from backend.runs.folder import Run
from tests.browser.served import CHROMIUM, FLAGS, Server

Measurement = tuple[str, list[float], str]

# Times each edit in the page itself, from the key to the drawn report.
WATCH = """() => {
  window.edits = [];
  let pressed = 0;
  document.addEventListener('input', (event) => { pressed = event.timeStamp; }, true);
  const status = document.querySelector('#fp-status');
  new MutationObserver(() => {
    if (!pressed || status.dataset.fresh !== 'yes') return;
    requestAnimationFrame(() => { window.edits.push(performance.now() - pressed); pressed = 0; });
  }).observe(status, { attributes: true, attributeFilter: ['data-fresh'] });
}"""


# Notes when each text appears in the page, in seconds since the epoch: waiting for it from outside polls too rarely.
APPEARANCES = """() => {
  window.appeared = {};
  const note = (text) => {
    for (const found of text.match(/(needle \\d{4}|at step \\d+)/g) || []) window.appeared[found] ??= Date.now() / 1000;
  };
  new MutationObserver((records) => {
    for (const { target, addedNodes } of records)
      (addedNodes.length ? addedNodes : [target]).forEach((node) => note(node.textContent));
  }).observe(document.body, { subtree: true, childList: true, characterData: true });
}"""
# Opens a run from the list; returns how long that took until its first chart was drawn, in ms.
OPEN = """async (id) => {
  const begin = performance.now();
  document.querySelector(`a[href*="${id}"]`).click();
  while (!document.querySelector('#fp-run-page .fp-plot canvas')) await new Promise(requestAnimationFrame);
  return performance.now() - begin;
}"""
# Notes how long the page could not answer the user, in ms: tasks longer than 50 ms.
BLOCKED = """() => {
  window.blocked = [];
  new PerformanceObserver((list) => list.getEntries().forEach((entry) => window.blocked.push(entry.duration)))
    .observe({ type: 'longtask' });
}"""
# (preset, machine, text of the verdict): the states of the report that take longest.
STATES = (
    ("two-nodes", "2x8x80gb", "Can run"),
    ("continued-pretraining", "1x24gb", "Cannot run"),
    ("two-nodes", "1x24gb", "Cannot run"),
    ("full-8b-zero3", "1x24gb", "Cannot run"),
    ("qlora-70b-fsdp2", "1x24gb", "Cannot run"),
)
MILLION = 10**6
LINES_PER_TENTH = MILLION // 600  # a million lines a minute


def measure(folder: Path) -> Iterator[Measurement]:
    """Every measurement of the page."""
    yield from start(folder)
    yield from checks()
    server = Server(folder / "runs")
    server.start()
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
            yield from edits(server, browser)
            yield from live(server, browser)
            yield from long_run(server, browser)
            browser.close()
    finally:
        server.stop()


def start(folder: Path) -> Iterator[Measurement]:
    """Time from process start to the first response, and the resident memory then."""
    seconds, megabytes = [], []
    for _ in range(5):
        server = Server(folder / "start")
        begin = time.perf_counter()
        server.start()
        seconds.append(time.perf_counter() - begin)
        megabytes.append(psutil.Process(server.process.pid).memory_info().rss / 1e6)
        server.stop()
    yield "cold start", seconds, "s"
    yield "memory", megabytes, "MB"


def checks() -> Iterator[Measurement]:
    """The Python part of a report: rules, estimate and plan for one spec."""
    machine, spec, times = probe(Path.cwd()), presets.read("first-run"), []
    for _ in range(300):
        begin = time.perf_counter()
        preflight(spec, machine, Path.cwd())
        times.append(1000 * (time.perf_counter() - begin))
    yield "rules, estimate and plan", times, "ms"


def edits(server: Server, browser: object) -> Iterator[Measurement]:
    """From the input event to the report, in Chromium: the preset that the page opens with, and large models, of which
    most do not fit, so that fixes for memory are computed too."""
    page = browser.new_page(viewport={"width": 1440, "height": 1000})
    page.goto(server.url)
    page.wait_for_selector("body[data-ready]")
    page.evaluate(WATCH)
    yield "edit to report", _typed(page), "ms"
    for preset, machine, verdict in STATES:
        page.locator("#fp-presets").select_option(preset)
        page.locator("#fp-machine").select_option(machine)
        page.wait_for_timeout(1000)
        page.locator(".fp-status-text").get_by_text(verdict).wait_for()
        yield f"edit to report, {preset} on {machine}", _typed(page), "ms"
    page.close()


def _typed(page: object) -> list[float]:
    page.evaluate("window.edits = []")
    field = page.locator("#train-per_device_train_batch_size input")
    for i in range(60):
        field.fill(str(1 + i % 9))
        page.wait_for_timeout(300)
    return page.evaluate("window.edits")


def live(server: Server, browser: object) -> Iterator[Measurement]:
    """A log line and a metric, from written to visible."""
    run = _running(server)
    page = browser.new_page(viewport={"width": 1440, "height": 1000})
    page.goto(f"{server.url}/?tab=run&run={run.id}")
    page.wait_for_selector("#fp-run-page")
    page.wait_for_timeout(3000)
    page.evaluate(APPEARANCES)
    written: dict[str, float] = {}
    for step in range(1, 61):
        written[f"at step {step}"] = time.time()
        with (run.path / METRICS).open("a") as file:
            file.write(json.dumps({"step": step, "time": time.time(), "loss": 1 / step, "learning_rate": 1e-3}) + "\n")
        page.wait_for_timeout(random.uniform(500, 2000))  # the page polls at intervals of its own
        written[f"needle {step:04d}"] = time.time()
        with (run.path / LOG).open("a") as file:
            file.write(f"needle {step:04d}\n")
    page.wait_for_timeout(2000)
    appeared = page.evaluate("window.appeared")
    run.stop(save=False)
    page.close()
    yield "log line written to visible", _waits("needle", written, appeared), "s"
    yield "metric written to visible", _waits("at", written, appeared), "s"


def long_run(server: Server, browser: object) -> Iterator[Measurement]:
    """A run with a million points, and then a million lines a minute."""
    run = _running(server)
    with (run.path / METRICS).open("w") as file:
        for step in range(1, MILLION + 1):
            figures = {"epoch": step / 3e5, "tokens": 4096 * step, "loss": 2 + step % 7 / 100, "learning_rate": 1e-4}
            more = {"grad_norm": 1 + step % 11 / 10, "tokens_per_second": 13_000.0 + step % 100, "step_time": 0.31}
            file.write(json.dumps({"step": step, "time": 1.7e9 + 0.31 * step, **figures, **more}) + "\n")
    page = browser.new_page(viewport={"width": 1440, "height": 1000})
    page.goto(f"{server.url}/?tab=runs")
    page.wait_for_selector(f"a[href*='{run.id}']")
    page.wait_for_timeout(2000)
    begin = time.perf_counter()
    yield "opening a run with a million points, first draw", [page.evaluate(OPEN, run.id)], "ms"
    page.get_by_text(f"at step {MILLION:,}").first.wait_for(timeout=120_000)
    yield "until all of them are read", [time.perf_counter() - begin], "s"
    page.evaluate(APPEARANCES)
    page.evaluate(BLOCKED)
    written: dict[str, float] = {}
    following = time.monotonic()
    with (run.path / LOG).open("a") as file:
        for tenth in range(300):
            file.writelines(f"a line of the log, number {line}, of a usual length\n" for line in range(LINES_PER_TENTH))
            written[f"needle {tenth:04d}"] = time.time()
            file.write(f"needle {tenth:04d}\n")
            file.flush()
            page.wait_for_timeout(max(0, 1000 * (following + 0.1 * (tenth + 1) - time.monotonic())))
    page.wait_for_timeout(2000)
    appeared, blocked = page.evaluate("window.appeared"), page.evaluate("window.blocked")
    run.stop(save=False)
    page.close()
    yield "log line visible, among a million lines a minute", _waits("needle", written, appeared), "s"
    yield "longest time in which the page did not answer", [max(blocked, default=0)], "ms"


def _running(server: Server) -> Run:
    """A run that writes nothing itself."""
    code = "import time, pathlib; p = pathlib.Path('stop')\nwhile not p.exists(): time.sleep(0.1)"
    plan = Plan(argv=("python3", "-c", code), files={"spec.yaml": "{}\n"})
    run = Run.create(server.runs, "bench", plan, datetime.now())
    run.start()
    return run


def _waits(kind: str, written: dict[str, float], appeared: dict[str, float]) -> list[float]:
    """Seconds from each text until it, or a later one, appeared: of a flood, only the last lines are shown."""
    waits, shown = [], math.inf
    for text in reversed([text for text in written if text.startswith(kind)]):
        shown = min(shown, appeared.get(text, math.inf))
        waits.append(shown - written[text])
    return waits
