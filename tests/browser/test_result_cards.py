"""The first result card says whether the training has improved the generations."""

import json
from pathlib import Path

import pytest
from playwright.sync_api import expect
from same_page import show_run
from test_trained_model_page import plant

from backend.runs import RESULT


@pytest.fixture
def server(shared):
    return shared


@pytest.fixture
def page(same_page):
    return same_page.page


@pytest.mark.parametrize(
    ("before", "after", "text", "gain"),
    [
        ((0, 0.1), (0, 0.1), "No improvement: exact match on validation examples is 0% before and after training.",
         False),
        ((0.25, 0.1), (0.5, 0.4), "Training raised exact match on validation examples from 25% to 50%.", True),
        ((0.5, 0.1), (0.25, 0.4), "Training lowered exact match on validation examples from 50% to 25%.", False),
        ((0, 0.4), (0, 0.1), "Training lowered ROUGE-L from 40 to 10 of 100. "
         "Exact match on validation examples is still 0%.", False),
    ],
)  # fmt: skip
def test_a_gain_a_loss_and_neither(server, page, before, after, text, gain):
    run = plant(server, "results")
    pairs = [("exact_match", 0), ("rouge_l", 1), ("bleu", 1)]
    scores = {f"{name}_{when}": of[i] for name, i in pairs for when, of in (("before", before), ("after", after))}
    Path(run.path, RESULT).write_text(json.dumps({"steps": 3, "model": "model", **scores}))
    show_run(page, run)
    expect(page.locator(".fp-gain")).to_have_text(text)
    card = page.locator(".fp-results .fp-large")
    expect(card.locator("strong")).to_have_count(int(gain))  # green
    expect(page.locator(".fp-result dt")).to_contain_text(["Exact match on validation examples", "ROUGE-L", "BLEU"])


def test_a_change_on_few_examples_is_no_alarm(server, page):
    run = plant(server, "few")
    samples = [{"prompt": "2 + 2?", "reference": "4", "before": "4", "after": "no"}] * 2
    scores = {"exact_match_before": 0.5, "exact_match_after": 0.0}
    Path(run.path, RESULT).write_text(json.dumps({"steps": 3, "model": "model", "samples": samples, **scores}))
    show_run(page, run)
    gain = page.locator(".fp-gain")
    expect(gain).to_contain_text("from 50% to 0%. This was measured on 2 examples, which is too few to tell.")
    expect(gain).to_have_attribute("data-change", "same")


def test_generations_are_filtered_by_what_training_changed(server, page):
    run = plant(server, "generations")
    pairs = [("no", "4")] * 5 + [("4", "no")] * 2 + [("4", "4"), ("no", "no")]
    samples = [
        {"prompt": f"2 + 2? {i}", "reference": "4", "before": before, "after": after}
        for i, (before, after) in enumerate(pairs)
    ]
    Path(run.path, RESULT).write_text(json.dumps({"steps": 3, "model": "model", "samples": samples}))
    show_run(page, run)
    rows = page.locator(".fp-samples tbody tr:visible")
    expect(rows).to_have_count(3)
    expect(page.locator(".fp-sample-filters button")).to_have_text(["All 9", "Better 5", "Worse 2", "Same 2"])
    page.get_by_role("button", name="Worse 2").click()
    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text("2 + 2? 5")
    page.get_by_role("button", name="Better 5").click()
    expect(rows).to_have_count(3)
    page.get_by_role("button", name="Show all 5").click()
    expect(rows).to_have_count(5)
