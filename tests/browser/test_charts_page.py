"""The charts of a run's page: loss with its best evaluation, marks, one cursor in all charts, and downloads."""

import itertools
import json
import re
import sys
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import pytest
from playwright.sync_api import expect
from same_page import show_run

from backend.config import RunSpec
from backend.config.options import edit
from backend.machine import probe
from backend.runs import CHECKPOINTS, COMPLETE, EVENTS, LOG, METRICS, SPEC, STATE, Plan
from backend.runs.folder import Run

sys.path.append(str(Path(__file__).parent.parent / "unit"))
from failed_runs import ended, planted_run

SPEC_OPTIONS = {"method.kind": "full", "model.builtin": "tiny-llama"}
WAITS = "import pathlib, time\nwhile not pathlib.Path('stop').exists(): time.sleep(0.1)"
STEPS = 100
EVALUATIONS = {20: 3.0, 40: 2.0, 60: 1.5, 80: 2.5, 100: 2.75}  # the best one is at step 60
NUMBERS = itertools.count(1)  # of runs
HAPPENED = [("saved", 40, "Saved."), ("loss spike", 50, "The loss rose to 9."), ("resumed", 70, "")]


def lines(*values):
    return "".join(json.dumps(value) + "\n" for value in values)


def plant(server, name="", steps=STEPS):
    """A finished run whose values are simple functions of the step. The learning rate is logged every 10 steps. Each
    has its own ID: with that of the run that the page has shown before, charts are drawn again a moment later."""
    name = name or f"curves {next(NUMBERS)}"
    run = planted_run(server.runs, edit(RunSpec(), SPEC_OPTIONS), probe(Path.cwd()), name)
    points = []
    for step in range(1, steps + 1):
        points.append({"step": step, "loss": 5 - step / 25, "grad_norm": step / 4})
        if step % 10 == 0:
            points[-1]["learning_rate"] = step / 1000
        if step in EVALUATIONS:
            points.append({"step": step, "eval_loss": EVALUATIONS[step]})
    (run.path / METRICS).write_text(lines(*points))
    happened = [{"kind": kind, "step": step, "time": 1, "text": text} for kind, step, text in HAPPENED]
    (run.path / EVENTS).write_text(lines(*happened))
    return ended(run, end="done", exit_code=0)


def chart(page, title):
    return page.locator("#fp-run-page .fp-chart").filter(has=page.get_by_role("heading", name=title, exact=True))


def open_run(page, run, theme="light"):
    if theme == "dark":
        page.locator("#fp-theme").click()
    show_run(page, run)
    expect(chart(page, "Loss").locator(".u-over")).to_be_visible()
    return chart(page, "Loss")


def point_at(page, found, step):
    """Move the pointer to a step of a chart that shows steps 1 to STEPS; again if the page, which has just been opened,
    has moved the chart away from it."""
    over = found.locator(".u-over")
    for _ in range(4):
        over.hover(position={"x": over.bounding_box()["width"] * (step - 1) / (STEPS - 1), "y": 20})
        with suppress(AssertionError):
            expect(found.locator(".fp-legend-step")).not_to_have_text("", timeout=2000)
            return
        page.mouse.move(5, 5)


def pixel(found, step, below):
    """The color of the chart's canvas at a step, `below` pixels under the plot."""
    return found.locator("canvas").evaluate(
        """(canvas, [part, below]) => {
            const over = canvas.parentElement.querySelector(".u-over");
            const ratio = devicePixelRatio;
            const x = Math.round((over.offsetLeft + part * over.clientWidth) * ratio);
            const y = Math.round((over.offsetTop + over.clientHeight + below) * ratio);
            const found = canvas.getContext("2d").getImageData(x, y, 1, 1).data;
            return found[3] < 100 ? null : [...found].slice(0, 3);
        }""",
        [(step - 1) / (STEPS - 1), below],
    )


def css_color(page, name):
    return page.evaluate(
        """(name) => {
            const node = document.createElement("i");
            node.style.color = `var(${name})`;
            document.body.append(node);
            const found = getComputedStyle(node).color.match(/\\d+/g).map(Number);
            node.remove();
            return found;
        }""",
        name,
    )


