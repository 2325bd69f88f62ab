"""A failed run in the browser: the cause, and a change that is made with one click in a copy of the run."""

import json
import sys
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import expect
from same_page import show_run

from backend.config import RunSpec
from backend.config.options import edit
from backend.machine import probe
from backend.paths import HOME
from backend.runs import EVENTS

sys.path.append(str(HOME / "tests" / "unit"))
from failed_runs import ended, failed_run, planted_run

ERROR = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader"
TRAINING_TIMEOUT = 180_000  # ms; other tests use the same cores
PROCESS_BYTES = 6_300_000_000  # between what batches of 32 and of 64 examples need, both measured
LARGE_BATCH = """
model: {{builtin: tiny-llama}}
data: {{source: files, files: [{data}], max_length: 1024}}
train: {{stage: pretraining, duration: steps, max_steps: 1, per_device_train_batch_size: 64}}
"""


def test_a_remedy_opens_a_copy_that_passes_the_checks(shared, page):
    spec = edit(RunSpec(), {"model.builtin": "tiny-llama", "train.dataloader_num_workers": 2, "train.seed": 7})
    run = failed_run(shared.runs, spec, probe(Path.cwd()), ERROR)
    show_run(page, run)
    failure = page.locator(".fp-failure")
    expect(failure.locator(".fp-failure-text")).to_contain_text("shared memory (/dev/shm)")
    expect(failure.locator(".fp-remedies")).to_contain_text("DataLoader workers: 2 \u2192 0")
    failure.get_by_role("button", name="Copy into form with this change").click()

    expect(page.locator("#fp-toasts")).to_contain_text("with one change: Load data without worker processes.")
    expect(page.locator("#fp-status")).to_have_attribute("data-fresh", "yes")
    values = page.evaluate("footplate.values()")
    assert values["train.dataloader_num_workers"] == 0 and values["train.seed"] == 7
    expect(page.locator(".fp-status-text")).to_contain_text("Can run")
    expect(page.locator("#fp-start")).to_be_enabled()

    page.go_back()
    failure.get_by_role("button", name="DataLoader workers").click()
    expect(page.locator("#train-dataloader_num_workers input")).to_be_focused()
    assert page.evaluate("footplate.values()")["train.dataloader_num_workers"] == 2


def test_options_have_their_label_in_the_sentence(shared, page):
    spec = edit(RunSpec(), {"parallel.strategy": "ddp", "launch.nproc_per_node": 2})
    error = "RuntimeError: [gloo/unbound_buffer.cc:81] Timed out waiting 60000ms for recv"
    run = failed_run(shared.runs, spec, probe(Path.cwd()), error)
    show_run(page, run)
    sentence = page.locator(".fp-failure-text")
    text = "A rank waited longer than Distributed timeout for the other ranks."
    expect(sentence).to_have_text(text)
    expect(sentence.get_by_role("button", name="Distributed timeout")).to_be_visible()


def test_a_run_whose_loss_rose_offers_a_lower_learning_rate(shared, page):
    """It did not fail, so the changes are below its alert."""
    spec = edit(RunSpec(), {"model.builtin": "tiny-llama", "train.learning_rate": 0.5})
    run = planted_run(shared.runs, spec, probe(Path.cwd()), "rise")
    text = "The loss rose from 10.8 to 1,588. Lower the learning rate."
    (run.path / EVENTS).write_text(json.dumps({"kind": "loss rise", "step": 32, "text": text, "time": 1}) + "\n")
    ended(run, end="done", exit_code=0)
    show_run(page, run)
    alerts = page.locator(".fp-alerts")
    expect(alerts).to_contain_text(text)
    change = alerts.locator(".fp-remedies li", has_text="Learning rate 2e-4")
    change.get_by_role("button", name="Copy into form with this change").click()
    expect(page.locator("#fp-toasts")).to_contain_text("with one change: Learning rate 2e-4.")
    assert float(page.evaluate("footplate.values()")["train.learning_rate"]) == 2e-4


def test_a_run_that_the_user_stopped_after_a_spike_offers_nothing(shared, page):
    run = planted_run(shared.runs, edit(RunSpec(), {"model.builtin": "tiny-llama"}), probe(Path.cwd()), "stopped")
    text = "The loss rose to 9; the median of the last 50 points is 2."
    (run.path / EVENTS).write_text(json.dumps({"kind": "loss spike", "step": 32, "text": text, "time": 1}) + "\n")
    ended(run, end="stopped", exit_code=0)
    asked = []

    def remember(request):
        asked.append(request.url)

    page.on("request", remember)
    show_run(page, run)
    expect(page.locator(".fp-alerts")).to_contain_text(text)
    page.remove_listener("request", remember)
    assert any(url.endswith(run.id) for url in asked)
    assert not [url for url in asked if url.endswith("/remedies")]


@pytest.mark.soak
def test_out_of_memory_is_mended_with_one_click(server, new_page, tmp_path):
    """A batch needs more memory than a process may have, as in a container; the first remedy halves it."""
    page = new_page
    psutil.Process(server.process.pid).rlimit(psutil.RLIMIT_DATA, (PROCESS_BYTES, PROCESS_BYTES))  # runs inherit it
    text = " ".join(f"word{number % 97}" for number in range(1200))
    (tmp_path / "long.jsonl").write_text(64 * f'{{"text": "{text}"}}\n')
    (tmp_path / "large-batch.yaml").write_text(LARGE_BATCH.format(data=tmp_path / "long.jsonl"))
    page.goto(server.url)
    page.wait_for_selector("body[data-ready]")
    page.locator("#fp-import-file").set_input_files(tmp_path / "large-batch.yaml")
    expect(page.locator(".fp-status-text")).to_contain_text("Can run")
    start(page)
    failure = page.locator(".fp-failure")
    expect(failure.locator(".fp-failure-text")).to_contain_text("ran out of CPU memory (RAM)", timeout=TRAINING_TIMEOUT)
    remedy = failure.locator(".fp-remedies li").first
    expect(remedy).to_contain_text("Batch size 32 with more gradient accumulation")
    remedy.get_by_role("button", name="Copy into form with this change").click()
    start(page)
    expect(page.locator('.fp-run[data-state="done"]')).to_be_visible(timeout=TRAINING_TIMEOUT)


def start(page):
    """Start a run that passes the checks."""
    expect(page.locator("#fp-status")).to_have_attribute("data-fresh", "yes")
    page.click("#fp-start")
