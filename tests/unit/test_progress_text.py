"""What the status of a run says in each phase: elapsed time and counts where the end cannot be known."""

from __future__ import annotations

from typing import Any

import pytest

from backend.runs import throughput

STEP = {"step": 20, "max_steps": 40, "step_seconds": 2.0, "since": 900.0, "time": 1000.0}


def sentence(now: float, **progress: Any) -> str:
    found: dict[str, Any] = {**STEP, **progress}
    seconds = throughput.seconds_per_step(found, [])
    summary = {"step": found["step"], "max_steps": 40, "eta_seconds": throughput.eta(found, seconds, now)}
    return throughput.running_sentence(summary, found, seconds, now)


def test_the_estimate_covers_training_steps_only() -> None:
    assert sentence(1000, phase="training") == "Running: step 20 of 40. Training: about 40 s left."
    assert sentence(1000, phase="training", evaluations_left=3).endswith("about 40 s left, without evaluations.")
    measured = {"evaluations_left": 3, "evaluation_seconds": 5.0}
    assert sentence(1000, phase="training", **measured).endswith("about 55 s left.")
    assert sentence(1030, phase="training") == "Running: step 20 of 40. Training: about 38 s left."
    points = [
        {"step": 10, "loss": 1.0, "time": 900.0},
        {"step": 20, "loss": 1.0, "time": 1000.0},
    ]  # an evaluation between
    assert throughput.seconds_per_step(STEP, points) == 2.0
    assert sentence(1028, phase="training", step=40) == "Running: step 40 of 40."


@pytest.mark.parametrize(
    ("phase", "text", "more", "expected"),
    [
        ("evaluating", "Evaluating after step 20", {"done": 3, "total": 8, "unit": "batch"},
         "evaluating after step 20 (3 of 8 batches, about 5 min 15 s left)"),
        ("generating after", "Generating outputs after training", {"done": 0, "total": 16, "unit": "token"},
         "generating outputs after training (0 of 16 tokens, 3 min 9 s so far)"),
        ("evaluating", "Evaluating after step 20", {"done": 1, "total": 1, "unit": "batch"},
         "evaluating after step 20 (1 of 1 batch, 3 min 9 s so far)"),
        ("generating after", "Generating outputs after training", {"done": 0, "total": 1, "unit": "token"},
         "generating outputs after training (0 of 1 token, 3 min 9 s so far)"),
        ("generating before", "Generating", {"done": 2, "total": 8, "unit": "token of rank 0"},
         "generating (2 of 8 tokens of rank 0, 3 min 9 s so far)"),
        ("evaluating", "Evaluating", {"done": 900, "total": 1000}, "evaluating (900 of 1,000, about 21 s left)"),
        ("evaluating", "Evaluating", {"done": 0, "total": 8}, "evaluating (0 of 8, 3 min 9 s so far)"),
        ("checkpoint", "Saving checkpoint-20", {}, "saving checkpoint-20 (3 min 9 s so far)"),
        ("saving", "Saving the trained model.", {}, "saving the trained model (3 min 9 s so far)"),
        ("loading model", "Loading gpt2.", {}, "loading gpt2"),
    ],
)  # fmt: skip
def test_other_phases_have_their_own_estimate(phase: str, text: str, more: dict[str, Any], expected: str) -> None:
    assert sentence(1089, phase=phase, text=text, **more) == f"Running: {expected}."
    assert throughput.eta({**STEP, "phase": phase}, 2.0, 1000) is None


def test_the_remaining_time_counts_only_the_work_of_this_start() -> None:
    assert throughput.time_left(60, 0.5, 0) == "about 1 min left"
    assert throughput.time_left(60, 0.75, 0.5) == "about 1 min left"


def test_a_stall_is_much_longer_than_a_step() -> None:
    """Before the usual time of a step is known, it can take minutes."""
    assert (
        sentence(1061, phase="training")
        == "Running: step 20 of 40, but no step for 1 min 1 s. The end of the log may say why."
    )
    unknown: dict[str, Any] = {"phase": "training", "step": 1, "step_seconds": None}
    assert sentence(1600, **unknown) == "Running: step 1 of 40."
    assert "step 1 of 40, but no step for 10 min 1 s." in sentence(1601, **unknown)


def test_a_run_that_ends_does_not_say_done() -> None:
    said = sentence(1001, phase="done", text="Done.", step=40)
    assert said == "Running: training is complete, and its processes are ending."
