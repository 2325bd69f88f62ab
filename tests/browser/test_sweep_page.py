"""The sweep of a run on its page: a table with the best run first, and lines over parallel axes."""

import json
import re
from datetime import datetime

import pytest
from planted_runs import plant_run
from playwright.sync_api import expect
from same_page import show_run
from test_accessibility import violations

from backend.runs import LOCK, METRICS, RESULT, SPEC, STATE, SWEEP, Plan, sweeps
from backend.runs.folder import Run
from backend.runs.folder import runs as all_runs

SMALL = """
model: {builtin: tiny-llama}
train: {duration: steps, max_steps: 3}
eval: {strategy: steps, steps: 3, num_generations: 0}
save: {strategy: "no"}
"""
RATE, OPTIMIZER = "train.learning_rate", "train.optim"


@pytest.fixture
def build(same_page):
    same_page.show_build()
    return same_page.page


def make(server, number, loss):
    varied = {RATE: 10.0 ** -(3 + number), OPTIMIZER: ("adamw_torch", "lion_32bit")[number % 2]}
    part = sweeps.Member("2026-11-23_090000", varied, 10)
    points = [{"step": 10, "eval_loss": loss}] if loss else []
    return plant_run(server.runs, f"try {number}", {SWEEP: part.to_json(), METRICS: points})


def test_a_sweep_of_four(without_runs, page):
    runs = [make(without_runs, number, loss) for number, loss in enumerate((3.5, 1.25, 2.5, None))]
    show_run(page, runs[2])
    rows = page.locator(".fp-sweep tbody tr")
    expect(rows).to_have_count(4)
    assert [row.split("\t")[-1] for row in rows.all_inner_texts()] == ["1.25", "2.5", "3.5", "\u2013"]
    expect(page.locator(".fp-sweep")).to_contain_text("This run ranks number 2 of 3 by validation loss.")
    expect(page.locator(".fp-sweep th")).to_have_text(
        ["Learning rate", "Optimizer", "State", "Step", "Loss", "Best validation loss"]
    )
    expect(page.locator(".fp-axes-run")).to_have_count(3)
    assert violations(page, ".fp-sweep") == []
    rows.nth(0).locator("a").click()
    expect(page.locator(".fp-run-title h2")).to_have_text("try 1")
    expect(page.locator(".fp-sweep")).to_contain_text("This run ranks number 1 of 3 by validation loss.")
    expect(page.locator(".fp-sweep tr[aria-current]")).to_contain_text("1e-4")


@pytest.mark.soak
def test_the_best_run_by_another_score(without_runs, page):
    """The run with the lowest validation loss has the fewest exact matches; one run has no generations."""
    runs = [make(without_runs, number, loss) for number, loss in enumerate((3.5, 2.5, 1.25))]
    for run, share in zip(runs, (0.75, None, 0.25), strict=True):
        (run.path / LOCK).write_text("supervisor")
        (run.path / STATE).write_text(json.dumps({"started": 1.0, "ended": 9.0, "end": "done"}))
        if share is not None:
            (run.path / RESULT).write_text(json.dumps({"exact_match_after": share}))
    show_run(page, runs[2])
    card = page.locator(".fp-sweep")
    expect(card).to_contain_text("This run ranks number 1 of 3 by validation loss.")
    card.get_by_label("Rank by").select_option("Exact match of generations")
    expect(card).to_contain_text("This run ranks number 2 of 2 by Exact match of generations. Best by Exact match of")
    expect(card).to_contain_text("learning_rate=1e-3 optim=adamw_torch. 1 run has no such score yet.")
    assert [row.split("\t")[-1] for row in card.locator("tbody tr").all_inner_texts()] == ["75.0%", "25.0%", "\u2013"]
    expect(card.locator(".fp-axes-run")).to_have_count(2)
    for run in runs:
        (run.path / RESULT).unlink(missing_ok=True)
    expect(card).to_contain_text("This run ranks number 1 of 3 by validation loss.")  # the chosen score is gone


def test_the_table_follows_a_run_that_is_resumed(without_runs, page):
    """All runs of the sweep had ended."""
    runs = [make(without_runs, number, 2.0) for number in range(2)]
    for run in runs:
        (run.path / LOCK).write_text("supervisor")
        (run.path / STATE).write_text(json.dumps({"started": 1.0, "ended": 9.0, "end": "stopped"}))
    show_run(page, runs[0])
    table = page.locator(".fp-sweep tbody")
    expect(table).to_contain_text("2")
    (runs[1].path / METRICS).write_text(json.dumps({"step": 20, "eval_loss": 0.125}) + "\n")
    expect(table).to_contain_text("0.125")


def enter(page, values, seeds):
    page.click("#fp-sweep")
    card = page.locator("#fp-sweep-form")
    card.get_by_label("Values of Learning rate").fill(values)
    card.get_by_label("Seeds").fill(seeds)
    return card


