"""A real server on a free port and a real Chromium; a failing test leaves a screenshot in tests/screenshots/."""

import sys
import time
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from fake_hub_uploads import fake_hub_uploads
from playwright.sync_api import expect, sync_playwright
from same_page import SamePage
from served import CHROMIUM, FAKE, FLAGS, TIMEOUT, new_context, serving

from backend.paths import HOME
from backend.runs.folder import runs

expect.set_options(timeout=TIMEOUT)
# What all tests of this folder share: a browser, a server and a page. They are closed after the last of these tests,
# since playwright keeps an event loop in this thread, in which other tests start theirs.
OPENED = ExitStack()
# Jobs start in their folders, two levels below that of the run.
PYTHON = """#!/bin/sh
if [ "$*" = "-m backend.inference ." ] && [ -e ../../{fake} ]; then
    PYTHONPATH={home} exec {python} "$(cat ../../{fake})"
fi
exec {python} "$@"
"""


@cache
def browser_of_all():
    assert CHROMIUM, "these tests need Debian's Chromium: apt-get install chromium-headless-shell"
    playwright = OPENED.enter_context(sync_playwright())
    browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
    OPENED.callback(browser.close)
    return browser


@cache
def server_of_all():
    """It has its own HF_HOME and its own stand-in for the Hub, which has no Xet. The chats and evaluations of a run
    with a file FAKE are those of the program that the file names."""
    folder = Path(OPENED.enter_context(TemporaryDirectory(prefix="footplate-tests-")))
    address = OPENED.enter_context(fake_hub_uploads()).address
    hub = {"HF_HOME": str(folder / "hf"), "HF_ENDPOINT": address, "HF_TOKEN": "", "HF_HUB_OFFLINE": "0"}
    hub["HF_HUB_DISABLE_XET"] = "1"
    program = folder / "python"
    program.write_text(PYTHON.format(python=sys.executable, fake=FAKE, home=HOME))
    program.chmod(0o755)
    return OPENED.enter_context(serving(folder / "runs", FOOTPLATE_TEST_PYTHON=str(program), **hub))


@cache
def page_of_all():
    return SamePage(new_context(browser_of_all()), server_of_all().url)


def close_all():
    for opened in (page_of_all, server_of_all, browser_of_all):
        opened.cache_clear()
    OPENED.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    try:
        return (yield)
    finally:
        if nextitem is None or not nextitem.path.is_relative_to(Path(__file__).parent):
            close_all()


def pytest_sessionfinish():
    close_all()  # after an interruption, no teardown has done so


@pytest.fixture
def server(tmp_path):
    with serving(tmp_path / "runs") as started:
        yield started


@pytest.fixture
def shared():
    """One server for all tests that neither stop it nor depend on what else is in its folders."""
    return server_of_all()


@pytest.fixture
def without_runs(shared):
    """`shared`, after its runs are deleted."""
    for run in runs(shared.runs):
        run.delete()
    return shared


@pytest.fixture(scope="module")
def chromium():
    return browser_of_all()


@pytest.fixture
def same_page(request):
    """The page of `shared` that tests use one after the other: `show_build` shows its first state."""
    same = page_of_all()
    same.begin()
    yield same
    if request.node.stash.get(FAILED, False):
        page_of_all.cache_clear()  # what it shows now is unknown
        screenshot(same.page, request)
        same.context.close()
    assert same.errors == []


def screenshot(page, request):
    folder = HOME / "tests" / "screenshots"
    folder.mkdir(exist_ok=True)
    page.screenshot(path=folder / f"{request.node.name}.png", full_page=True)


@pytest.fixture
def page(request):
    """For tests of the shared server the page that they share, for others a page of their own."""
    if "shared" in request.fixturenames:
        return request.getfixturevalue("same_page").page
    return request.getfixturevalue("new_page")


@pytest.fixture
def new_page(chromium, request):
    """A page of its own, with an empty storage. `same_page` takes a tenth of its time."""
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
        screenshot(page, request)
    errors = page.errors
    context.close()
    assert errors == []


FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    if call.when == "call":
        item.stash[FAILED] = outcome.get_result().failed
