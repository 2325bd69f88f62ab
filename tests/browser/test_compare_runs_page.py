"""Two runs are selected in the list and compared; the link brings the same view back."""

import json
import re
import time

import pytest
from planted_evaluations import plant_evaluation
from planted_runs import plant_run
from playwright.sync_api import expect

from backend.runs import LOCK, METRICS, RESULT

OUTPUTS = {"small rank": "4", "large rank": "5", "mixture": "6"}


@pytest.fixture
def server(without_runs):
    return without_runs


def show_comparison(page, *runs):
    """The Compare view, as after a click in the list."""
    parameters = {"runs": ",".join(run.id for run in runs)}
    page.evaluate("compared => footplate.showView('compare', undefined, compared)", parameters)


def make(server, name, rank):
    """A run as it looks after training."""
    points = [
        {"step": step, "time": 100 + 2 * step, "tokens": 1000 * rank * step, "loss": 5 / step} for step in range(1, 31)
    ]
    points.append({"step": 30, "time": 161, "eval_loss": rank / 8})
    sample = {"prompt": "What is 2 + 2?", "reference": "4", "before": "", "after": OUTPUTS[name]}
    result = {"samples": [sample], "seconds": 60, "peak_bytes": [2**30]}
    return plant_run(server.runs, name, {METRICS: points, LOCK: "", RESULT: result}, f"lora:\n  r: {rank}\n")


def cells(page, section):
    return [row.split("\t") for row in page.locator(f"{section} tbody tr").all_inner_texts()]


def test_two_runs_are_compared(server, page):
    small, large = make(server, "small rank", 8), make(server, "large rank", 16)
    page.evaluate("() => footplate.showView('runs')")
    compare = page.locator(".fp-runs-compare")
    page.get_by_label("Select small rank").check()
    expect(compare).to_have_attribute("aria-disabled", "true")
    page.get_by_label("Select large rank").check()
    compare.click()
    expect(page.locator("#fp-compare-page h2")).to_have_text("Compare 2 runs")
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
    expect(page.locator("#fp-compare-page .fp-plot canvas")).to_have_count(1)
    assert "x=tokens" in page.locator("#fp-compare-page a", has_text="PNG").get_attribute("href")
    page.go_back()
    expect(page.get_by_role("button", name="Step", exact=True)).to_have_attribute("aria-pressed", "true")
    assert "x=" not in page.url
    page.go_back()
    expect(page.locator(".fp-runs-table")).to_be_visible()

    large.delete()
    page.go_forward()
    expect(page.locator(".fp-compare-problems")).to_contain_text(large.id)
    assert [row[0].strip() for row in cells(page, ".fp-compare-results")] == [small.name]


@pytest.mark.soak
def test_a_highlighted_run_and_the_focus_stay_while_a_run_trains(server, page):
    small, large = make(server, "small rank", 8), make(server, "large rank", 16)
    (large.path / LOCK).unlink()  # it has not ended, so that the page asks again
    # Curves that could not be loaded are no missing metrics, and are requested again.
    page.route(f"**/{large.id}/series?*", lambda route: route.abort())
    show_comparison(page, small, large)
    missing = page.locator("#fp-compare-page .fp-charts > p")
    expect(missing).to_have_text(
        "The metrics of large rank could not be loaded and are requested again. The server does not respond."
    )
    page.unroute_all()
    expect(missing).to_be_hidden()
    chip = page.locator(".fp-compare-legend button").nth(1)
    chip.click()
    with (large.path / METRICS).open("a") as file:
        file.write(json.dumps({"step": 31, "time": 170, "loss": 0.0625}) + "\n")
    page.evaluate("() => document.dispatchEvent(new Event('visibilitychange'))")  # it asks now, not after 10 seconds
    expect(page.locator(".fp-compare-results")).to_contain_text("0.0625")
    expect(chip).to_have_attribute("aria-pressed", "true")
    expect(chip).to_be_focused()


