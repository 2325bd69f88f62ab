"""The runs of a sweep ranked by scores of generations and of evaluations."""

import json

import pytest
from planted_evaluations import plant_evaluation
from small import client
from test_chat import LORA, make_run

from backend.__main__ import main
from backend.models.evaluation import Settings
from backend.runs import METRICS, RESULT, SWEEP, sweeps
from backend.runs.folder import RunError
from backend.tasks.sweep_scores import rank

BASE, LOW, MIDDLE, HIGH = ([0.0] * (40 - right) + [1.0] * right for right in (4, 5, 33, 34))


@pytest.fixture
def runs(tmp_path):
    """Three runs with validation losses in the opposite order of their rates."""
    found = []
    for number, rate in enumerate((1e-5, 1e-4, 1e-3)):
        run = make_run(tmp_path / "runs", {**LORA, "logging.run_name": f"try {number}"})
        part = sweeps.Member("s", {"train.learning_rate": rate})
        (run.path / SWEEP).write_text(part.to_json())
        (run.path / METRICS).write_text(json.dumps({"step": 2, "eval_loss": 3.0 - number}) + "\n")
        found.append(run)
    return found


def order(found):
    return [round(row["varied"]["train.learning_rate"], 6) for row in found.rows]


def test_the_validation_loss_is_the_default(runs, tmp_path):
    found = rank(tmp_path / "runs", "s")
    assert order(found) == [1e-3, 1e-4, 1e-5] and [each.key for each in found.rankings] == ["eval_loss"]
    with pytest.raises(RunError, match=r"cannot be ranked by bleu\. They have: eval_loss\."):
        rank(tmp_path / "runs", "s", "bleu")


def test_losses_that_the_options_decide_are_not_ranked(runs, tmp_path, capsys):
    for number, run in enumerate(runs):
        part = sweeps.Member("s", {"train.learning_rate": 10.0 ** -(5 - number), "data.max_length": 128 << number})
        (run.path / SWEEP).write_text(part.to_json())
    found = rank(tmp_path / "runs", "s")
    assert found.sentence.startswith("data.max_length decides what the validation loss is")
    assert main(["list", "--sweep", "s", "--runs", str(tmp_path / "runs")]) == 0
    assert found.sentence in capsys.readouterr().out


def test_scores_of_generations(runs, tmp_path):
    """Of a run that has not ended, the latest evaluation counts; a run without generations comes last."""
    (runs[0].path / RESULT).write_text(json.dumps({"exact_match_before": 0.9, "exact_match_after": 0.5}))
    points = ({"step": step, "eval_exact_match": share} for step, share in ((0, 0.9), (2, 0.75)))
    with (runs[1].path / METRICS).open("a") as file:
        file.write("".join(json.dumps(point) + "\n" for point in points))
    found = rank(tmp_path / "runs", "s", "exact_match")
    assert order(found) == [1e-4, 1e-5, 1e-3] and found.rows[0]["exact_match"] == 0.75
    assert found.sentence == "Best by Exact match of generations: learning_rate=1e-4. 1 run has no such score yet."


def test_scores_before_training_are_not_those_of_a_run(runs, tmp_path):
    """They are those of the base model; runs with the same value are not told apart."""
    for run in runs[1:]:
        (run.path / RESULT).write_text(json.dumps({"exact_match_after": 0.5}))
    with (runs[0].path / METRICS).open("a") as file:
        file.write(json.dumps({"step": 0, "eval_exact_match": 0.6}) + "\n")
    found = rank(tmp_path / "runs", "s", "exact_match")
    assert [row["exact_match"] for row in found.rows] == [0.5, 0.5, None]
    assert ": learning_rate=1e-4. 1 other run has the same value. 1 run has no such score yet." in found.sentence


def test_scores_of_evaluations_have_intervals(runs, tmp_path, capsys):
    """The third run is a little better than the second one, which is not certain; the first one is clearly worse."""
    for run, scores in zip(runs, (LOW, MIDDLE, HIGH), strict=True):
        plant_evaluation(run, {"exact_match": (BASE, scores), "loss": ([2.0] * 40, [1.0 + sum(scores)] * 40)})
    plant_evaluation(runs[0], {"exact_match": (BASE, HIGH)}, Settings(step=2))  # a checkpoint is not the run's model
    found = rank(tmp_path / "runs", "s", "evaluation.exact_match")
    assert order(found) == [1e-3, 1e-4, 1e-5]
    first = found.rows[0]["interval"]
    assert (first["base"], first["value"], first["verdict"], first["count"]) == (0.1, 0.85, "better", 40)
    assert 0.5 < first["low"] < 0.75 < first["high"]
    assert found.rows[2]["interval"]["verdict"] == "unclear", "against its base model, not against the first run"
    assert found.sentence == (
        "Best by Exact match (evaluation): learning_rate=1e-3. 1 of 2 other evaluated runs is not clearly worse."
    )
    assert order(rank(tmp_path / "runs", "s", "evaluation.loss")) == [1e-5, 1e-4, 1e-3], "the lowest loss first"

    with client(tmp_path / "runs") as http:
        shown = http.get("/api/sweeps/s?by=evaluation.exact_match").json()
    assert shown["by"] == "evaluation.exact_match" and shown["best"] == found.sentence
    assert {each["key"] for each in shown["rankings"]} == {"eval_loss", "evaluation.exact_match", "evaluation.loss"}
    command = ["list", "--runs", str(tmp_path / "runs"), "--by", "evaluation.exact_match"]
    assert main([*command, "--sweep", "s"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "exact match (evaluation)" in lines[0] and "85.0%" in lines[1] and lines[-1] == found.sentence
    assert lines[2].strip().startswith("better than its base model (+")
    assert main(command) == 2 and "Add --sweep" in capsys.readouterr().err


def test_a_ranking_by_the_examples_that_all_runs_have_says_so(runs, tmp_path):
    for run, count in zip(runs, (6, 40, 40), strict=True):
        plant_evaluation(run, {"exact_match": (BASE[:count], HIGH[:count])})
    found = rank(tmp_path / "runs", "s", "evaluation.exact_match")
    assert found.sentence.endswith(
        "Only the 6 examples that all of these evaluations have are compared; the largest evaluation has 40."
    )


def test_an_evaluation_with_other_settings_is_not_ranked(runs, tmp_path):
    for run, count in zip(runs, (4, 4, 8), strict=True):
        settings = Settings(samples_per_prompt=count, temperature=1.0)
        plant_evaluation(run, {"exact_match": (BASE, HIGH)}, settings)
    found = rank(tmp_path / "runs", "s", "evaluation.exact_match")
    assert [row["interval"] is None for row in found.rows] == [False, False, True]
    assert "1 run has no evaluation of its final model with the settings and examples of the others." in found.sentence
