"""The progress text of a run agrees with its state and phase, also in a second window and after a restart elsewhere."""

import json
import sys
import time
from datetime import datetime

import pytest
from playwright.sync_api import expect
from same_page import show_run

from backend.registry import METHODS
from backend.runs import LOCK, LOG, METRICS, PROGRESS, RESOLVED, SPEC, STATE, Plan
from backend.runs.folder import ALIVE, Run
from backend.runs.lost_weights import ALL_WEIGHTS

WAITS = "import pathlib, time\nwhile not pathlib.Path('stop').exists(): time.sleep(0.1)"
# Fails at its first start, and waits at its second one.
FAILS_ONCE = f"""
import pathlib
if not pathlib.Path('tried').exists():
    pathlib.Path('tried').touch()
    raise SystemExit('first start')
print('second start', flush=True)
{WAITS}
"""


@pytest.fixture
def server(without_runs):
    return without_runs


def start(server, name, code):
    run = Run.create(server.runs, name, Plan((sys.executable, "-c", code), files={SPEC: ""}), datetime.now())
    run.start()
    return run


def end(run):
    if run.state in ALIVE:
        run.stop(save=False)
    deadline = time.monotonic() + 30
    while run.state in ALIVE and time.monotonic() < deadline:
        time.sleep(0.05)


def report(run, **progress):
    """What the trainer would write."""
    now = time.time()
    found = {"step": 20, "max_steps": 40, "step_seconds": 1.0, "since": now - 89, "time": now, **progress}
    (run.path / PROGRESS).write_text(json.dumps(found))


def test_the_text_follows_the_phase(server, page):
    run = start(server, "phases", WAITS)
    text, badge = page.locator(".fp-run-sentence"), page.locator(".fp-run-title .fp-badge")
    try:
        report(run, phase="training")
        show_run(page, run)
        expect(text).to_contain_text("Step 20 of 40. Training: about ")
        generating = {"text": "Generating outputs after training", "done": 3, "total": 16, "unit": "token"}
        report(run, phase="generating after", **generating)
        expect(text).to_contain_text("Generating outputs after training (3 of 16 tokens, 1 min 3")
        report(run, phase="checkpoint", text="Saving checkpoint-20")
        expect(text).to_contain_text("Saving checkpoint-20 (1 min 3")
        report(run, phase="done", text="Done.", step=40)
        expect(text).to_have_text("Training is complete, and its processes are ending.")
        expect(badge).to_have_text("Running")
    finally:
        end(run)


@pytest.mark.soak
def test_going_back_cancels_a_question_about_the_run_that_was_shown(server, page):
    first, second = (start(server, name, WAITS) for name in ("first", "second"))
    title, dialog = page.locator(".fp-run-title h2"), page.locator("dialog")
    try:
        show_run(page, first)
        expect(title).to_have_text("first")
        page.get_by_role("link", name="Runs", exact=True).click()
        page.get_by_role("link", name="second").click()
        expect(title).to_have_text("second")
        page.get_by_role("button", name="Stop without saving").click()
        expect(dialog).to_be_visible()
        page.go_back()
        page.go_back()
        expect(title).to_have_text("first")
        expect(dialog).to_have_count(0)
        assert {first.state, second.state} <= set(ALIVE)
    finally:
        end(first)
        end(second)


def test_another_window_follows_a_restart(server, page):
    run = start(server, "restarted", FAILS_ONCE)
    badge, log = page.locator(".fp-run-title .fp-badge"), page.locator(".fp-log")
    try:
        end_of_first = time.monotonic() + 30
        while run.state in ALIVE and time.monotonic() < end_of_first:
            time.sleep(0.05)
        show_run(page, run)
        expect(badge).to_have_text("Failed")
        expect(log).to_contain_text("first start")
        page.wait_for_timeout(1500)  # the log and the charts have stopped asking
        run.resume()
        expect(badge).to_have_text("Starting")
        expect(log).to_contain_text("second start")
    finally:
        end(run)
    expect(badge).to_have_text("Stopped")
    assert "second start" in (run.path / LOG).read_text()


def test_a_run_whose_weights_may_be_lost_has_an_amber_mark(server, page):
    """In the list of runs with the reason as its tooltip, and on the run's page with the reason; others have none."""
    about = {"method": METHODS["full"].label}
    resolved = json.dumps({"strategy": "ddp", "world_size": 2})
    plan = Plan(("true",), files={SPEC: "{}", RESOLVED: resolved})
    runs = [Run.create(server.runs, name, plan, datetime.now(), about) for name in ("resumed", "whole")]
    resumed = {"event": "resumed", "step": 4}
    for run, point in zip(runs, (resumed, {**resumed, ALL_WEIGHTS: True}), strict=True):
        (run.path / METRICS).write_text(json.dumps({"step": 4, "loss": 1.0}) + "\n" + json.dumps(point) + "\n")
        (run.path / "model").mkdir()
        (run.path / "model/config.json").write_text('{"model_type": "mixtral"}')
        (run.path / LOCK).write_text("supervisor")
        (run.path / STATE).write_text(json.dumps({"started": 1.0, "ended": 61.0, "end": "done"}))
    amber = """node => {
      const probe = node.appendChild(document.createElement("i"));
      probe.style.color = "var(--fp-warn)";
      const [own, warn] = [node, probe].map((each) => getComputedStyle(each).color);
      probe.remove();
      return own === warn;
    }"""
    show_run(page, runs[0])
    warning = page.locator(".fp-run-warning")
    expect(warning).to_contain_text(
        "Some weights of this run may be those of the base model: it was resumed after step 4"
    )
    assert warning.evaluate(amber)
    show_run(page, runs[1])
    expect(page.locator(".fp-run-title h2")).to_have_text("whole")
    expect(warning).to_be_hidden()
    page.get_by_role("link", name="Runs", exact=True).click()
    mark = page.locator(f'tr:has(a[href*="{runs[0].id}"]) .fp-runs-warning')
    expect(mark).to_have_text("Weights lost?")
    assert mark.evaluate(amber) and "Start it again, from checkpoint-4" in mark.get_attribute("title")
    expect(page.locator(f'tr:has(a[href*="{runs[1].id}"]) .fp-runs-warning')).to_be_hidden()


def test_the_page_of_a_run_that_cannot_be_read_says_why(server, page):
    run = Run.create(server.runs, "damaged", Plan(("true",), files={SPEC: "{}"}), datetime.now())
    (run.path / SPEC).unlink()
    (run.path / SPEC).mkdir()
    show_run(page, run)
    warning = page.locator(".fp-run-warning")
    expect(warning).to_have_text("Damaged: spec.yaml in the run's folder cannot be read (Is a directory).")
    (run.path / SPEC).rmdir()
    (run.path / SPEC).write_text("{}")
    expect(page.locator(".fp-run-title h2")).to_have_text("damaged")
    expect(warning).to_be_hidden()