def luminance(color):
    parts = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in color]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.soak)])
def test_training_and_validation_loss_with_the_best_point(shared, page, theme):
    loss = open_run(page, plant(shared), theme)
    assert page.evaluate("document.body.classList.contains('dark')") == (theme == "dark")
    expect(loss.locator(".fp-legend")).to_have_text("trainsmoothedvalidation")
    keys = loss.locator(".fp-legend i")
    shown = [keys.nth(n).evaluate("node => getComputedStyle(node).backgroundColor") for n in range(3)]
    assert len(set(shown)) == 3
    panel, train, validation = (css_color(page, name) for name in ("--fp-panel", "--fp-accent", "--fp-second"))
    assert min(contrast(panel, train), contrast(panel, validation)) > 3, "WCAG 1.4.11"
    expect(loss.locator(".fp-chart-text")).to_have_text(
        "Latest 1 at step 100, lowest 1; validation 2.75, best 1.5 at step 60."
    )
    best, over = loss.locator(".fp-best-point"), loss.locator(".u-over").bounding_box()
    expect(best).to_have_text("best")
    assert best.evaluate("node => node.offsetLeft") == pytest.approx(over["width"] * 59 / 99, abs=1.5)
    # The ring is where the curve is: the canvas has the color of the validation curve in its center.
    below = best.evaluate("node => node.offsetTop - node.parentElement.clientHeight")
    assert pixel(loss, 60, below) == pytest.approx(validation, abs=8)
    expect(chart(page, "Gradient norm").locator(".fp-best-point")).to_be_hidden()


def test_the_validation_loss_of_each_dataset(shared, page):
    run = plant(shared, "datasets")
    with (run.path / METRICS).open("a") as file:
        for step, loss in EVALUATIONS.items():
            file.write(lines({"step": step, "eval_loss_1": loss + 1, "eval_loss_2": loss / 2, "eval_loss_12": 2.0}))
    open_run(page, run)
    each = chart(page, "Validation loss of each dataset")
    expect(each.locator(".fp-legend")).to_have_text("dataset 1dataset 2dataset 12")
    expect(each.locator(".fp-chart-text")).to_have_text("At step 100: dataset 1 3.75, dataset 2 1.375, dataset 12 2.")
    shown = [
        key.evaluate("node => getComputedStyle(node).backgroundColor") for key in each.locator(".fp-legend i").all()
    ]
    assert len(set(shown)) == 3
    image = page.request.get(each.get_by_role("link", name="as SVG").get_attribute("href")).text()
    assert all(f">dataset {number}<" in image for number in (1, 2, 12))
    page.set_viewport_size({"width": 390, "height": 800})
    names = each.locator(".fp-legend span:visible")
    expect(names.filter(has_text="dataset")).to_have_count(3)
    expect(chart(page, "Loss").locator(".fp-legend span:visible").filter(has_text="train")).to_have_count(0)


def test_events_are_marks_with_a_tooltip(shared, page):
    loss = open_run(page, plant(shared))
    expect(page.locator(".fp-marks")).to_have_text("CheckpointEvaluationResumed or restartedAlert")
    dim, second, warn = (css_color(page, name) for name in ("--fp-dim", "--fp-second", "--fp-warn"))
    assert pixel(loss, 40, 7) == pytest.approx(dim, abs=8), "the triangle of a checkpoint"
    assert pixel(loss, 20, 12) == pytest.approx(second, abs=8), "the dot of an evaluation"
    assert pixel(loss, 50, -1) == pytest.approx(warn, abs=60), "the line of an alert"
    assert pixel(loss, 30, 7) is None and pixel(loss, 30, 12) is None
    tooltip = loss.locator(".fp-tooltip")
    for step, texts in (
        (20, ["Step 20", "Evaluation: validation 3"]),
        (40, ["Step 40", "Checkpoint saved", "Evaluation: validation 2"]),
        (50, ["Step 50", "Loss spike: The loss rose to 9."]),
        (70, ["Step 70", "Resumed"]),
    ):
        point_at(page, loss, step)
        expect(tooltip.locator("> *")).to_have_text(texts)
        expect(chart(page, "Gradient norm").locator(".fp-tooltip")).to_be_hidden()
    point_at(page, loss, 30)
    expect(tooltip).to_be_hidden()


