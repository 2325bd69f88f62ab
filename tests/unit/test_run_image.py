"""The image of a run."""

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from backend.memory.kinds import KINDS
from backend.paths import HOME
from backend.preflight import preflight
from backend.presets import presets
from webui.images import run_image
from webui.images.placement_image import COLORS

SUMMARY = {"name": "a $name$ with_underscores", "method": "LoRA", "model": "tiny", "sentence": "Done: 3 steps in 2 s."}


def test_outcome_has_method_end_and_metrics():
    text = run_image.outcome(SUMMARY, {"exact_match_before": 0.0, "exact_match_after": 0.996, "eval_loss": 2.0})
    assert text == "LoRA tiny | Done: 3 steps in 2 s | exact match 0% before training, 99.6% after | validation loss 2"
    assert len(run_image.outcome({"sentence": "word " * 100}, {})) <= run_image.MAX_LINE_LENGTH


def test_column_skips_null_and_keeps_the_last():
    points = [{"step": i, "loss": None if i == 2 else i} for i in range(20_001)]
    steps, values = run_image.column(points, "loss")
    assert steps == values and len(steps) <= run_image.MAX_POINTS + 1 and 2 not in steps and steps[-1] == 20_000


def test_smoothed_keeps_a_straight_line():
    line = [float(i) for i in range(200)]
    assert run_image.smoothed(line) == pytest.approx(line)
    assert run_image.smoothed([]) == []


@pytest.mark.parametrize("count", [0, 1, 5, 500])
def test_draw(count):
    points = [{"step": i, "loss": 1 / (i + 1), "learning_rate": 1e-3, "eval_loss": 0.5} for i in range(count)]
    assert run_image.draw(SUMMARY, points, {}).startswith(b"\x89PNG")


def test_an_svg_has_text_and_the_best_evaluation():
    million = 10**6
    points = [{"step": million + i, "loss": 1 / i, "eval_loss": abs(i - 3) + 0.25} for i in range(1, 6)]
    svg = run_image.draw(SUMMARY, points, {}, "svg").decode()
    assert "<svg" in svg and ">a $name$ with_underscores<" in svg
    assert ">best validation, 0.25 at step 1,000,003<" in svg, "the step itself, not 1e+06"


def test_shares_are_in_percent():
    points = [{"step": i, "loss": 1, "reward_accuracy": i / 4} for i in range(1, 5)]
    assert {"50%", "100%"} <= set(texts(run_image.draw(SUMMARY, points, {}, "svg").decode()))


def test_of_equal_evaluations_none_is_the_best():
    points = [{"step": i, "loss": 1 / i, "eval_loss": 0.5} for i in range(1, 6)]
    assert "best" not in run_image.draw(SUMMARY, points, {}, "svg").decode()


def texts(svg: str) -> list[str | None]:
    return [text.text for text in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def placement_estimate(**changes: int) -> dict[str, Any]:
    preset = next(preset for preset in presets() if preset.name == "two-nodes")
    estimate = dict(preflight(preset.spec, preset.machine, Path("/nowhere")).expected or {})
    return {**estimate, "placement": {**estimate["placement"], **changes}}


def test_memory_of_each_device_is_a_part_of_the_image() -> None:
    """Measured peaks are marks in the columns of their ranks; without an estimate the image is as before."""
    estimate = placement_estimate()
    assert len(estimate["placement"]["kinds"]) > 3
    result = {"peak_bytes": [estimate["measured_bytes"]] * 16}
    plain = run_image.draw(SUMMARY, [], {}, "svg").decode()
    estimated = run_image.draw(SUMMARY, [], {}, "svg", estimate).decode()
    measured = run_image.draw(SUMMARY, [], result, "svg", estimate).decode()
    assert "Optimizer state" in estimated and "Optimizer state" not in plain
    assert "measured peak" in measured and "measured peak" not in estimated
    assert "15" in texts(measured) and "15" not in texts(plain)  # the last rank
    assert "rank" in texts(measured)
    assert {"Node 0", "Node 1", "Free"} <= set(texts(estimated))
    full = run_image.draw(SUMMARY, [], {}, "svg", {**estimate, "capacity_bytes": 2**30}).decode()
    assert "Capacity" in texts(full) and "Free" not in texts(full)


def test_the_image_says_that_it_has_the_first_ranks_only() -> None:
    estimate = placement_estimate(nodes=16)
    shown = texts(run_image.draw(SUMMARY, [], {}, "svg", estimate).decode())
    assert "rank (first 32 of 128 ranks)" in shown and "31" in shown and "32" not in shown


def test_kinds_have_the_same_colors_in_the_image_and_on_the_page() -> None:
    assert list(COLORS) == list(KINDS)
    root = (HOME / "webui/static/build/strategies.css").read_text().partition(":root {")[2].partition("}")[0]
    assert dict(re.findall(r"--fp-kind-(\w+): (#\w+);", root)) == COLORS
