"""Find fastest settings: the empty card, progress, a stop, the table, a row that is adopted, and a reload."""

import json
import os
import time

from playwright.sync_api import expect

from backend.runs import STOP, processes
from backend.runs.scratch import OUTCOME
from backend.tasks.tuning.search import BASE, Row
from backend.tasks.tuning.tuning import FOLDER, REQUEST

EAGER = {"model.attn_implementation": "eager"}
FIGURES = {"spread": 0.05, "step_seconds": 0.5, "warm_up_seconds": 0.1, "peak_bytes": 2**30}
ROWS = [
    Row(BASE, {}, True, "base", "", 1000.0, gain=1.0, **FIGURES),
    Row("Liger kernels", {}, True, "skipped", "Not tried: Liger kernels need a GPU."),
    Row("Eager attention", EAGER, True, "faster", "", 1400.0, gain=1.4, **FIGURES),
    Row("Eager attention + AdamW, fused", {}, True, "refused", "The loss differs: 5 instead of 4 in step 1."),
]


def plant(server, name):
    """A tuning in the runs folder of the server, without its process."""
    folder = server.runs / FOLDER / name
    folder.mkdir(parents=True)
    request = {"name": "a", "key": "none", "created": time.time(), "minutes": 10, "spec": "", "changes_result": False}
    (folder / REQUEST).write_text(json.dumps(request))
    return folder


def write(folder, state, rows, **more):
    fastest = next((n for n, row in enumerate(rows) if row.state == "faster"), None)
    status = {"state": state, "rows": [row.as_json() for row in rows], "fastest": fastest, "seconds": 95.0, **more}
    (folder / OUTCOME).write_text(json.dumps(status))


def test_measuring_stopping_and_adopting(same_page, shared):
    same_page.show_build()
    page, folder = same_page.page, plant(shared, "20261129010203000001")
    lock = processes.acquire_lock(folder)
    write(folder, "running", ROWS[:1], now="Eager attention", trial=2, planned=9, left=300.0)
    page.route("**/api/tunings", lambda route: route.fulfill(json={"id": folder.name}))
    card = page.locator("#fp-tuning")
    expect(page.locator("#fp-status[data-fresh=yes]")).to_be_visible()
    page.locator("#fp-tune").click()
    expect(card.locator("h3")).to_have_text("Fastest settings")
    expect(card.get_by_label("At most")).to_have_value("10")
    expect(card.get_by_label("Also try settings that change the result")).not_to_be_checked()
    card.get_by_role("button", name="Measure").click()
    expect(card.get_by_role("status")).to_have_text("Trial 2 of about 9: Eager attention.")
    expect(card).to_contain_text("At most 5 min 00 s left.")
    card.get_by_role("button", name="Stop").click()
    expect(card.locator("tbody tr").first).to_have_text("Current settings1,000")
    while not (folder / STOP).exists():
        page.wait_for_timeout(20)
    write(folder, "stopped", ROWS)
    os.close(lock)
    expect(card.locator("h3")).to_have_text("Fastest settings: stopped")
    expect(card.get_by_role("status")).to_contain_text("Eager attention: 1.40\u00d7 as fast as the current settings")
    expect(card.locator("tr[data-state=refused]").last).to_have_text(
        "Refused. The loss differs: 5 instead of 4 in step 1."
    )
    expect(card.locator("summary")).to_have_text("Not tried (1)")
    card.get_by_role("button", name="Use these").last.click()
    assert page.evaluate("footplate.values()['model.attn_implementation']") == "eager"
    expect(card.locator("h3")).to_have_text("Fastest settings: stopped, with earlier values of the form")
    page.get_by_role("button", name="Undo").last.click()
    expect(card.locator("h3")).to_have_text("Fastest settings: stopped")
    assert page.evaluate("footplate.values()['model.attn_implementation']") == "auto"
    page.reload()
    expect(card.locator("h3")).to_have_text("Fastest settings: stopped")
    card.get_by_role("button", name="Dismiss").click()
    expect(card).to_be_hidden()