def test_checkpoints_and_restarts_without_events(shared, page):
    """LLaMA-Factory writes no events; the run's folder and its metrics say the same."""
    run = plant(shared)
    (run.path / EVENTS).unlink()
    metrics = (run.path / METRICS).read_text()
    (run.path / METRICS).write_text(lines({"event": "resumed", "step": 0, "time": 1}) + metrics)
    saved = run.path / CHECKPOINTS / f"checkpoint-{STEPS + 10}"
    saved.mkdir(parents=True)
    (saved / COMPLETE).write_text("{}")
    loss = open_run(page, run)
    expect(page.locator(".fp-marks")).to_have_text("CheckpointEvaluationResumed or restarted")
    over, tooltip = loss.locator(".u-over"), loss.locator(".fp-tooltip > *")
    over.hover(position={"x": 1, "y": 20})
    expect(tooltip).to_have_text(["Step 0", "Restarted at step 0"])
    over.hover(position={"x": over.bounding_box()["width"] - 1, "y": 20})
    expect(tooltip).to_have_text([f"Step {STEPS + 10}", "Checkpoint saved"])


def test_text_of_events_never_becomes_html(shared, page):
    run = plant(shared)
    event = {"kind": "<b>spike</b>", "step": 50, "time": 1, "text": "<img src=x onerror=alert(1)>"}
    (run.path / EVENTS).write_text(lines(event))
    loss = open_run(page, run)
    point_at(page, loss, 50)
    expect(loss.locator(".fp-tooltip")).to_contain_text("<img src=x onerror=alert(1)>")
    expect(loss.locator(".fp-tooltip img")).to_have_count(0)


def test_one_cursor_in_all_charts(shared, page):
    loss = open_run(page, plant(shared))
    norm, rate = chart(page, "Gradient norm"), chart(page, "Learning rate")
    for source, step in ((loss, 48), (norm, 76), (rate, 30)):
        point_at(page, source, step)
        for found in (loss, norm, rate):
            expect(found.locator(".fp-legend-step")).to_have_text(f"step {step}")
            over = found.locator(".u-over").bounding_box()
            line = found.locator(".u-cursor-x").bounding_box()
            at = (line["x"] + line["width"] - over["x"]) / over["width"]
            assert at == pytest.approx((step - 1) / (STEPS - 1), abs=0.006)
        # The values of all charts are those of the step, or of the nearest one with a value.
        expect(loss.locator(".fp-legend b").first).to_have_text(f"{5 - step / 25:g}")
        expect(norm.locator(".fp-legend b").first).to_have_text(f"{step / 4:g}")
        expect(rate.locator(".fp-legend b").first).to_have_text(f"{round(step, -1) // 10}e-2")
    page.mouse.move(5, 5)
    for found in (loss, norm, rate):
        expect(found.locator(".fp-legend-step")).to_have_text("")


