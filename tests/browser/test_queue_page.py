"""The queue in the browser: three runs of which one fails, a changed order, a restart of the server, a chain."""

import re
import sys
from datetime import datetime

import pytest
from playwright.sync_api import expect
from served import serving
from test_journeys import choose, open_page, start_run, use_tiny_model, wait_for_state, wait_for_status

from backend.runs import SPEC, Plan, queue
from backend.runs.folder import Run

WAITS = """
import json, os, time
open('progress.json', 'w').write(json.dumps({'phase': 'training', 'step': 1}))
while not os.path.exists('go'): time.sleep(0.05)
"""
FAILS = WAITS + "raise SystemExit('The disk is on fire.')"


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server with a queue of its own, in which one CPU run trains at a time."""
    monkeypatch.setenv(queue.FOLDER, str(tmp_path / "queue"))
    monkeypatch.setenv(queue.CPU_SLOTS, "1")
    with serving(tmp_path / "runs") as started:
        yield started


def make(server, name, code=WAITS):
    """A run on the CPU that ends when `finish` is called."""
    plan = Plan((sys.executable, "child.py"), {}, {SPEC: "", "child.py": code}, devices={"cpu": "the CPU"})
    time = {"run": {"low_seconds": 3600, "high_seconds": 7200, "steps": 10}} if name != "c" else {"unknown": "a test"}
    run = Run.create(server.runs, name, plan, datetime.now(), estimate={"time": time})
    run.start()
    return run


def finish(run):
    (run.path / "go").touch()


def names(page):
    return page.locator(".fp-queue-name").all_inner_texts()


def refuse_to_delete_an_active_run(page):
    """Of four selected runs, d has not ended; then only d is selected."""
    deleting = page.get_by_role("region", name="Selected runs").get_by_role("button", name="Delete")
    page.get_by_label("Select all runs").check()
    deleting.click()
    expect(page.locator("dialog")).to_contain_text("Delete 3 runs? ")
    expect(page.locator("dialog")).to_contain_text("d has not ended and is not deleted.")
    page.locator("dialog").get_by_role("button", name="Cancel").click()
    for name in "abc":
        page.get_by_label(f"Select {name}", exact=True).uncheck()
    deleting.click()
    expect(page.locator(".fp-toast").last).to_contain_text("d has not ended and is not deleted.")
    page.get_by_label("Select d", exact=True).uncheck()


def test_three_runs_wait_and_the_order_is_changed(server, page):
    first, second, third, fourth = (make(server, name, FAILS if name == "b" else WAITS) for name in "abcd")
    page.goto(f"{server.url}/?tab=runs")
    rows = page.locator(".fp-queue li")
    expect(rows).to_have_count(3)
    assert names(page) == ["b", "c", "d"]
    expect(rows.nth(0)).to_contain_text("a uses the CPU. Starts in 1 h to 2 h.")
    expect(rows.nth(1)).to_contain_text("Starts in 2 h to 4 h.")
    expect(rows.nth(2)).to_contain_text("When it starts is not known: the time of c is not predicted.")
    groups = page.locator(".fp-chip:is([data-group=queued], [data-group=running])")
    expect(groups).to_have_text(["Queued3", "Running1"])
    expect(rows.nth(2)).to_contain_text("2 runs are ahead of this run.")
    expect(rows.nth(0).get_by_role("button", name="Move up")).to_be_disabled()
    expect(rows.nth(2).get_by_role("button", name="Move down")).to_be_disabled()

    rows.nth(2).get_by_role("button", name="Move up").click()
    expect(page.locator(".fp-queue-name").nth(1)).to_have_text("d")
    rows.nth(0).get_by_role("button", name="Move down").click()
    expect(page.locator(".fp-queue-name").nth(0)).to_have_text("d")
    assert names(page) == ["d", "b", "c"]
    rows.nth(0).get_by_role("button", name="Hold").click()
    expect(rows.nth(0)).to_contain_text("This run is on hold.")

    table = page.locator(".fp-runs-scroll")
    top = table.bounding_box()["y"]
    server.kill()
    server.start()
    expect(page.locator(".fp-away").last).to_be_hidden()
    finish(first)
    expect(rows).to_have_count(2)  # b runs
    assert names(page) == ["d", "c"]
    finish(second)
    expect(page.locator(f'tr:has(a[href*="{second.id}"]) .fp-badge')).to_have_text("Failed")
    expect(rows).to_have_count(1)  # c runs, since d is held
    rows.nth(0).get_by_role("button", name="Release").click()
    expect(rows.nth(0)).to_contain_text("c uses the CPU.")
    finish(third)
    expect(page.locator(".fp-queue")).to_contain_text("No run is waiting.", use_inner_text=True)
    assert table.bounding_box()["y"] == top, "the list stays where it is when a run leaves the queue"
    assert page.locator(".fp-queue").bounding_box()["height"] < 100, "but the panel is no larger than its text"
    refuse_to_delete_an_active_run(page)
    finish(fourth)
    expect(page.locator(f'tr:has(a[href*="{fourth.id}"]) .fp-badge')).to_have_text("Done")


@pytest.mark.soak
def test_a_run_is_started_after_another_one(server, page):
    first = make(server, "first")
    page.goto(f"{server.url}/?tab=run&run={first.id}")
    page.get_by_role("button", name="Start another after this").click()
    page.wait_for_selector("body[data-ready]")
    wait_for_status(page, "Can run|Cannot run")
    expect(page.locator("#fp-after")).to_contain_text("Start waits until first")
    train = page.get_by_role("button", name="Train its model")
    train.click()
    expect(page.locator("body")).to_contain_text("first saves only an adapter")
    (first.path / SPEC).write_text("save:\n  final_model: false\n")
    train.click()
    expect(page.locator("body")).to_contain_text("first saves no model at its end")
    (first.path / SPEC).write_text("save:\n  merge_adapter: true\n")
    train.click()
    expect(page.locator("#model-path textarea, #model-path input").first).to_have_value(f"{first.path}/model")
    expect(page.locator("#model-source").get_by_label("Local folder")).to_be_checked()  # the folder's text comes first
    choose(page, "model.source", "builtin")
    use_tiny_model(page, 2)
    second = start_run(page, server)
    wait_for_state(page, "queued")
    expect(page.locator(".fp-run-sentence")).to_contain_text("queue. first must succeed first.")
    assert "after" not in page.url

    page.get_by_role("button", name="Hold", exact=True).click()
    expect(page.get_by_role("button", name="Release")).to_be_visible()
    page.get_by_role("button", name="Release").click()
    expect(page.locator(".fp-run-sentence")).to_contain_text("must succeed first.")
    page.get_by_role("button", name="Remove from queue").click()
    page.locator("dialog").get_by_role("button", name="Remove from queue").click()
    wait_for_state(page, "stopped")
    expect(page.locator(".fp-run-sentence")).to_contain_text("It was removed from the queue.")
    finish(first)

    page.get_by_role("button", name=re.compile("Start again")).click()
    wait_for_state(page, "done")
    expect(page.locator("#fp-run-page h2").first).to_be_focused()  # not another action, where Enter would press it
    assert second.state == "done"
    open_page(page, server)
    expect(page.locator("#fp-after")).to_have_count(0)
