"""Takes the screenshots of the README and the guide: `make pictures`, on an idle machine.

With a folder of runs as argument, its newest run is shown; without it the preset First run is trained first, which
takes some minutes.
"""

import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Page, sync_playwright
from served import CHROMIUM, FLAGS, HOME, serving

NO_ERRORS = "#fp-status[data-fresh=yes][data-level=ok]"
READY_TIMEOUT = 120_000  # ms
TRAINING_TIMEOUT = 3_600_000  # ms


def build(page: Page) -> None:
    """The Build view with a report without errors; spec.yaml instead of the command, which has this machine's paths."""
    page.wait_for_selector(NO_ERRORS, timeout=READY_TIMEOUT)
    page.locator("#fp-preview-tabs").get_by_text("spec.yaml").click()
    page.wait_for_timeout(1000)
    page.screenshot(path=HOME / "assets" / "build.png")


def strategies(page: Page) -> None:
    """Devices, strategies and placement of an 8B model on two nodes with eight GPUs each."""
    page.locator("#fp-machine").select_option("2x8x80gb")
    page.locator("#fp-presets").select_option("two-nodes")
    page.wait_for_selector(".fp-column >> nth=15", timeout=READY_TIMEOUT)
    page.locator(".fp-toast button[aria-label=Dismiss]").click()
    page.locator("#fp-section-model .fp-head").click()
    page.locator(".fp-column").nth(3).hover()
    page.wait_for_timeout(1000)
    page.screenshot(path=HOME / "assets" / "strategies.png")
    page.locator("#fp-section-model .fp-head").click()
    page.locator("#fp-machine").select_option("")
    page.locator("#fp-presets").select_option("first-run")
    page.wait_for_selector(NO_ERRORS, timeout=READY_TIMEOUT)


def run(page: Page) -> None:
    """The Run view of a finished run: results, generations and curves."""
    page.wait_for_selector('.fp-run[data-state="done"]', timeout=TRAINING_TIMEOUT)
    page.wait_for_selector(".fp-plot canvas", timeout=READY_TIMEOUT)
    page.set_viewport_size({"width": 1440, "height": 1288})
    page.wait_for_timeout(2000)
    page.screenshot(path=HOME / "assets" / "run.png")


def main(runs: Path) -> None:
    newest = max((path.name for path in runs.glob("2*")), default="")
    with serving(runs) as server, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_context(viewport={"width": 1440, "height": 960}).new_page()
        page.goto(server.url)
        page.wait_for_selector("body[data-ready]", timeout=READY_TIMEOUT)
        build(page)
        strategies(page)
        if newest:
            page.evaluate("id => footplate.showView('run', id)", newest)
        else:
            page.click("#fp-start")
        run(page)
        browser.close()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(Path(folder) / "runs")
