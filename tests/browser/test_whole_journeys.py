"""Whole journeys: with the keyboard only from the first page to the result, and with your own model folder and JSONL
file to code that uses the trained model, which is executed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from playwright.sync_api import expect
from same_page import settled

from backend.runs.folder import Run
from backend.train.builtin_models import prepare

SLOW_TIMEOUT = 400_000  # ms; other tests use the same cores, and libraries load for ten seconds
MOST_TABS = 400


def opened(page, server):
    page.goto(server.url)
    page.wait_for_selector("body[data-ready]")
    settled(page)


def tab_to(page, selector, backwards=False):
    """Press Tab until the focus is on an element that matches."""
    for _ in range(MOST_TABS):
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            return
        page.keyboard.press("Shift+Tab" if backwards else "Tab")
    raise AssertionError(f"Tab does not lead to {selector}")


def option(page, text):
    """Find an option with the search, and focus its field."""
    page.keyboard.press("Escape")
    page.evaluate("() => document.activeElement.blur()")
    page.keyboard.press("/")
    page.keyboard.type(text)
    page.keyboard.press("Enter")


def replace(page, text):
    page.keyboard.press("Control+a")
    page.keyboard.type(text)
    settled(page)


def run_of(page, server):
    page.wait_for_url(re.compile("run=2"), timeout=SLOW_TIMEOUT)
    return Run(server.runs / re.search(r"run=([^&]+)", page.url).group(1))


def value(page, name):
    return page.evaluate("name => footplate.values()[name]", name)


@pytest.mark.soak
def test_keyboard_only_from_the_first_page_to_the_result(same_page, shared):
    """No click, no pointer: skip link, menus, segments, search, strategy picker, Start, tabs and details of the run."""
    same_page.show_build()
    page, server = same_page.page, shared
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # Skip to content
    tab_to(page, "#model-builtin input")
    for downs in (1, 2, 1, 2):  # which entry is highlighted at first depends on how far the page was when it opened
        if value(page, "model.builtin") == "tiny-llama":
            break
        for _ in range(downs):
            page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        settled(page)
        tab_to(page, "#model-builtin input")
    assert value(page, "model.builtin") == "tiny-llama"
    tab_to(page, ".fp-strategy input")
    assert page.evaluate("() => document.activeElement.checked")  # one tab stop, on the selected line
    page.keyboard.press("ArrowDown")
    settled(page)
    assert value(page, "parallel.strategy") == "ddp"
    page.keyboard.press("ArrowUp")
    settled(page)
    assert value(page, "parallel.strategy") == "single"
    for text, number in (("max_steps", "3"), ("num_generations", "2"), ("max_new_tokens", "4"), ("eval_steps", "3")):
        option(page, text)
        replace(page, number)
    assert (value(page, "train.max_steps"), value(page, "eval.num_generations")) == (3, 2)
    tab_to(page, "#fp-start")
    page.keyboard.press("Enter")
    run = run_of(page, server)
    page.wait_for_selector('.fp-run[data-state="done"]', timeout=SLOW_TIMEOUT)
    tab_to(page, ".fp-model summary")
    page.keyboard.press("Enter")
    expect(page.locator(".fp-model pre")).to_be_visible()
    assert page.locator(".fp-results").is_visible()
    assert run.state == "done"


@pytest.mark.soak  # tests/process/test_trained_model.py executes the code, too
def test_own_model_and_data_to_code_that_is_executed(page, server, tmp_path):
    """Your own model folder and JSONL file; the code on the run's page generates with the result."""
    data = tmp_path / "own.jsonl"
    lines = [{"prompt": f"When does train {i} leave?", "completion": f"At {i % 24}:15."} for i in range(60)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    opened(page, server)
    page.locator("#model-source").get_by_text("Local folder", exact=True).click()
    page.locator("#model-path").get_by_role("textbox").fill(str(prepare("tiny-llama", print)))
    page.locator("#data-source").get_by_text("Local files", exact=True).click()
    page.locator("#data-files").get_by_role("textbox").fill(str(data))
    page.locator("#fp-preset-offer").get_by_role("button").click()  # usual values in place of the demo's
    page.locator("#train-duration").get_by_text("Optimizer steps", exact=True).click()
    page.locator("#train-max_steps input").fill("3")
    settled(page)
    expect(page.locator(".fp-status-text")).to_have_text(re.compile("^Can run"))
    page.locator("#fp-start").click()
    run_of(page, server)
    page.wait_for_selector('.fp-run[data-state="done"]', timeout=SLOW_TIMEOUT)
    model = page.locator(".fp-model")
    model.get_by_text("Python code that uses the model").click()
    code = model.locator("pre").inner_text()
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()
