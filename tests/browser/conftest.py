"""A real server on a free port and a real Chromium; a failing test leaves a screenshot in tests/screenshots/."""

import time

import pytest
from fake_hub import fake_hub
from playwright.sync_api import expect, sync_playwright
from served import CHROMIUM, FLAGS, TIMEOUT, new_context, serving

from backend.paths import HOME

expect.set_options(timeout=TIMEOUT)


@pytest.fixture
def server(tmp_path):
    with serving(tmp_path / "runs") as started:
        yield started


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """One server for all tests of a file, which neither stop it nor count its runs: a start takes seconds. It has a
    home of huggingface_hub and a Hub of its own."""
    folder = tmp_path_factory.mktemp("shared")
    with (
        fake_hub() as address,
        serving(
            folder / "runs", HF_HOME=str(folder / "hf"), HF_ENDPOINT=address, HF_TOKEN="", HF_HUB_OFFLINE="0"
        ) as started,
    ):
        yield started


@pytest.fixture(scope="module")  # playwright keeps an event loop in this thread until it is left
def chromium():
    assert CHROMIUM, "these tests need Debian's chromium: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(chromium, request):
    context = new_context(chromium)
    page = context.new_page()
    page.errors = []
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    requests = []
    page.on("request", lambda r: requests.append(f"{time.monotonic():.1f} sent {r.method} {r.url}"))
    page.on("requestfinished", lambda r: requests.append(f"{time.monotonic():.1f} finished {r.url}"))
    page.on("requestfailed", lambda r: requests.append(f"{time.monotonic():.1f} failed {r.url} {r.failure}"))
    yield page
    if request.node.stash.get(FAILED, False):
        print("the page's last requests:", *requests[-40:], sep="\n")
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
