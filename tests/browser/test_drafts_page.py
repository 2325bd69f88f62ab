"""Drafts and presets: two tabs have two drafts, and values of a demo preset do not stay with other data."""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import expect, sync_playwright

from tests.browser.served import CHROMIUM, FLAGS, serving

TIMEOUT = 20_000


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafts") / "runs"
    folder.mkdir()
    with serving(folder) as server, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield server, browser
        browser.close()


@pytest.fixture
def context(served):
    _, browser = served
    context = browser.new_context(viewport={"width": 1440, "height": 1000})
    context.set_default_timeout(TIMEOUT)
    yield context
    context.close()


def opened(context, url):
    page = context.new_page()
    page.goto(url)
    page.wait_for_selector("body[data-ready]")
    settled(page)
    return page


def settled(page):
    page.wait_for_function("() => document.querySelector('#fp-status').dataset.fresh === 'yes'")


def fill(page, name, text):
    page.locator(f"#{name.replace('.', '-')} :is(input, textarea)").first.fill(str(text))
    settled(page)


def value(page, name):
    return page.evaluate("name => footplate.values()[name]", name)


def test_two_tabs_have_two_drafts(context, served):
    """The second tab continues with the values of the first, and then neither changes the other's."""
    server, _ = served
    first = opened(context, server.url)
    fill(first, "train.max_steps", 7)
    same_address = first.url
    second = opened(context, server.url)
    assert value(second, "train.max_steps") in (7, "7")
    third = opened(context, same_address)  # a duplicated tab
    fill(second, "train.max_steps", 8)
    fill(third, "train.max_steps", 9)
    pages = {7: first, 8: second, 9: third}
    assert len({page.url for page in pages.values()}) == 3
    for steps, page in pages.items():
        address = page.url
        page.reload()
        page.wait_for_selector("body[data-ready]")
        settled(page)
        assert page.url == address
        assert int(value(page, "train.max_steps")) == steps


def test_the_name_follows_the_model_until_it_is_typed(context, served):
    server, _ = served
    page = opened(context, server.url)
    name = page.locator("#logging-run_name :is(input, textarea)")
    expect(name).to_have_value("")
    expect(name).to_have_attribute("placeholder", "smollm2-135m-instruct LoRA")
    page.locator("#model-builtin input").click()
    page.get_by_role("option", name="Tiny").first.click()
    settled(page)
    expect(name).to_have_attribute("placeholder", "tiny-llama LoRA")
    fill(page, "logging.run_name", "mine")
    page.locator("#model-builtin input").click()
    page.get_by_role("option", name="SmolLM2").first.click()
    settled(page)
    expect(name).to_have_value("mine")


def test_values_of_a_demo_preset_are_offered_to_be_replaced(context, served, tmp_path):
    server, _ = served
    data = tmp_path / "mine.jsonl"
    example = {"prompt": "Which train?", "completion": "The 7:32 to Basel."}
    data.write_text("".join(json.dumps(example) + "\n" for _ in range(300)))
    page = opened(context, server.url)
    offer = page.locator("#fp-preset-offer")
    expect(offer).to_be_hidden()
    page.locator("#data-source").get_by_text("Local files", exact=True).click()
    fill(page, "data.files", data)
    expect(offer).to_contain_text("values are still those of the preset First run")
    expect(offer).to_contain_text("Learning rate: 0.003 \u2192 2e-4")
    page.reload()
    page.wait_for_selector("body[data-ready]")
    settled(page)
    expect(offer).to_be_visible()
    offer.get_by_role("button").click()
    settled(page)
    assert float(value(page, "train.learning_rate")) == 0.0002
    assert value(page, "train.duration") == "epochs"
    expect(offer).to_be_hidden()
    page.locator(".fp-toast").get_by_role("button", name="Undo").click()
    settled(page)
    assert float(value(page, "train.learning_rate")) == 0.003


def test_wrong_columns_are_one_finding(context, served, tmp_path):
    """And no safe fix turns off the validation for it."""
    server, _ = served
    data = tmp_path / "wrong.jsonl"
    data.write_text("".join(json.dumps({"kunde": f"Frage {i}", "meldung": f"Antwort {i}"}) + "\n" for i in range(200)))
    page = opened(context, server.url)
    page.locator("#data-source").get_by_text("Local files", exact=True).click()
    fill(page, "data.files", data)
    page.wait_for_timeout(3000)  # until the worker process has read the examples
    settled(page)
    expect(page.locator(".fp-finding")).to_have_count(1)
    expect(page.locator(".fp-finding")).to_contain_text("matches no data format by its columns")
    expect(page.locator("#fp-fix-all")).to_be_hidden()
    expect(page.locator(".fp-status-text")).to_have_text("Cannot run: 1 error")
