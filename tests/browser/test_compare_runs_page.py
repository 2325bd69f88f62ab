"""Two runs are selected in the list and compared; the link brings the same view back."""

import json
from datetime import datetime

from playwright.sync_api import expect

from backend.runs import LOCK, METRICS, RESULT, SPEC, Plan
from backend.runs.folder import Run

TIMEOUT = 60_000  # ms; other tests use the same cores
OUTPUTS = {"small rank": "4", "large rank": "5"}


def make(server, name, rank):
    """A run as it looks after training."""
    plan = Plan(("true",), files={SPEC: f"lora:\n  r: {rank}\n"})
    run = Run.create(server.runs, name, plan, datetime.now())
    points = [
        {"step": step, "time": 100 + 2 * step, "tokens": 1000 * rank * step, "loss": 5 / step} for step in range(1, 31)
    ]
    points.append({"step": 30, "time": 161, "eval_loss": rank / 8})
    (run.path / METRICS).write_text("".join(json.dumps(point) + "\n" for point in points))
    (run.path / LOCK).touch()
    sample = {"prompt": "What is 2 + 2?", "reference": "4", "before": "", "after": OUTPUTS[name]}
    (run.path / RESULT).write_text(json.dumps({"samples": [sample], "seconds": 60, "peak_bytes": [2**30]}))
    return run


def cells(page, section):
    return [row.split("\t") for row in page.locator(f"{section} tbody tr").all_inner_texts()]


def test_two_runs_are_compared(server, page):
    small, large = make(server, "small rank", 8), make(server, "large rank", 16)
    page.goto(f"{server.url}/?tab=runs")
    compare = page.locator(".fp-runs-compare")
    page.get_by_label("Select small rank").check(timeout=TIMEOUT)
    expect(compare).to_have_attribute("aria-disabled", "true")
    page.get_by_label("Select large rank").check()
    compare.click()
    expect(page.locator("#fp-compare-page h2")).to_have_text("Compare 2 runs", timeout=TIMEOUT)
    expect(page.locator("#fp-compare-page .fp-chart:visible h4")).to_have_text(["Loss"])
    expect(page.locator("#fp-compare-page .fp-plot canvas")).to_have_count(1)
    expect(page.locator(".fp-compare-options code")).to_have_text(["lora.r"])
    assert [row[1:] for row in cells(page, ".fp-compare-options")] == [["8", "16"]]
    assert [row[4:8] for row in cells(page, ".fp-compare-results")] == [
        ["1 at 30", "1 min 00 s", "\u2013", "1.0 GiB"], ["2 at 30", "1 min 00 s", "\u2013", "1.0 GiB"],
    ]  # fmt: skip
    marks = page.locator(".fp-compare-samples .fp-generation")
    assert [mark.get_attribute("data-correct") for mark in marks.all()] == ["true", "false"]

    page.get_by_role("button", name="Tokens", exact=True).click()
    assert "x=tokens" in page.url
    with page.expect_response(lambda response: "x=tokens" in response.url):
        page.reload()
    expect(page.get_by_role("button", name="Tokens", exact=True)).to_have_attribute("aria-pressed", "true")
    expect(page.locator("#fp-compare-page .fp-plot canvas")).to_have_count(1, timeout=TIMEOUT)
    assert "x=tokens" in page.locator("#fp-compare-page a", has_text="PNG").get_attribute("href")
    page.go_back()
    expect(page.get_by_role("button", name="Step", exact=True)).to_have_attribute("aria-pressed", "true")
    assert "x=" not in page.url
    page.go_back()
    expect(page.locator(".fp-runs-table")).to_be_visible()

    large.delete()
    page.go_forward()
    expect(page.locator(".fp-compare-problems")).to_contain_text(large.id, timeout=TIMEOUT)
    assert [row[0].strip() for row in cells(page, ".fp-compare-results")] == [small.name]