def test_evaluations_on_the_same_examples(server, page):
    """The interval of each change decides the words, and a run without an evaluation is named."""
    small, large = make(server, "small rank", 8), make(server, "large rank", 16)
    show_comparison(page, small, large)
    section = page.get_by_role("region", name="Evaluations")
    expect(page.locator(".fp-compare-results")).to_be_visible()
    expect(section).to_be_hidden()
    low, high = [0.0] * 30 + [1.0] * 10, [0.0] * 10 + [1.0] * 30
    plant_evaluation(small, {"exact_match": (low, low), "loss": ([2.0, 3.0] * 20, [1.0, 2.0] * 20)})
    page.evaluate("() => footplate.showView('runs')")
    show_comparison(page, small, large)
    expect(section).to_have_text(re.compile(r"on the same exampleslarge rank: It has no complete evaluation\.$"))
    plant_evaluation(large, {"exact_match": (low, high), "loss": ([2.0, 3.0] * 20, [2.0, 1.0] * 20)})
    page.evaluate("() => footplate.showView('runs')")
    show_comparison(page, small, large)
    expect(section.locator("tbody tr")).to_have_count(2)
    exact, loss = (row.split("\t") for row in section.locator("tbody tr").all_inner_texts())
    assert [text.split() for text in exact[1:]] == [
        ["25.0%"],
        ["25.0%", "No", "clear", "change", *exact[2].split()[4:]],
        ["75.0%", "Better", *exact[3].split()[2:]],
    ]
    assert "1.556" in loss[2] and "Better" in loss[2] and "No clear change" in loss[3]


def colors(page):
    """How many opaque pixels of the chart have the color of each run."""
    return page.evaluate(
        """() => {
          const canvas = document.querySelector('#fp-compare-page .fp-plot canvas');
          if (!canvas) return [0, 0];  // the chart is being drawn again
          const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
          const css = (name) => getComputedStyle(document.body).getPropertyValue(name).trim();
          return [1, 2].map((number) => {
            const [r, g, b] = css(`--fp-run-${number}`).match(/[0-9a-f]{2}/gi).map((text) => parseInt(text, 16));
            let found = 0;
            for (let i = 0; i < data.length; i += 4)
              found += data[i] === r && data[i + 1] === g && data[i + 2] === b && data[i + 3] > 250;
            return found;
          });
        }"""
    )


def test_each_dataset_of_a_run_has_a_curve(server, page):
    runs = [make(server, "mixture", 8), make(server, "large rank", 16)]
    with (runs[0].path / METRICS).open("a") as file:
        for step in (10, 30):
            file.write(json.dumps({"step": step, "time": 170, "eval_loss_1": 1.0, "eval_loss_2": 3.0}) + "\n")
    show_comparison(page, *runs)
    chart = page.locator("#fp-compare-page .fp-chart", has_text="Validation loss of each dataset")
    plot, legend = chart.locator(".u-over"), chart.locator(".fp-legend")
    for share, number in ((0, 2), (0.99, 1)):
        deadline = time.monotonic() + 30
        while f"mixture, dataset {number}" not in legend.inner_text():
            assert time.monotonic() < deadline, legend.inner_text()
            plot.hover(position={"x": 9, "y": share * plot.bounding_box()["height"]})  # once more if it is redrawn
            plot.hover(position={"x": 2, "y": share * plot.bounding_box()["height"]})


def test_one_run_is_highlighted_and_a_range_zoomed(server, page):
    runs = [make(server, "small rank", 8), make(server, "large rank", 16)]
    show_comparison(page, *runs)
    plot = page.locator("#fp-compare-page .u-over")
    legend = page.locator("#fp-compare-page .fp-compare-legend button")
    expect(plot).to_have_count(1)
    deadline = time.monotonic() + 30
    while colors(page)[1] <= 20:
        assert time.monotonic() < deadline, "the second curve is drawn over the first"
    legend.first.click()
    page.mouse.move(0, 0)
    expect(legend.first).to_have_attribute("aria-pressed", "true")
    assert colors(page)[1] < 20 < colors(page)[0], "the other run is faded"
    box = plot.bounding_box()
    middle = {"x": box["width"] * 9 / 29, "y": box["height"] / 2}
    plot.hover(position=middle)
    expect(page.locator("#fp-compare-page .fp-chart .fp-legend").first).to_contain_text("small rank")
    legend.first.click()
    page.mouse.move(0, 0)
    assert colors(page)[1] > 20

    with page.expect_response(lambda response: "x0=" in response.url) as found:
        page.mouse.move(box["x"] + box["width"] * 9 / 29, box["y"] + 50)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 19 / 29, box["y"] + 50, steps=5)
        page.mouse.up()
    low, high = (float(re.search(rf"{name}=([\d.]+)", found.value.url)[1]) for name in ("x0", "x1"))
    assert abs(low - 10) < 0.2 and abs(high - 20) < 0.2, "the steps under the pointer"
    plot.hover(position={"x": 2, "y": 50})
    step = page.locator("#fp-compare-page .fp-legend-step").first
    expect(step).to_have_text("Step 10")
    plot.dblclick()
    plot.hover(position={"x": 2, "y": 50})
    expect(step).to_have_text("Step 1")
