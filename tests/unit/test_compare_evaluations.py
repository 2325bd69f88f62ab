"""The table of the evaluations of several runs, with planted differences."""

import os
import shutil
from dataclasses import replace

import pytest
from planted_evaluations import plant_evaluation
from small import client
from test_chat import LORA, make_run

from backend.__main__ import main
from backend.models.evaluation import Settings
from backend.models.intervals import compare as interval
from backend.runs import GENERAL_LOSS, MODEL
from backend.tasks.compare_evaluations import choose, compare

LOW, HIGH = [0.0] * 30 + [1.0] * 10, [0.0] * 10 + [1.0] * 30
ALTERNATING = [1.0, 0.0] * 20
SLOW = [2.0 + n / 100 for n in range(40)]
FAST = [loss - 0.5 for loss in SLOW]


@pytest.fixture
def runs(tmp_path):
    return [make_run(tmp_path / "runs", {**LORA, "logging.run_name": name}) for name in ("first", "second", "third")]


def table(*runs):
    chosen, problems = choose(runs)
    found = compare(chosen)
    return {row["name"]: row for row in found["rows"]}, [*problems, *found["problems"]], found


def test_each_run_is_compared_with_the_first_one(runs):
    """The second run has the same examples in another order: joined by position it would be no different."""
    backwards = [39 - n for n in range(40)]
    plant_evaluation(runs[0], {"exact_match": (LOW, LOW), "loss": (SLOW, SLOW)})
    plant_evaluation(
        runs[1], {"exact_match": (LOW[::-1], HIGH[::-1]), "loss": (SLOW[::-1], FAST[::-1])}, contents=backwards
    )
    plant_evaluation(runs[2], {"exact_match": (LOW, LOW[::-1]), "loss": (SLOW, SLOW)})
    rows, problems, found = table(*runs)
    assert not problems and [run["id"] for run in found["runs"]] == [run.id for run in runs]
    exact = rows["exact_match"]
    assert (exact["base"], [cell["value"] for cell in exact["cells"]]) == (0.25, [0.25, 0.75, 0.25])
    assert [cell["verdict"] for cell in exact["cells"]] == ["unclear", "better", "unclear"]
    expected = interval("exact_match", "", LOW, HIGH)
    assert (exact["cells"][1]["low"], exact["cells"][1]["high"]) == (expected.low, expected.high)
    loss = rows["loss"]
    assert [cell["verdict"] for cell in loss["cells"]] == ["unclear", "better", "unclear"] and not loss["is_share"]
    assert loss["cells"][1]["low"] == pytest.approx(-0.5) == loss["cells"][1]["high"]
    assert not found["notes"]


def test_runs_that_cannot_be_compared_are_named(runs):
    scores = {"exact_match": (LOW, LOW)}
    first, second, third = runs
    plant_evaluation(first, scores)
    plant_evaluation(second, scores, contents=range(100, 140))
    rows, problems, found = table(*runs)
    assert [(each["id"], each["sentence"]) for each in problems] == [
        (third.id, "It has no complete evaluation."), (second.id, "It was evaluated on other examples."),
    ] and not rows and len(found["runs"]) == 1  # fmt: skip
    plant_evaluation(second, scores)
    plant_evaluation(third, scores, Settings(max_new_tokens=7, regex="x"))
    rows, problems, _ = table(*runs)
    assert (
        problems
        == [
            {
                "id": third.id,
                "sentence": "Its evaluation differs from those of the other runs in: maximum number of new tokens, "
                "regular expression.",
            }
        ]
        and len(rows["exact_match"]["cells"]) == 2
    )
    os.utime(second.path / MODEL, (1, 1))
    assert "Its model has changed since its evaluation" in table(*runs)[1][0]["sentence"]


def test_samples_and_temperature_must_be_the_same(runs):
    for run, count in zip(runs, (4, 4, 8), strict=True):
        plant_evaluation(run, {"exact_match": (LOW, HIGH)}, Settings(samples_per_prompt=count, temperature=count / 10))
    _, problems, found = table(*runs)
    assert [(each["id"], each["sentence"]) for each in problems] == [
        (runs[2].id, "Its evaluation differs from those of the other runs in: samples per prompt, temperature."),
    ] and len(found["runs"]) == 2  # fmt: skip


def test_the_settings_that_most_runs_share_are_compared(runs):
    """The newest evaluation of the first run has other settings, but an earlier one has the same as the other runs."""
    other = Settings(regex="x")
    for run in runs:
        plant_evaluation(run, {"exact_match": (LOW, HIGH)})
    plant_evaluation(runs[0], {"exact_match": (LOW, LOW)}, other)
    rows, problems, _ = table(*runs)
    assert [cell["value"] for cell in rows["exact_match"]["cells"]] == [0.75] * 3 and not problems


