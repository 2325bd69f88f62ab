"""The first result card says whether the training has improved the generations."""

import json
from pathlib import Path

import pytest
from playwright.sync_api import expect
from test_trained_model_page import plant

from backend.runs import RESULT


@pytest.mark.parametrize(
    ("before", "after", "text", "gain"),
    [(0.0, 0.0, "no improvement by the training", False), (0.25, 0.5, "before and after training", True)],
)
def test_a_gain_and_none(server, page, before, after, text, gain):
    run = plant(server, "results")
    scores = {"exact_match_before": before, "exact_match_after": after}
    Path(run.path, RESULT).write_text(json.dumps({"steps": 3, "model": "model", **scores}))
    page.goto(f"{server.url}/?tab=run&run={run.id}")
    card = page.locator(".fp-results .fp-large")
    expect(card).to_contain_text(text, timeout=30_000)
    expect(card.locator("strong")).to_have_count(int(gain))  # green
