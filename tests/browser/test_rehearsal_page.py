"""Try it: phases of a rehearsal, live and after a reload, and the journey of a broken chat template."""

import re
import sys

import pytest
from playwright.sync_api import expect

from backend.runs import Plan
from backend.runs.rehearsals import Rehearsal, new_folder
from webui.drafts import Drafts

RECORDS = """
import json, time
for phase in ("starting", "loading model"):
    line = {"phase": phase, "seconds": 1.25, "time": time.time(), "peak_bytes": 2**30}
    open("rehearsed.jsonl", "a").write(json.dumps(line) + "\\n")
open("progress.json", "w").write(json.dumps({"phase": "generating before"}))
time.sleep(60)
"""
TRAINS_ONLY = (
    "{% if add_generation_prompt %}{{ raise_exception('no prompt for generation') }}{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)


def ready(page, url):
    page.goto(url)
    expect(page.locator("body[data-ready]")).to_be_visible()


def open_with(page, server, values, draft):
    """Open the form with these values, as a saved draft."""
    Drafts(server.runs / ".drafts").save(draft, values)
    ready(page, f"{server.url}/?draft={draft}")
    expect(page.locator("#fp-status[data-fresh=yes] .fp-status-text")).to_have_text(re.compile("^Can run"))


def test_live_phases_stop_and_reload(same_page, shared):
    same_page.show_build()
    page = same_page.page
    plan = Plan((sys.executable, "-c", RECORDS))
    folder = new_folder(shared.runs)
    rehearsal = Rehearsal.create(folder, "try", {"train": plan}, {}, {"measured_bytes": 2**31}, ["A note."])
    rehearsal.start()
    page.route("**/api/rehearsals", lambda route: route.fulfill(json={"id": rehearsal.id}))
    page.locator("#fp-try").click()
    panel = page.locator("#fp-rehearsal")
    rows = panel.locator("tr")
    expect(rows).to_have_count(3)
    expect(rows.nth(1)).to_have_text("Load the model1.3 s1.0 GiB")
    expect(rows.nth(2)).to_have_text("Generate\u2026")
    expect(page.locator("#fp-try")).to_be_disabled()
    panel.get_by_role("button", name="Stop").click()
    expect(panel.locator("h3")).to_have_text("Rehearsal stopped")
    expect(page.locator("#fp-try")).to_be_enabled()
    ready(page, page.url)
    expect(panel).to_contain_text("Peak memory of a rank: 1.0 GiB, estimated 2.0 GiB.")
    expect(panel).to_contain_text("A note.")
    panel.get_by_role("button", name="Dismiss").click()
    expect(panel).to_be_hidden()


@pytest.mark.soak
def test_a_rehearsal_of_earlier_values_says_so(same_page):
    same_page.show_build()
    page = same_page.page
    status = {"state": "done", "seconds": 9, "phases": [], "notes": [], "peak_bytes": 0, "text": "", "now": ""}
    page.route("**/api/rehearsals", lambda route: route.fulfill(json={"id": "one"}))
    page.route("**/api/rehearsals/one", lambda route: route.fulfill(json=status))
    page.locator("#fp-try").click()
    title = page.locator("#fp-rehearsal h3")
    expect(title).to_have_text("Rehearsal passed")
    before = page.evaluate("footplate.values()['lora.r']")
    page.evaluate("footplate.edited('lora.r', 77)")
    expect(title).to_have_text("Rehearsal passed with earlier values of the form")
    page.evaluate("before => footplate.edited('lora.r', before)", before)
    expect(title).to_have_text("Rehearsal passed")
    page.evaluate("footplate.edited('lora.r', 77)")
    ready(page, page.url)
    expect(title).to_have_text("Rehearsal passed with earlier values of the form")


@pytest.mark.soak
def test_a_rehearsal_that_finds_a_broken_template_then_passes(server, page, tmp_path):
    """The checks render examples, which is all that the training does with this template."""
    template = tmp_path / "template.jinja"
    template.write_text(TRAINS_ONLY)
    values = {"model.builtin": "tiny-llama", "launch.device": "cpu"}
    attempt, panel = page.locator("#fp-try"), page.locator("#fp-rehearsal")
    broken = {"data.chat_template": "file", "data.chat_template_file": str(template)}
    open_with(page, server, values | broken, "broken-template")
    attempt.click()
    expect(panel.locator(".fp-failure h3")).to_have_text("Load the saved model and use it", timeout=240_000)
    expect(panel).to_contain_text("no prompt for generation")
    open_with(page, server, values, "own-template")
    attempt.click()
    expect(panel.locator("h3").first).to_have_text("Rehearsal passed", timeout=240_000)
    expect(panel.locator("tr")).to_have_count(14)


@pytest.mark.soak
def test_a_planned_run_is_rehearsed_here_with_a_small_model(server, page):
    values = {"model.builtin": "tiny-llama", "parallel.strategy": "fsdp2", "launch.nproc_per_node": 8}
    Drafts(server.runs / ".drafts").save("planned", values)
    ready(page, f"{server.url}/?draft=planned&machine=8x80gb")
    expect(page.locator("#fp-status[data-fresh=yes] .fp-status-text")).to_have_text(re.compile("^Can run"))
    expect(page.locator("#fp-start")).to_be_hidden()
    page.locator("#fp-try").click()
    panel = page.locator("#fp-rehearsal")
    expect(panel.locator("tr").first).to_contain_text("Build a small model")
    expect(panel.locator("h3").first).to_have_text("Rehearsal passed", timeout=240_000)
    expect(panel).to_contain_text("Rehearsed with 8 CPU processes of this machine instead of 8 x H100")
    expect(panel).to_contain_text("2 of 4 layers")