def test_only_shared_examples_and_equal_labels_count(runs):
    plant_evaluation(runs[0], {"exact_match": (LOW, LOW), "loss": (SLOW, SLOW), GENERAL_LOSS: ([2.0] * 9, [2.0] * 9)})
    plant_evaluation(
        runs[1],
        {"exact_match": (LOW[:5], LOW[:5]), "loss": (SLOW[:5], SLOW[:5]), GENERAL_LOSS: ([2.0] * 9, [3.0] * 9)},
        labels="other",
    )
    rows, _, found = table(*runs[:2])
    assert list(rows) == ["exact_match"] and rows["exact_match"]["count"] == 5
    assert [cell["verdict"] for cell in rows["exact_match"]["cells"]] == ["few", "few"]
    assert found["notes"][0].startswith("Only the 5 examples that all of these evaluations have are compared;")
    assert all("is not compared: the models of these runs get different tokens" in note for note in found["notes"][1:])
    assert len(found["notes"]) == 3


def test_examples_that_are_shared_are_not_said_to_be_missing(runs):
    for run in runs[:2]:
        plant_evaluation(run, {"loss": (SLOW, SLOW)}, labels=run.id)
    rows, _, found = table(*runs[:2])
    assert not rows and [note[:21] for note in found["notes"]] == ["Loss per token is not"]


def test_evaluations_that_cannot_be_used(runs):
    """A file that is damaged is not in the way of the others."""
    jobs = [plant_evaluation(run, {"exact_match": (LOW, LOW), GENERAL_LOSS: (SLOW, SLOW)}) for run in runs[:2]]
    plant_evaluation(runs[2], {GENERAL_LOSS: (SLOW, SLOW)}, Settings(examples=0))
    found = table(*runs)[2]
    assert [each["sentence"] for each in found["problems"]] == ["It was evaluated on general texts only."]
    (jobs[0].path / "result.json").write_text("[]")
    assert choose(runs)[1] == [{"id": runs[0].id, "sentence": "It has no complete evaluation."}]
    (jobs[1].path / "evaluation.json").write_text("")
    shutil.rmtree(runs[1].path / MODEL)
    assert [each.run for each in choose(runs)[0]] == [runs[2]]


def test_many_intervals_are_not_all_certain(runs):
    scores = {f"score {n}": (LOW, ALTERNATING) for n in range(10)}
    for run in runs[:2]:
        plant_evaluation(run, scores)
    assert table(*runs[:2])[2]["notes"] == [
        "Of 20 intervals of 95%, about 1 would exclude zero by chance alone if all models were equally good."
    ]


def test_scores_of_a_judge_are_left_out(runs):
    """They are relative to the base model, so a difference between two runs would say little."""
    for run in runs[:2]:
        plant_evaluation(run, {"exact_match": (LOW, LOW), "judge": (LOW, HIGH)})
    rows, _, found = table(*runs[:2])
    assert list(rows) == ["exact_match"] and "The judge compares each model with its base model" in found["notes"][0]


def test_the_command_prints_one_table_of_what_exists(runs, capsys):
    settings = Settings(max_new_tokens=128)
    for run, after in zip(runs, (LOW, HIGH, LOW), strict=True):
        plant_evaluation(run, {"exact_match": (LOW, after)}, settings)
    folder = ["--runs", str(runs[0].path.parent)]
    names = [run.id for run in runs]
    assert main(["evaluate", *names, *folder, "--max-new-tokens", "128"]) == 0
    out, err = capsys.readouterr()
    assert err.count("using the evaluation") == 3
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["Exact", "match", "(40", "texts)"] and lines[1][-1] == "25.0%"
    assert lines[2][:2] == [names[0], "25.0%"] and "no clear change from its base model" in out.splitlines()[2]
    assert lines[3][:6] == [names[1], "75.0%", "better", "than", "the", "first"]
    assert main(["evaluate", names[0], names[0], *folder]) == 2
    assert "A run is named twice" in capsys.readouterr().err
    assert main(["evaluate", *names, *folder, "--step", "7"]) == 2
    assert capsys.readouterr().err.startswith(f"{names[0]}: The checkpoint of step 7 cannot be loaded.")
    shutil.rmtree(runs[1].path / MODEL)
    plant_evaluation(runs[1], {"exact_match": (LOW, HIGH)}, replace(settings, step=2))
    assert main(["evaluate", *names, *folder, "--max-new-tokens", "128"]) == 0
    assert f"{names[1]} has no final model. Using its newest checkpoint, of step 2" in capsys.readouterr().err


def test_the_endpoint(runs):
    for run in runs[:2]:
        plant_evaluation(run, {"exact_match": (LOW, LOW)})
    with client(runs[0].path.parent) as http:
        path = "/api/comparison/evaluations"
        found = http.get(path, params={"ids": ",".join(run.id for run in runs)}).json()
        assert [row["label"] for row in found["rows"]] == ["Exact match"] and found["problems"][0]["id"] == runs[2].id
        assert http.get(path, params={"ids": runs[0].id}).status_code == 422
