"""The sweep of a run on its page: a table with the best run first, and lines over parallel axes."""

import json
from datetime import datetime

from playwright.sync_api import expect

from backend.runs import METRICS, SPEC, SWEEP, Plan, sweeps
from backend.runs.folder import Run

RATE, OPTIMIZER = "train.learning_rate", "train.optim"


def make(server, number, loss):
    varied = {RATE: 10.0 ** -(3 + number), OPTIMIZER: ("adamw_torch", "lion_32bit")[number % 2]}
    part = sweeps.Member("2026-11-23_090000", varied, 10)
    plan = Plan(("true",), files={SPEC: "", SWEEP: part.to_json()})
    run = Run.create(server.runs, f"try {number}", plan, datetime.now())
    if loss:
        (run.path / METRICS).write_text(json.dumps({"step": 10, "eval_loss": loss}) + "\n")
    return run


def test_a_sweep_of_four(server, page):
    runs = [make(server, number, loss) for number, loss in enumerate((3.5, 1.25, 2.5, None))]
    page.goto(f"{server.url}/?tab=run&run={runs[2].id}")
    rows = page.locator(".fp-sweep tbody tr")
    expect(rows).to_have_count(4, timeout=60_000)
    assert [row.split("\t")[-1] for row in rows.all_inner_texts()] == ["1.25", "2.5", "3.5", "\u2013"]
    expect(page.locator(".fp-sweep")).to_contain_text("This run is number 2 of 3 by validation loss.")
    expect(page.locator(".fp-sweep th")).to_have_text(
        ["Learning rate", "Optimizer", "State", "Step", "Loss", "Best validation loss"]
    )
    expect(page.locator(".fp-axes-run")).to_have_count(3)
    rows.nth(0).locator("a").click()
    expect(page.locator(".fp-run-title h2")).to_have_text("try 1")
    expect(page.locator(".fp-sweep")).to_contain_text("This run is number 1 of 3 by validation loss.")
    expect(page.locator(".fp-sweep tr[aria-current]")).to_contain_text("1e-4")
