"""Evaluations without their process: settings, start and stop, the endpoints and the command."""

import errno
import json
import os

import pytest
from small import client
from test_chat import LORA, make_run, use_waiter, wait_for_end

from backend.__main__ import main
from backend.models import evaluation
from backend.models.evaluation import EXAMPLES, Settings
from backend.runs import EVALUATED, MODEL, RESULT, jobs
from backend.runs.folder import RunError
from backend.runs.listing import row

REWARD = {**LORA, "train.stage": "reward", "data.builtin": "train-pairs"}


@pytest.fixture
def waiter(tmp_path, monkeypatch):
    """Processes of evaluations only wait for the stop."""
    use_waiter(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"examples": -1}, "The number of examples must be from 0 to 10,000."),
        ({"examples": 10_001}, "The number of examples must be from 0 to 10,000."),
        ({"max_new_tokens": 0}, "The maximum number of new tokens must be from 1 to 32,768."),
        ({"examples": 0, "general": False}, "There is nothing to evaluate"),
        ({"data": "/nowhere.jsonl"}, r"The data file /nowhere\.jsonl does not exist"),
        ({"data": "/"}, r"The data file / is not a file\."),
        ({"samples_per_prompt": 65, "temperature": 1}, r"samples per prompt must be from 1 to 64\."),
        ({"samples_per_prompt": 8}, r"all 8 samples of a prompt would be the same\. Set a temperature above 0"),
        ({"top_p": 0.9}, r"top_p has no effect with temperature 0"),
        ({"top_p": 0.0, "temperature": 1}, r"top_p must be above 0"),
        ({"temperature": float("nan")}, r"The temperature must be from 0"),
        ({"temperature": 1, "examples": 0}, r"Samples and a temperature have no effect without examples"),
        (
            {"samples_per_prompt": 8, "temperature": 1, "pass_at_k": 8},
            r"above 1 and below the samples per prompt \(8\)",
        ),
        ({"step": 7}, r"The checkpoint of step 7 cannot be loaded\. Steps of checkpoints: 2\."),
    ],
)
def test_settings_that_cannot_be_evaluated(tmp_path, settings, problem):
    with pytest.raises(RunError, match=problem):
        evaluation.start(make_run(tmp_path), Settings(**settings))


def test_what_a_run_offers(tmp_path):
    run = make_run(tmp_path / "one", {**LORA, "eval.max_new_tokens": 9})
    assert evaluation.offer(run) == evaluation.Offer(
        (None, 2), True, True, 9, "", str(tmp_path / "one/evaluation_prompts.jsonl"), 0, validation_examples=32
    )
    files = {**LORA, "data.source": "files", "data.files": ["x.jsonl"], "data.validation": "none"}
    without = make_run(tmp_path / "two", {**files, "data.format": "text"})
    assert not evaluation.offer(without).has_validation and not evaluation.offer(without).generates
    with pytest.raises(RunError, match=r"This run has no validation examples\. Choose a data file"):
        evaluation.start(without, Settings())
    other = {**LORA, "data.source": "files", "data.files": ["x.jsonl"], "launch.trainer": "llamafactory"}
    run = make_run(tmp_path / "four", {**other, "data.validation": "split"})
    assert not evaluation.offer(run).has_validation, "these examples may be among those that it has trained on"
    with pytest.raises(RunError, match=r"LLaMA-Factory has split .* is not known\. Choose a data file"):
        evaluation.start(run, Settings())
    known = {**other, "data.validation": "files", "data.validation_files": ["v.jsonl"]}
    assert evaluation.offer(make_run(tmp_path / "five", known)).has_validation
    with pytest.raises(RunError, match="there are no outputs for a regular expression"):
        evaluation.start(without, Settings(data=__file__, regex="x"))
    with pytest.raises(RunError, match="Reward models cannot be evaluated here"):
        evaluation.start(make_run(tmp_path / "three", REWARD), Settings())


