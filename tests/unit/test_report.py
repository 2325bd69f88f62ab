"""The picture of a run to keep."""

import pytest

from webui import run_image

SUMMARY = {"name": "a $name$ of_its own", "method": "LoRA", "model": "tiny", "sentence": "Done: 3 steps in 2 s."}


def test_outcome_says_method_end_and_figures():
    said = run_image.outcome(SUMMARY, {"exact_match_before": 0.0, "exact_match_after": 0.916, "eval_loss": 0.34})
    assert said == "LoRA tiny | Done: 3 steps in 2 s | exact match 0% before, 92% after | validation loss 0.34"
    assert len(run_image.outcome({"sentence": "word " * 100}, {})) <= run_image.LONGEST_LINE


def test_column_leaves_out_null_and_keeps_the_last():
    points = [{"step": i, "loss": None if i == 2 else i} for i in range(20_001)]
    steps, values = run_image.column(points, "loss")
    assert steps == values and len(steps) <= run_image.MOST_DRAWN + 1 and 2 not in steps and steps[-1] == 20_000


def test_smoothed_keeps_a_straight_line():
    line = [float(i) for i in range(200)]
    assert run_image.smoothed(line) == pytest.approx(line)
    assert run_image.smoothed([]) == []


@pytest.mark.parametrize("count", [0, 1, 5, 500])
def test_picture(count):
    points = [{"step": i, "loss": 1 / (i + 1), "learning_rate": 1e-3, "eval_loss": 0.5} for i in range(count)]
    assert run_image.picture(SUMMARY, points, {}).startswith(b"\x89PNG")