def test_the_card_says_what_would_start(build):
    page = build
    card = enter(page, "1e-4, 1e-3", "2")
    expect(card.get_by_role("button", name="Start 4 runs")).to_be_enabled()
    expect(card.get_by_role("status")).to_contain_text("learning_rate=1e-4 seed=42, learning_rate=1e-4 seed=43")
    expect(card.get_by_role("status")).to_contain_text(
        re.compile(r"The 4 runs take|How long the runs take is not known: ")
    )
    card.get_by_label("Values of Learning rate").fill("1e-4..1e-3")
    expect(card.get_by_role("status")).to_contain_text("add the number of grid points")
    expect(card.get_by_role("status")).to_have_attribute("data-level", "error")
    card.get_by_label("Values of Learning rate").fill("")
    expect(card.get_by_role("status")).to_have_text("Enter the values of Learning rate.")
    expect(card.get_by_role("status")).to_have_attribute("data-level", "missing")  # nothing is wrong yet
    card.get_by_label("Values of Learning rate").fill("1e-4..1e-3")
    expect(card.get_by_role("button", name="Start runs")).to_be_disabled()
    card.get_by_role("button", name="Add an option").click()
    expect(card.locator(".fp-sweep-row")).to_have_count(2)
    card.get_by_label("Option 2").select_option("train.weight_decay")
    expect(card.get_by_label("Values of Weight decay")).to_have_attribute("placeholder", "now 0")
    for rows in range(3, 9):
        card.get_by_role("button", name="Add an option").click()
        expect(card.locator(".fp-sweep-row")).to_have_count(rows)
    expect(card.get_by_role("button", name="Add an option")).to_be_hidden()
    card.get_by_label("Seeds").fill("60")
    card.get_by_label("Seeds").press("Tab")
    expect(card.get_by_label("Seeds")).to_have_value("50")
    card.get_by_role("button", name="Close").click()
    expect(card).to_be_hidden()


@pytest.mark.soak
def test_the_card_keeps_its_values_after_a_reload(build):
    page = build
    enter(page, "1e-4..1e-3", "2")
    page.reload()
    page.click("#fp-sweep")
    expect(page.locator("#fp-sweep-form").get_by_label("Values of Learning rate")).to_have_value("1e-4..1e-3")


@pytest.mark.soak
def test_a_late_answer_about_other_values_starts_nothing(build):
    """The response for the values before an edit arrives just after the edit, before the next request is sent."""
    page, held = build, []
    page.route("**/api/sweeps/check", lambda route: held.append(route))
    card = enter(page, "1e-4, 1e-3", "2")
    expect(card.get_by_role("button", name="Start runs")).to_be_disabled()
    while not held:
        page.wait_for_timeout(20)
    page.wait_for_timeout(600)  # longer than the pause before a check: no other request is sent
    last = held.pop()
    card.get_by_label("Values of Learning rate").evaluate(
        """(field) => { field.value = "1e-4..1e-3"; field.dispatchEvent(new Event("input", { bubbles: true })); }"""
    )
    last.continue_()
    page.unroute("**/api/sweeps/check")
    expect(card.get_by_role("status")).to_contain_text("add the number of grid points")
    expect(card.get_by_role("button", name="Start runs")).to_be_disabled()


@pytest.mark.soak
def test_a_sweep_from_the_page(server, new_page, tmp_path):
    """Four runs that really train: two learning rates, two seeds."""
    page = new_page
    (tmp_path / "small.yaml").write_text(SMALL)
    page.goto(server.url)
    page.wait_for_selector("body[data-ready]")
    page.locator("#fp-import-file").set_input_files(tmp_path / "small.yaml")
    card = enter(page, "1e-4, 1e-2", "2")
    card.get_by_role("button", name="Start 4 runs").click()
    rows = page.locator(".fp-sweep tbody tr")
    expect(rows).to_have_count(4)
    expect(page.locator(".fp-sweep")).to_contain_text("of 4 by validation loss", timeout=300_000)
    expect(rows.filter(has_text="Done")).to_have_count(4)
    losses = [float(text.split("\t")[-1]) for text in rows.all_inner_texts()]
    assert losses == sorted(losses) and losses[0] < losses[-1]
    assert {run.state for run in all_runs(server.runs)} == {"done"}


@pytest.mark.parametrize("is_reloaded", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_the_list_groups_the_runs_of_a_sweep(without_runs, same_page, is_reloaded):
    """It shows what differs first, so that it stays visible where the end of a name is cut. A run without a sweep stays
    by itself."""
    server, page = without_runs, same_page.page
    page.set_viewport_size({"width": 390, "height": 900})
    base = "smollm2-135m-instruct LoRA on a long name of a data set"
    for rate in (1e-4, 1e-3):
        part = sweeps.Member("2026-11-23_090000", {RATE: rate, OPTIMIZER: "adamw_torch"})
        plan = Plan(("true",), files={SPEC: "", SWEEP: part.to_json()})
        Run.create(server.runs, f"{base} {sweeps.label(part.varied)}", plan, datetime.now())
    Run.create(server.runs, "alone", Plan(("true",), files={SPEC: ""}), datetime.now())
    page.evaluate("() => footplate.showView('runs')")
    links = page.locator(".fp-runs-link")
    for width in (1024, 390):
        page.set_viewport_size({"width": width, "height": 900})
        expect(links).to_have_count(3)
        visible = [text.split("=")[1][:5].strip() for text in links.all_inner_texts() if "=" in text]
        assert len(set(visible)) == 2 and not any(base in text for text in links.all_inner_texts())
    heading = page.locator(".fp-runs-fold")
    expect(heading).to_contain_text(base)
    expect(heading).to_contain_text("Sweep: 2 runs, 2 new")
    heading.click()
    expect(links).to_have_text(["alone"])
    if is_reloaded:
        page.reload()
        expect(links).to_have_text(["alone"])  # the browser remembers that the sweep is folded
    page.locator(".fp-runs-fold").click()
    expect(links).to_have_count(3)
    page.set_viewport_size({"width": 1024, "height": 900})
    page.get_by_role("button", name="Name", exact=True).click()
    expect(heading).to_have_count(0)
    assert base in links.nth(1).inner_text() and links.nth(1).inner_text().startswith("learning_rate=")
    same_page.leave()