def no_space(*given, **options):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_stopped_and_started_again(tmp_path, waiter, monkeypatch):
    run = make_run(tmp_path / "runs")
    job = evaluation.start(run, Settings(general=False))
    assert evaluation.start(run, Settings(general=False)).id == job.id
    job.stop(save=False)
    wait_for_end(job)
    assert job.state == "stopped"
    (job.path / evaluation.OUTPUTS).write_text('{"content": "0"}\n')
    with monkeypatch.context() as patch, pytest.raises(RunError, match="No space left"):
        patch.setattr("backend.runs.folder.replace_text", no_space)
        evaluation.start(run, Settings(general=False))
    assert (job.path / evaluation.OUTPUTS).exists()
    other = evaluation.start(run, Settings(examples=5))
    assert job.path.exists() and not (other.path / evaluation.OUTPUTS).exists()
    other.stop(save=False)
    wait_for_end(other)
    later = evaluation.start(run, Settings(general=False))
    assert not job.path.exists()
    assert (later.path / evaluation.OUTPUTS).read_text() == '{"content": "0"}\n'
    run.delete()  # stops it
    assert not later.path.exists()


def test_outputs_for_other_examples_are_not_continued(tmp_path, waiter):
    """The validation file of the run was changed after the stop: its examples have other prompts now."""
    data = tmp_path / "data.jsonl"
    data.write_text("{}\n")
    files = {"data.source": "files", "data.files": [str(data)], "data.validation_split": 0.5}
    run = make_run(tmp_path / "runs", {**LORA, **files})
    for changed, is_continued in ((False, True), (True, False)):
        job = evaluation.start(run, Settings(general=False))
        job.stop(save=False)
        wait_for_end(job)
        (job.path / evaluation.OUTPUTS).write_text('{"content": "0"}\n')
        if changed:
            os.utime(data, (1, 1))
        later = evaluation.start(run, Settings(general=False))
        assert (later.path / evaluation.OUTPUTS).exists() == is_continued
        later.stop(save=False)
        wait_for_end(later)
    run.delete()


def test_outputs_are_used_again_for_other_scores(tmp_path, waiter):
    """Only the scores differ: nothing has to be generated again, whether the earlier evaluation is complete or not."""
    run = make_run(tmp_path / "runs")
    for settings, is_continued in ((Settings(), False), (Settings(regex="x"), True), (Settings(examples=5), False)):
        job = evaluation.start(run, settings)
        assert (job.path / evaluation.OUTPUTS).exists() == is_continued
        job.stop(save=False)
        wait_for_end(job)
        (job.path / evaluation.OUTPUTS).write_text('{"content": "0"}\n')
        (job.path / RESULT).write_text("{}" if settings.regex else '{"examples": 1}')
    run.delete()


def test_only_missing_verdicts_are_requested_again(tmp_path):
    run = make_run(tmp_path / "runs")
    settings = Settings(judge_url="http://127.0.0.1:1", judge_model="m", judge_agreed="http://127.0.0.1:1/v1/x")
    wanted = evaluation._versions(run, settings)
    job = jobs.create(run, jobs.EVALUATION, wanted, {}, {})
    (job.path / "lock").touch()
    for missing in (0, 20):
        (job.path / RESULT).write_text(json.dumps({"judge": {"without_verdict": missing}}))
        assert evaluation._is_source(job, evaluation._request(job)) == bool(missing)


def test_a_score_file_needs_consent(tmp_path, waiter, capsys):
    run, path = make_run(tmp_path / "runs"), tmp_path / "mine.py"
    path.write_text("def score(prompt, reference, output): return 1")
    with client(tmp_path / "runs") as http:
        route = f"/api/runs/{run.id}/evaluations"
        asked = http.post(route, json={"score_file": str(path)})
        assert asked.status_code == 409 and "needs your consent" in asked.json()["error"]
        consent = asked.json()["consent"]
        assert consent["path"] == str(path) and not evaluation.find_all(run)
        wrong = http.post(route, json={"score_file": str(path), "examples": 0})
        assert "has no effect without examples" in wrong.json()["error"] and "consent" not in wrong.json()
        path.write_text("def score(prompt, reference, output): return 0")
        values = {"score_file": str(path), "score_file_sha256": consent["sha256"]}
        assert http.post(route, json=values).json()["consent"]["sha256"] != consent["sha256"], "another file"
        values["score_file_sha256"] = http.post(route, json=values).json()["consent"]["sha256"]
        assert http.post(route, json=values).status_code == 201
    (job,) = evaluation.find_all(run)
    assert evaluation.read_settings(job.path).file_rule.sha256 == values["score_file_sha256"]
    command = ["evaluate", run.id, "--runs", str(tmp_path / "runs")]
    assert main([*command, "--score-file", str(path)]) == 2
    assert f"Its SHA-256 is {values['score_file_sha256']}. To agree, add --with-code." in capsys.readouterr().err
    assert main([*command, "--with-code"]) == 2 and "--with-code has no effect" in capsys.readouterr().err
    run.delete()


