"""The card "Your model" of a run's page: what it is, its code, its download, and training further."""

import io
import json
import sys
import zipfile
from pathlib import Path

import pytest
from playwright.sync_api import expect
from same_page import show_run
from test_journeys import SLOW_TIMEOUT, value, wait_for_status

from backend.config import RunSpec
from backend.config.options import edit
from backend.machine import probe
from backend.runs import RESULT

sys.path.append(str(Path(__file__).parent.parent / "unit"))
from failed_runs import ended, planted_run

FULL = {"method.kind": "full", "model.builtin": "tiny-llama"}
FILES = {"config.json": {"architectures": ["LlamaForCausalLM"]}, "tokenizer_config.json": {"chat_template": "x"}}


@pytest.fixture
def server(shared):
    return shared


@pytest.fixture
def page(same_page):
    return same_page.page


def plant(server, name):
    """A run that has finished, with a model of 2 MB."""
    run = planted_run(server.runs, edit(RunSpec(), FULL), probe(Path.cwd()), name)
    folder = run.path / "model"
    folder.mkdir()
    for file, content in FILES.items():
        (folder / file).write_text(json.dumps(content))
    (folder / "model.safetensors").write_bytes(bytes(2_000_000))
    ended(run, end="done", exit_code=0)
    (run.path / RESULT).write_text(json.dumps({"steps": 3, "model": "model"}))
    return run


def test_the_card_of_a_trained_model(server, page):
    run = plant(server, "trained")
    show_run(page, run)
    card = page.get_by_role("region", name="Your model")
    expect(card).to_contain_text("Full weights, 2 MiB", timeout=SLOW_TIMEOUT)
    expect(card).to_contain_text(str(run.path / "model"))
    expect(card.locator("pre")).to_be_hidden()
    card.get_by_text("Python code that uses it").click()
    expect(card.locator("pre")).to_contain_text("AutoModelForCausalLM.from_pretrained(folder")
    link = card.get_by_role("link", name="Download")
    response = page.request.get(link.get_attribute("href"))
    assert response.headers["content-disposition"].startswith(f'attachment; filename="{run.id}')
    with zipfile.ZipFile(io.BytesIO(response.body())) as archive:
        assert sorted(name.rpartition("/")[2] for name in archive.namelist()) == sorted([*FILES, "model.safetensors"])
    card.get_by_role("button", name="Train further").click()
    wait_for_status(page, "")
    page.wait_for_function("footplate.values()['model.source'] === 'path'")
    assert value(page, "model.source") == "path" and value(page, "model.path") == str(run.path / "model")
    assert value(page, "method.kind") == "full"


def test_an_adapter_is_trained_further_when_it_is_merged(server, page):
    run = plant(server, "adapter")
    (run.path / "model/model.safetensors").unlink()
    (run.path / "model/config.json").unlink()
    base = {"base_model_name_or_path": "tiny-llama", "peft_type": "LORA"}
    (run.path / "model/adapter_config.json").write_text(json.dumps(base))
    (run.path / "model/adapter_model.safetensors").write_bytes(bytes(1000))
    samples = [{"prompt": "2 + 2?", "reference": "4", "before": "no", "after": "4"}]
    (run.path / RESULT).write_text(json.dumps({"steps": 3, "model": "model", "samples": samples}))
    show_run(page, run)
    card = page.get_by_role("region", name="Your model")
    expect(card).to_contain_text("Adapter for", timeout=SLOW_TIMEOUT)
    card.get_by_role("button", name="Generations before and after").click()
    expect(page.locator(".fp-samples")).to_be_in_viewport()
    card.get_by_role("button", name="Copy into form with Merge adapter").click()
    page.wait_for_function("footplate.values()['save.merge_adapter'] === true")


def test_a_run_without_a_model_has_no_card(server, page):
    run = plant(server, "unfinished")
    (run.path / "model/model.safetensors").unlink()
    show_run(page, run)
    expect(page.locator(".fp-run h2")).to_have_text("unfinished", timeout=SLOW_TIMEOUT)
    expect(page.locator(".fp-model")).to_be_hidden()


def test_nothing_of_the_previous_run_stays_while_another_is_opened(server, page):
    first, second = plant(server, "first"), plant(server, "second")
    show_run(page, first)
    expect(page.locator(".fp-run-placement")).to_be_visible(timeout=SLOW_TIMEOUT)
    page.route(f"**/api/runs/{second.id}", lambda route: None)  # no response
    page.evaluate("id => footplate.showView('run', id)", second.id)
    expect(page.locator(".fp-run-placement")).to_be_hidden()
    expect(page.locator(".fp-model")).to_be_hidden()
    page.unroute_all(behavior="ignoreErrors")


def test_an_adapter_is_merged(server, page):
    """The states of the card; tests/process/test_merge.py merges for real."""
    run = planted_run(server.runs, edit(RunSpec(), {"model.builtin": "tiny-llama"}), probe(Path.cwd()), "adapter")
    folder = run.path / "model"
    folder.mkdir()
    for file, content in {**FILES, "adapter_config.json": {"base_model_name_or_path": "some/model"}}.items():
        (folder / file).write_text(json.dumps(content))
    (folder / "adapter_model.safetensors").write_bytes(bytes(20_000))
    ended(run, end="done", exit_code=0)
    (run.path / RESULT).write_text(json.dumps({"steps": 3, "model": "model"}))
    show_run(page, run)
    card = page.get_by_role("region", name="Your model")
    card.get_by_role("button", name="Merge into base model").click(timeout=SLOW_TIMEOUT)
    expect(card.locator(".fp-merge-failure")).to_contain_text("spec.yaml", timeout=SLOW_TIMEOUT)
    expect(card.get_by_role("button", name="Merge again")).to_be_visible()
