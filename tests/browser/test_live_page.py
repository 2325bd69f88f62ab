"""A run that reports alerts, checkpoints and measurements of its ranks: what its page shows of them."""

import json
import re
import time
from datetime import datetime
from pathlib import Path

import pytest
from planted_runs import ended, plant_run, write_files
from playwright.sync_api import expect
from same_page import show_run

from backend.preflight import preflight
from backend.presets import presets
from backend.runs import (
    CHECKPOINTS,
    COMPLETE,
    ESTIMATE,
    EVENTS,
    LOCK,
    LOG,
    METRICS,
    MONITOR,
    PROGRESS,
    SPEC,
    STATE,
    Plan,
)
from backend.runs.folder import Run

ALERT = "The loss rose to 9; the median of the last 50 points is 2."
RANKS = [
    {
        "host": "node-a",
        "device": f"cuda:{rank}",
        "memory": 2**36,
        "peak": 24 * 2**30,
        "utilization": 90 + rank,
        "power": 600,
        "data": 0.25,
    }
    for rank in range(2)
]


def make(server):
    happened = [("saved", 40, "Saved checkpoint-40."), ("loss spike", 60, ALERT), ("resumed", 80, "")]
    contents = {
        LOCK: "supervisor",
        STATE: ended(),
        METRICS: [{"step": step, "loss": 2, "tokens_per_second": 10_000} for step in range(1, 101)],
        EVENTS: [{"kind": kind, "step": step, "time": 1, "text": text} for kind, step, text in happened],
        MONITOR: {"step": 99, "time": 1, "step_seconds": {"p50": 0.8, "p95": 1.25}, "ranks": RANKS},
        ESTIMATE: {"rows": [], "flops_per_token": 4 * 10**10, "peak_flops": 10**15},
    }
    return plant_run(server.runs, "live", contents, created=datetime.now())


def test_only_the_state_is_read_out(shared, page):
    """The sentence next to it changes every second."""
    show_run(page, make(shared))
    expect(page.locator(".fp-run-title").get_by_role("status")).to_have_text("Stopped")
    expect(page.locator(".fp-run-sentence")).to_contain_text("Stopped after step")


def test_alerts_marks_and_ranks(shared, page):
    run = make(shared)
    show_run(page, run)
    expect(page.locator(".fp-alerts")).to_contain_text(f"Step 60{ALERT}")
    cards = page.locator(".fp-results")
    expect(cards).to_contain_text("40% model FLOPs utilization")
    expect(cards).to_contain_text("800 ms95% below 1.25 s")
    expect(cards).to_contain_text("91%600 W per GPU")
    page.get_by_text("Ranks", exact=True).click()
    assert [row.split("\t") for row in page.locator(".fp-ranks tbody tr").all_inner_texts()] == [
        [f"Rank {n}: cuda:{n} on node-a", "64 GiB", f"{90 + n}%", "600 W", "25%"] for n in range(2)
    ]
    chart = page.locator(".fp-chart", has_text="Loss").first
    plot, tooltip = chart.locator(".u-over"), chart.locator(".fp-tooltip")
    box = plot.bounding_box()
    for at, text in ((40, "Checkpoint saved"), (60, f"Loss spike: {ALERT}"), (80, "Resumed")):
        plot.hover(position={"x": box["width"] * (at - 1) / 99, "y": 20})
        expect(tooltip.locator("> *")).to_have_text([f"Step {at}", text])
    plot.hover(position={"x": box["width"] * 19 / 99, "y": 20})
    expect(chart.locator(".fp-legend-step")).to_have_text("step 20")
    expect(tooltip).to_be_hidden()


def test_the_measured_peak_is_that_of_the_allocator(shared, page):
    """As the estimate and the result; the memory that torch has reserved now is among the ranks. The measured time is
    next to the predicted one."""
    run = make(shared)
    preset = next(preset for preset in presets() if preset.name == "two-nodes")
    estimate = dict(preflight(preset.spec, preset.machine, Path("/nowhere")).expected or {})
    (run.path / ESTIMATE).write_text(json.dumps({**estimate, "measured_bytes": estimate["device_bytes"]}))
    (run.path / PROGRESS).write_text(json.dumps({"step": 9, "max_steps": 99, "first_step": 1, "step_seconds": 0.5}))
    show_run(page, run)
    page.locator(".fp-run-placement .fp-column").first.hover()
    expect(page.locator(".fp-run-placement .fp-placement-caption")).to_contain_text("measured 24 GiB")
    page.get_by_text("Ranks", exact=True).click()
    expect(page.locator(".fp-ranks tbody tr").first).to_contain_text("64 GiB")
    time = page.locator(".fp-run-time")
    expect(time.locator("tbody tr").first).to_contain_text(re.compile(r"Mean time per step\d.* s \(.+ to .+\)0\.5 s"))
    expect(time).to_contain_text("outside the predicted range")


WAITS = "import pathlib, time\nwhile not pathlib.Path('stop').exists(): time.sleep(0.1)"


def test_what_is_unfolded_stays_so_when_a_checkpoint_is_saved(shared, page):
    run = make(shared)
    show_run(page, run)
    summary = page.locator(".fp-details summary", has_text="Configuration")
    summary.click()
    checkpoint = run.path / CHECKPOINTS / "checkpoint-40"
    checkpoint.mkdir(parents=True)
    (checkpoint / COMPLETE).write_text("{}")
    expect(page.locator(".fp-details")).to_contain_text("Checkpoints")
    expect(page.locator(".fp-details details[open] summary")).to_have_text(["Configuration"])
    expect(summary).to_be_focused()


def test_a_flood_of_lines_shows_the_last_ones(shared, page):
    run = Run.create(shared.runs, "flood", Plan(("python3", "-c", WAITS), files={SPEC: ""}), datetime.now())
    run.start()
    show_run(page, run)
    log = page.locator(".fp-log")
    with (run.path / LOG).open("a") as file:
        file.write("first line\n")
        file.flush()
        expect(log).to_contain_text("first line")
        file.writelines(f"line {number}\n" for number in range(100_000))
        file.flush()
        expect(log).to_contain_text("line 99999")
        file.write("after the flood\n")
    expect(log).to_contain_text("after the flood")
    shown = log.locator(".fp-log-line").all_text_contents()
    numbers = [int(text.removeprefix("line ")) for text in shown if text.startswith("line ")]
    assert 1000 < len(numbers) < 20_000 and numbers == list(range(numbers[0], 100_000))
    page.get_by_role("button", name="Load earlier").click()
    expect(log).to_contain_text(f"line {numbers[0] - 1}")
    run.stop(save=False)
    while run.state == "stopping":
        time.sleep(0.05)
    assert run.state == "stopped"


@pytest.mark.soak
def test_a_long_run_is_drawn_in_parts(shared, page):
    run = make(shared)
    points = [{"step": step, "loss": 2, "note": "x" * 900} for step in range(1, 100_001)]  # 90 MB
    write_files(run.path, {METRICS: points})
    found = []

    def remember(response):
        if "/series" in response.url and response.ok:
            found.append(response)

    page.on("response", remember)
    show_run(page, run)
    expect(page.locator(".fp-chart .fp-chart-text").first).to_contain_text("Latest 2 at step 100,000")
    expect(page.locator("#fp-run-page .fp-charts-bar")).to_contain_text("Drag across a chart to zoom")
    page.remove_listener("response", remember)
    shares = [response.json()["read"] for response in found if response.status == 200]
    assert len(shares) > 1 and shares == sorted(shares) and shares[0] < 1 and shares[-1] == 1