def test_rows_and_their_changes(tmp_path, waiter):
    run = make_run(tmp_path / "runs")
    job = evaluation.start(run, Settings(general=False))
    scores = [{"exact_match": [a, b], "loss": [1.0, 2.0]} for a, b in ((0, 1), (1, 1), (1, 0), (None, None))]
    (job.path / EXAMPLES).write_text(json.dumps([{"scores": each, "prompt": str(n)} for n, each in enumerate(scores)]))
    path = f"/api/runs/{run.id}/evaluations/{job.id}/examples"
    with client(tmp_path / "runs") as http:
        found = http.get(path, params={"score": "exact_match", "change": "worse"}).json()
        assert [row["prompt"] for row in found["rows"]] == ["2"]
        assert found["counts"] == {"": 4, "better": 1, "worse": 1, "unchanged": 1}
        assert http.get(path, params={"score": "loss", "first": 3}).json()["counts"]["worse"] == 4
        assert http.get(path, params={"score": "loss", "change": "x"}).status_code == 400
        relative = http.post(f"/api/runs/{run.id}/evaluations", json={"data": "mine.jsonl"})
        assert relative.status_code == 422 and "mine.jsonl of the data file is relative" in relative.json()["error"]
        assert http.post(f"/api/runs/{run.id}/jobs/{job.id}/stop", json={}).status_code == 200
        wait_for_end(job)
        assert http.delete(f"/api/runs/{run.id}/jobs/{job.id}").status_code == 200
        assert http.get(path, params={"score": "loss"}).status_code == 404
    run.delete()


def test_the_command_says_what_it_cannot_do(tmp_path, capsys):
    run = make_run(tmp_path, {**LORA, "train.stage": "pretraining", "data.format": "text"})
    assert main(["evaluate", run.id, "--runs", str(tmp_path), "--max-new-tokens", "5"]) == 2
    assert "--max-new-tokens has no effect" in capsys.readouterr().err
    assert main(["evaluate", run.id, "--runs", str(tmp_path), "--data", "nowhere.jsonl"]) == 2
    assert "nowhere.jsonl does not exist" in capsys.readouterr().err
    assert not (run.path / RESULT).with_name("jobs").exists()


def test_what_the_list_shows_ends_with_the_evaluation(tmp_path, waiter):
    run = make_run(tmp_path / "runs")
    assert row(run)["forgetting"] is None
    first, second = (evaluation.start(run, Settings(examples=n)) for n in (1, 1))
    assert first.id == second.id
    first.stop(save=False)
    wait_for_end(first)
    changed = (run.path / MODEL).stat().st_mtime_ns
    found = {"job": first.id, "model": changed, "general_loss": 4.0, "forgetting": 0.5}
    (run.path / EVALUATED).write_text(json.dumps({**found, "model": changed - 1}))
    assert row(run)["forgetting"] is None, "of a model that was replaced"
    (run.path / EVALUATED).write_text(json.dumps(found))
    assert row(run)["forgetting"] == 0.5 and row(run)["general_loss"] == 4.0
    jobs.delete(run, first)
    assert row(run)["forgetting"] is None and not first.path.exists()
    for broken in ("[1]", "{", '{"forgetting": "x"}'):
        (run.path / EVALUATED).write_text(broken)
        assert row(run)["forgetting"] is None
