"""The card "Benchmarks" of a run's page. Its process is replaced by fake_benchmark.py; lm-eval itself is in
tests/process."""

import sys
from pathlib import Path

import pytest
from playwright.sync_api import expect
from served import HOME, serving
from test_accessibility import violations
from test_journeys import SLOW_TIMEOUT
from test_trained_model_page import plant

from backend.environments import COMPLETE
from backend.models import benchmark
from backend.models.benchmark import Settings

PYTHON = """#!/bin/sh
case "$*" in
    "-m backend.inference .") exec {python} {fake} ;;
    *) exec {python} "$@" ;;
esac
"""


@pytest.fixture
def measuring(tmp_path):
    """A server whose benchmarks are made by fake_benchmark.py."""
    program = tmp_path / "python"
    fake = Path(__file__).with_name("fake_benchmark.py")
    program.write_text(PYTHON.format(python=sys.executable, fake=fake))
    program.chmod(0o755)
    options = {"FOOTPLATE_TEST_PYTHON": str(program), "PYTHONPATH": str(HOME), "FOOTPLATE_CACHE": str(tmp_path / "c")}
    with serving(tmp_path / "runs", **options) as server:
        yield server


def test_from_the_missing_environment_to_the_samples(measuring, page, tmp_path):
    run = plant(measuring, "measured")
    page.goto(f"{measuring.url}/?tab=run&run={run.id}")
    page.wait_for_selector("body[data-ready]")
    card = page.get_by_role("region", name="Benchmarks")
    expect(card).to_contain_text("lm-eval is not installed. Run footplate env create lm-eval, which downloads 56 MB",
                                 timeout=SLOW_TIMEOUT)  # fmt: skip
    expect(card.get_by_role("button", name="Start benchmark")).to_be_hidden()
    environment = tmp_path / "c/environments/lm-eval"
    environment.mkdir(parents=True)
    (environment / COMPLETE).touch()

    expect(card.get_by_role("button", name="Start benchmark")).to_be_visible(timeout=SLOW_TIMEOUT)
    card.get_by_label("Tasks: lm-eval names").fill("colors.yaml")
    card.get_by_role("button", name="Start benchmark").click()
    expect(page.locator("#fp-toasts")).to_contain_text("colors.yaml of the task file is relative", timeout=SLOW_TIMEOUT)
    card.get_by_label("Tasks: lm-eval names").fill("arc_easy, hellaswag")
    card.get_by_text("Settings", exact=True).click()
    expect(card.get_by_label("Prompts with the chat template")).to_be_checked()
    card.get_by_label("Allow tasks to run code").check()
    card.get_by_label("Samples per task").fill("30")
    card.get_by_role("button", name="Start benchmark").click()
    expect(card).to_contain_text("Measuring the trained model (8 of about 60 requests).", timeout=SLOW_TIMEOUT)
    (job,) = benchmark.find_all(run)
    assert benchmark.read_settings(job.path) == Settings(("arc_easy", "hellaswag"), limit=30, allow_code=True)
    (job.path / "go").touch()

    table = card.get_by_role("table")
    expect(table.locator("tr[data-verdict=better]")).to_contain_text("colors: better", timeout=SLOW_TIMEOUT)
    expect(table.locator("tr[data-verdict=better]")).to_contain_text("20.0%\u00a0±\u00a05.0")
    expect(table.locator("tr[data-verdict=worse]")).to_contain_text("Worse \u2212")
    expect(table.locator("tr[data-verdict=unclear]")).to_contain_text("No clear change")
    expect(table.locator("tr", has_text="perplexity")).to_contain_text("Not compared")
    expect(card).to_contain_text("Prompts with the chat template. Measured with lm-eval 0.4.13")
    expect(card.get_by_label("Allow tasks to run code")).not_to_be_checked()  # the consent was for that benchmark
    link = card.get_by_role("link", name="Download samples")
    assert page.request.get(link.get_attribute("href")).text() == '{"doc_id": 0}\n'
    assert violations(page, ".fp-benchmarks") == []
    card.get_by_role("button", name="Delete benchmark").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(table).to_be_hidden(timeout=SLOW_TIMEOUT)
    assert not benchmark.find_all(run)
