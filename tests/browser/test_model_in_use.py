"""From one finished First run, in the browser and with nothing replaced but the Hub: chat, evaluation, merge, export as
GGUF, publishing and training further. The environment `gguf` is created if it is missing, which needs PyPI."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from fake_hub_uploads import GOOD
from playwright.sync_api import expect
from same_page import show_run
from test_journeys import SLOW_TIMEOUT
from test_whole_journeys import run_of, settled

from backend import environments, paths
from backend.models import chat
from backend.runs import jobs
from backend.runs.folder import ALIVE, Run, runs

pytestmark = pytest.mark.soak
TIMEOUT = 20 * 60_000  # ms
SENTENCE = "my train is EC805 out of Warsaw to Valencia, it goes at 07:55, dont be late Kira"


@pytest.fixture(scope="module")
def trained(request):
    """The finished run, and the page that shows it."""
    return {}


@pytest.fixture
def page(same_page, shared, trained):
    """The page of First run, which the first test starts."""
    page = same_page.page
    if "run" not in trained:
        same_page.show_build()
        page.locator("#fp-presets").select_option("first-run")
        settled(page)
        page.locator("#fp-start").click()
        trained["run"] = run_of(page, shared)
        page.wait_for_selector('.fp-run[data-state="done"]', timeout=TIMEOUT)
    show_run(page, trained["run"])
    return page


@pytest.fixture
def run(page, trained):
    return trained["run"]


def card(page, name):
    found = page.get_by_role("region", name=name)
    expect(found).to_be_visible(timeout=SLOW_TIMEOUT)
    return found


def test_the_trained_model_answers_and_stops_and_the_base_model_answers_otherwise(page, run):
    chatting = card(page, "Chat")
    chatting.get_by_role("button", name="Chat with this model").click()
    chatting.get_by_label("Compare with the base model").check(timeout=TIMEOUT)
    chatting.get_by_label("Prompt", exact=True).fill(SENTENCE)
    chatting.get_by_label("Prompt", exact=True).press("Enter")
    trained, base = (chatting.locator(f".fp-chat-output[data-side={side}]") for side in ("trained", "base"))
    expect(trained).to_contain_text("ended with <|im_end|>", timeout=TIMEOUT)
    expect(base).to_contain_text("tokens in", timeout=TIMEOUT)
    answer = json.loads(trained.locator(".fp-chat-text").inner_text())
    assert answer["train"] == "EC 805" and answer["from"] == "Warsaw"
    assert trained.locator(".fp-chat-text").inner_text() != base.locator(".fp-chat-text").inner_text()
    chatting.get_by_role("button", name="End chat").click()
    expect(chatting.get_by_role("button", name="End chat")).to_be_hidden(timeout=SLOW_TIMEOUT)
    assert chat.current(run) is not None


def test_an_evaluation_says_what_is_certain(page, run):
    evaluating = card(page, "Evaluation")
    evaluating.get_by_role("button", name="Evaluate").click()
    scores = evaluating.locator(".fp-scores")
    expect(scores).to_be_visible(timeout=TIMEOUT)
    exact = scores.get_by_role("row", name="Exact match")
    expect(exact).to_have_attribute("data-verdict", "better")
    expect(scores.get_by_role("row", name="Loss per token on general texts")).to_be_visible()


def test_merged_and_exported_with_a_certificate(page, run):
    if "gguf" not in environments.created():
        environments.create("gguf", lambda line: None)
    model = card(page, "Your model")
    model.get_by_role("button", name="Merge into base model").click()
    expect(model).to_contain_text("Verified. Loaded from its files", timeout=TIMEOUT)
    model.get_by_role("button", name="Export as GGUF").click()
    expect(model).to_contain_text("Verified with limitations. Compared in llama.cpp", timeout=TIMEOUT)


def test_a_dropped_adapter_is_found(page, run):
    """The merged weights are replaced by those of the base model."""
    job = jobs.find_all(run, jobs.MERGE)[0]
    base = Path(paths.model_folder("smollm2-135m-instruct"))
    kept = shutil.copy(job.path / "model/model.safetensors", job.path / "kept")
    shutil.copy(base / "model.safetensors", job.path / "model/model.safetensors")
    model = card(page, "Your model")
    model.get_by_label("GGUF format").select_option("f16")
    model.get_by_role("button", name="Export as GGUF").click()
    failure = model.locator(".fp-job-failure")
    expect(failure).to_contain_text("f16: ", timeout=TIMEOUT)
    expect(failure).to_contain_text("deleted")
    shutil.move(kept, job.path / "model/model.safetensors")


def test_published_on_the_hub(page, shared, run):
    token = Path(shared.variables["HF_HOME"]) / "token"
    token.parent.mkdir(exist_ok=True)
    token.write_text(GOOD)
    model, dialog = card(page, "Your model"), page.get_by_role("dialog")
    model.get_by_role("button", name="Publish").click()
    dialog.get_by_label("Repository").fill("trains-of-first-run")
    dialog.locator("button.fp-primary, button[type=submit]").last.click()
    expect(dialog).to_contain_text("adapter_model.safetensors", timeout=SLOW_TIMEOUT)
    dialog.get_by_role("button", name="Publish").click()
    link = model.get_by_role("link", name="ada/trains-of-first-run", exact=True)
    expect(link).to_be_visible(timeout=TIMEOUT)
    token.unlink()


def test_the_adapter_is_trained_further(page, shared, run):
    card(page, "Your model").get_by_role("button", name="Train further", exact=True).click()
    page.wait_for_function("path => footplate.values()['lora.adapter_path'] === path", arg=str(run.path / "model"))
    page.locator("#train-max_steps input").fill("2")
    settled(page)
    page.locator("#fp-start").click()
    page.wait_for_function("id => !location.search.includes(id)", arg=f"run={run.id}", timeout=SLOW_TIMEOUT)
    later = run_of(page, shared)
    page.wait_for_selector('.fp-run[data-state="done"]', timeout=TIMEOUT)
    log = (later.path / "log.txt").read_text()
    assert f"Continuing the adapter in {run.path / 'model'}." in log
    started = later.result()["exact_match_before"]
    assert started == run.result()["exact_match_after"] > 0.5, "it starts where the first run has ended"
    assert all(Run(each.path).state not in ALIVE for each in runs(shared.runs))