def test_numbers_at_an_axis(shared, page):
    """Two of them have different texts, a rate of 0 has no axis up to 100, and learning rates have one format."""
    open_run(page, plant(shared))
    found = page.evaluate(
        """async () => {
          const { createPlot, plotOptions, yAxis, yScale } = await import("./footplate/plot.js");
          const { valueText } = await import("./footplate/format.js");
          const ticks = (key, all) => yAxis(key, false).values(null, all, 1, 34, all[1] - all[0]);
          const range = yScale(false).range;
          const { textsOf } = await import("./footplate/run/chart_marks.js");
          const rewards = { key: "reward_accuracy", second: "eval_reward_accuracy", secondName: "validation" };
          const series = { eval_reward_accuracy: { x: [4], y: [0.75] } };
          // A single point is a dot; the dots of the curve that it becomes would hide the curve.
          const view = { logScale: false, zoom: null };
          const own = { x: { range: (_, from, to) => [from, to], text: String }, cursor: {}, hooks: {} };
          const plot = createPlot(rewards, view, {
            legend: document.createElement("i"),
            redraw: () => {},
            optionsOf: (curves) => plotOptions(rewards, view, curves, own),
            onBuild: () => {},
          });
          document.querySelector("#fp-run-page").append(plot.node);
          const curve = { name: "a", stroke: "red", width: 1, hasDots: false, dotSize: 6, spanGaps: false };
          const dots = [1, 3].map((count) => {
            plot.draw([{ ...curve, x: [1, 2, 3].slice(0, count), y: [1, 2, 3].slice(0, count) }]);
            return plot.drawn.plot.series[1].points.show(plot.drawn.plot, 1);
          });
          plot.node.remove();
          return {
            dots,
            close: ticks("loss", [10.81, 10.8125, 10.815, 10.8175]),
            large: ticks("tokens_per_second", [1234500, 1234600]),
            usual: ticks("loss", [0, 0.5, 1]),
            shares: ticks("eval_rouge_l", [0, 0.5]),
            closeShares: ticks("reward_accuracy", [0.995, 0.9955, 0.996]),
            mark: textsOf([{ kind: "evaluation", step: 4, text: "" }], rewards, { series }),
            zeros: range(null, 0, 0),
            same: range(null, 2, 2),
            rates: [0, 1e-5, 0.0001, 0.001, 0.00025, 0.05, 0.75].map((rate) => valueText("train.learning_rate", rate)),
            others: [0.001, 0.00025].map((value) => valueText("train.weight_decay", value)),
          };
        }"""
    )
    assert found["dots"] == [True, False]
    assert found["close"] == ["10.81", "10.8125", "10.815", "10.8175"]
    assert found["large"] == ["1.2345M", "1.2346M"]
    assert found["usual"] == ["0", "0.5", "1"]
    assert found["zeros"] == [0, 1] and found["same"][0] < 2 < found["same"][1]
    assert found["rates"] == ["0", "1e-5", "1e-4", "1e-3", "2.5e-4", "5e-2", "0.75"]
    assert found["mark"][1].endswith(": validation 75%"), "as in the chart's sentence"
    assert found["shares"] == ["0%", "50%"] and found["closeShares"] == ["99.5%", "99.55%", "99.6%"]
    assert found["others"] == ["0.001", "2.5e-4"]


def test_a_chart_is_downloaded_as_it_is_shown(shared, page):
    run = plant(shared)
    loss = open_run(page, run)

    def svg():
        response = page.request.get(loss.get_by_role("link", name="Loss as SVG").get_attribute("href"))
        assert response.ok and response.headers["content-type"].startswith("image/svg+xml")
        return response.text()

    with page.expect_download() as download:
        loss.get_by_role("link", name="Loss as PNG").click()
    assert download.value.suggested_filename == f"{run.id}-loss.png"
    assert Path(download.value.path()).read_bytes().startswith(b"\x89PNG")
    first = svg()
    assert ">train, smoothed<" in first and ">best validation, 1.5 at step 60<" in first
    assert all(f">{name}<" in first for name in ("checkpoint", "evaluation", "resumed", "alert"))
    smoothing = page.locator("#fp-run-page").get_by_label("Smoothing")
    log_scale = page.locator("#fp-run-page").get_by_role("button", name="Log scale")
    smoothing.fill("0")
    assert ">train, smoothed<" not in svg()
    assert "\u00d7" not in svg(), "numbers at the axis of a linear scale"
    log_scale.click()
    assert "\u00d7" in svg(), "2 \u00d7 10 to the power of 0"
    over = loss.locator(".u-over").bounding_box()
    page.mouse.move(over["x"] + over["width"] * 9 / 99, over["y"] + 30)
    page.mouse.down()
    page.mouse.move(over["x"] + over["width"] * 28 / 99, over["y"] + 30, steps=4)
    page.mouse.up()
    expect(loss.get_by_role("link", name="Loss as SVG")).to_have_attribute("href", re.compile("x0="))
    assert ">checkpoint<" not in svg()
    # They stay as they are in this browser, also for the tests that come next.
    log_scale.click()
    smoothing.fill("0.6")


