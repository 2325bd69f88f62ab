"""The page: cold start and memory, edit to report, log line and metric to the screen."""

import json
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import psutil
from playwright.sync_api import sync_playwright

from backend.config import presets
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
  document.addEventListener('input', () => { pressed = performance.now(); }, true);
  const status = document.querySelector('#fp-status');
  new MutationObserver(() => {
    if (!pressed || status.dataset.fresh !== 'yes') return;
    requestAnimationFrame(() => { window.edits.push(performance.now() - pressed); pressed = 0; });
  }).observe(status, { attributes: true, attributeFilter: ['data-fresh'] });
}"""


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
    """From the input event to the report, in Chromium: the preset that the page opens with, and a large model that does
    not fit, so that fixes for memory are computed too."""
    page = browser.new_page(viewport={"width": 1440, "height": 1000})
    page.goto(server.url)
    page.wait_for_selector("body[data-ready]")
    page.evaluate(WATCH)
    yield "edit to report", _typed(page), "ms"
    page.locator("#fp-presets").select_option("continued-pretraining")
    page.locator("#fp-machine").select_option("1x24gb")
    page.wait_for_selector(".fp-finding[data-code=MEM001]")
    yield "edit to report, model does not fit", _typed(page), "ms"
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
    code = "import time, pathlib; p = pathlib.Path('stop')\nwhile not p.exists(): time.sleep(0.1)"
    run = Run.create(
        server.runs, "bench", Plan(argv=("python3", "-c", code), files={"spec.yaml": "{}\n"}), datetime.now()
    )
    run.start()
    page = browser.new_page(viewport={"width": 1440, "height": 1000})
    page.goto(f"{server.url}/?tab=run&run={run.id}")
    page.wait_for_selector("#fp-run-page")
    page.wait_for_timeout(3000)
    lines, points = [], []
    for step in range(1, 21):
        with (run.path / METRICS).open("a") as file:
            file.write(json.dumps({"step": step, "time": time.time(), "loss": 1 / step, "learning_rate": 1e-3}) + "\n")
        begin = time.perf_counter()
        page.get_by_text(f"at step {step},").first.wait_for(timeout=10_000)
        points.append(time.perf_counter() - begin)
        with (run.path / LOG).open("a") as file:
            file.write(f"needle {step:04d}\n")
        begin = time.perf_counter()
        page.get_by_text(f"needle {step:04d}").first.wait_for(timeout=10_000)
        lines.append(time.perf_counter() - begin)
        page.wait_for_timeout(137)
    run.stop(save=False)
    page.close()
    yield "log line written to visible", lines, "s"
    yield "metric written to visible", points, "s"