def test_a_restarted_run_shows_no_values_of_the_attempt_before(shared, page):
    run = plant(shared)
    open_run(page, run)
    cards = page.locator(".fp-results")
    expect(cards).to_contain_text("Validation loss")
    with (run.path / METRICS).open("a") as file:
        file.write(lines({"event": "resumed", "step": 0, "time": 1}, {"step": 1, "loss": 4.5}))
    state = json.loads((run.path / STATE).read_text())
    (run.path / STATE).write_text(json.dumps({**state, "started": 2.0}))
    expect(cards).to_contain_text("4.5")
    expect(cards).not_to_contain_text("Validation loss")


def test_before_the_first_values_the_log_comes_first(shared, page):
    run = Run.create(shared.runs, "early", Plan(("python3", "-c", WAITS), files={SPEC: ""}), datetime.now())
    run.start()
    show_run(page, run)
    with (run.path / LOG).open("a") as file:
        file.write("loading the model\n")
    expect(page.locator(".fp-log")).to_contain_text("loading the model")
    charts, shown = page.locator("#fp-run-page .fp-charts"), page.locator("#fp-run-page .fp-chart:visible h4")
    expect(charts).to_be_hidden()
    with (run.path / METRICS).open("a") as file:
        file.write(lines({"step": 1, "loss": 2.0}))
    expect(shown).to_have_text(["Loss"])
    with (run.path / METRICS).open("a") as file:
        file.write(lines({"step": 2, "loss": 2.0, "grad_norm": 1.0}))
    expect(shown).to_have_text(["Loss", "Gradient norm"])
    run.stop(save=False)
    while run.state == "stopping":
        time.sleep(0.05)


@pytest.mark.parametrize("width", [390, pytest.param(1440, marks=pytest.mark.soak)])
def test_nothing_is_wider_than_the_page(shared, page, width):
    page.set_viewport_size({"width": width, "height": 900})
    run = plant(shared)
    first = 12_300  # and values with four digits
    points = [{"step": first + step, "loss": 1.2345 + step / 1000} for step in range(1, STEPS + 1)]
    (run.path / EVENTS).unlink()
    (run.path / METRICS).write_text(lines(*points, *({"step": first + s, "eval_loss": 1 / s} for s in (40, 90))))
    loss = open_run(page, run)
    point_at(page, loss, 40)
    expect(loss.locator(".fp-tooltip")).to_contain_text("Step 12,340")
    expect(loss.locator(".fp-legend-step")).to_have_text("step 12,340")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    box = loss.locator(".fp-tooltip").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= width
    legend, step = loss.locator(".fp-legend"), loss.locator(".fp-legend-step").bounding_box()
    assert legend.evaluate("node => node.scrollWidth <= node.clientWidth"), "no value is cut off"
    figure = loss.bounding_box()
    assert figure["x"] <= step["x"] and step["x"] + step["width"] <= figure["x"] + figure["width"]


def test_the_links_to_sections_name_what_is_shown(page, shared):
    """Each leads to its section, from which Tab goes on."""
    open_run(page, plant(shared, "sections"))
    links = page.get_by_role("navigation", name="Sections of this run").get_by_role("button")
    shown = page.locator(".fp-run > section[aria-label]:visible")
    expect(shown.last).to_have_attribute("aria-label", "Details")
    expect(links.last).to_have_text("Details")
    labels = shown.evaluate_all("sections => sections.map((section) => section.ariaLabel)")
    assert links.all_inner_texts() == [label for label in labels if label not in ("Error", "Alerts")]
    links.filter(has_text="Log").click()
    log = page.locator(".fp-run > section[aria-label=Log]")
    expect(log).to_be_focused()
    expect(log).to_be_in_viewport()
