"""Benchmarks without their process: tasks in files, settings, start and stop, the endpoints, the command, the rows."""

import json
from pathlib import Path

import pytest
from failed_runs import ended
from small import client
from test_chat import LORA, make_run, use_waiter
from test_evaluation import REWARD, wait_for_end

from backend import environments
from backend.__main__ import main
from backend.inference import benchmark_results
from backend.models import benchmark, benchmark_tasks
from backend.models.benchmark import SAMPLES, Settings
from backend.runs import LOCK, RESULT
from backend.runs.folder import RunError

TASK = """
task: colors
dataset_path: json
dataset_kwargs: {data_files: {test: colors.jsonl}}
test_split: test
doc_to_text: "{{question}}"
"""


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """The environment lm-eval, which is only marked as complete."""
    monkeypatch.setenv("FOOTPLATE_CACHE", str(tmp_path / "cache"))
    folder = environments.environment_folder("lm-eval")
    folder.mkdir(parents=True)
    (folder / environments.COMPLETE).touch()
    return folder


@pytest.fixture
def waiter(tmp_path, monkeypatch):
    """Processes of benchmarks only wait for the stop."""
    use_waiter(tmp_path, monkeypatch)


@pytest.fixture
def task(tmp_path):
    path = tmp_path / "colors.yaml"
    path.write_text(TASK)
    return path


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ("", []),
        ("doc_to_choice: [a, b]", []),
        ("process_docs: !function utils.process", ["process_docs: !function utils.process"]),
        ("metric_list: [{metric: !function utils.score}]", ["metric_list.metric: !function utils.score"]),
        ("metric_list: [{metric: bleu, hf_evaluate: true}]", ["metric_list.hf_evaluate: true"]),
        ("unsafe_code: true", ["unsafe_code: true"]),
        ("unsafe_code: false", []),
        ("class: !function task.Task", ["class: !function task.Task"]),
        ("dataset_kwargs: {trust_remote_code: true}", ["dataset_kwargs.trust_remote_code: true"]),
        ("dataset_path: pandas", ["dataset_path: pandas"]),
        ("include: base", ["doc_to_target: !function utils.target"]),
        ("include: base\ndoc_to_target: null", ["doc_to_target: !function utils.target"]),
        ("description: !function a.b\ndescription: x", ["description: !function a.b"]),
        ("metadata: {? !function a.b : 1}", ["metadata: !function a.b"]),
        ("metadata: &x [*x, &p pandas]\ndataset_path: *p", ["dataset_path: pandas"]),
    ],
)
def test_what_runs_code(tmp_path, task, more, code):
    (tmp_path / "base").write_text("doc_to_target: !function utils.target\n")
    task.write_text(TASK + more)
    assert benchmark_tasks.code_in(task) == code and benchmark_tasks.name_of(task) == "colors"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "has no keys"),
        ("{", "is not valid YAML"),
        ("a: !!python/object/apply:os.system [ls]", "is not valid YAML"),
        ("include: colors.yaml", "includes itself"),
        ("include: nowhere.yaml", r"nowhere\.yaml cannot be read: No such file"),
        ("doc_to_text: x", "has no key `task`"),
        ("x: " + "y" * 2**20, "larger than 1 MiB"),
    ],
)
def test_files_that_are_no_tasks(task, text, words):
    task.write_text(text)
    with pytest.raises(RunError, match=words):
        benchmark_tasks.name_of(task)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"tasks": ()}, "No task is set"),
        ({"limit": -1}, "The limit of samples must be from 1 to 1,000,000, or 0 for all; it is -1"),
        ({"shots": 65}, "The number of few-shot examples must be from 0 to 64; it is 65"),
        ({"step": 7}, r"The checkpoint of step 7 cannot be loaded\. Steps of checkpoints: 2\."),
        ({"tasks": ("a", "/nowhere.yaml")}, r"The task file /nowhere\.yaml cannot be read"),
        ({"tasks": ("a", "b", "a")}, "Two of the tasks are called a"),
        ({"chat_template": True}, "has no chat template"),
    ],
)
def test_settings_that_cannot_be_measured(tmp_path, environment, settings, problem):
    run = make_run(tmp_path / "runs", template="")
    with pytest.raises(RunError, match=problem):
        benchmark.start(run, Settings(**{"tasks": ("arc_easy",), **settings}))


def test_what_a_run_offers(tmp_path, monkeypatch):
    monkeypatch.setenv("FOOTPLATE_CACHE", str(tmp_path / "cache"))
    run = make_run(tmp_path / "one")
    offered = benchmark.offer(run)
    assert offered.steps == (None, 2) and offered.is_chat and not offered.problem
    assert "`footplate env create lm-eval`" in offered.missing and "MB" in offered.missing
    with pytest.raises(RunError, match=r"lm-eval is not installed\. Run `footplate env create lm-eval`"):
        benchmark.start(run, Settings(("arc_easy",)))
    assert not benchmark.offer(make_run(tmp_path / "two", {**LORA, "train.stage": "pretraining"})).is_chat
    with pytest.raises(RunError, match="Reward models cannot be benchmarked"):
        benchmark.start(make_run(tmp_path / "three", REWARD), Settings(("arc_easy",)))


def test_from_start_to_result(tmp_path, environment, waiter, task, capsys):
    run = make_run(tmp_path / "runs")
    task.write_text(TASK + "process_docs: !function utils.process")
    start = {"tasks": f"arc_easy, {task}", "limit": 5}
    path = f"/api/runs/{run.id}/benchmarks"
    with client(tmp_path / "runs") as http:
        relative = http.post(path, json={"tasks": "colors.yaml"}).json()["error"]
        assert relative.endswith(f"is relative. Enter its absolute path, such as {Path('colors.yaml').absolute()}.")
        refused = http.post(path, json=start)
        assert "process_docs: !function utils.process" in refused.json()["error"]
        started = http.post(path, json={**start, "allow_code": True})
        assert started.status_code == 201
        (job,) = benchmark.find_all(run)
        assert benchmark.read_settings(job.path) == Settings(("arc_easy", str(task)), limit=5, allow_code=True)
        assert http.post(path, json={**start, "allow_code": True}).json()["id"] == job.id
        assert "is in progress" in http.post(path, json={"tasks": "arc_easy"}).json()["error"]
        assert main(["benchmark", run.id, "--runs", str(tmp_path / "runs"), "--tasks", "x"]) == 2
        assert "is in progress" in capsys.readouterr().err
        assert http.post(f"/api/runs/{run.id}/jobs/{job.id}/stop", json={}).status_code == 200
        wait_for_end(job)
        shown = http.get(path).json()
        assert shown["jobs"][0]["state"] == "stopped" and http.get(f"{path}?have={shown['tag']}").status_code == 204
        assert http.get(f"{path}/{job.id}/{SAMPLES}").status_code == 404
        (job.path / SAMPLES).write_text('{"doc_id": 0}\n')
        assert http.get(f"{path}/{job.id}/{SAMPLES}").text == '{"doc_id": 0}\n'
    run.delete()


def test_the_command_prints_the_rows(tmp_path, environment, monkeypatch, capsys):
    run = make_run(tmp_path / "runs")

    def finish(job, **_):
        (job.path / LOCK).touch()
        ended(job, end="done", exit_code=0)
        result = {"rows": [{"sentence": "colors: acc: 1."}], "limits": ["A limit."], "chat_template": True}
        (job.path / RESULT).write_text(json.dumps({**result, "versions": {"lm_eval": "0.4.13"}}))

    monkeypatch.setattr("backend.runs.folder.Run.start", finish)
    assert main(["benchmark", run.id, "--runs", str(tmp_path / "runs"), "--tasks", "arc_easy", "--no-base"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "colors: acc: 1." and "with the chat template. lm-eval 0.4.13" in lines[1]
    assert lines[2] == "Limitation: A limit." and lines[3].endswith(SAMPLES)


# -- the rows of a result ----------------------------------------------------------------------------------------------


def result(values, task="t", **metrics):
    """As lm-eval has it, with `values` of the metric acc of each sample."""
    mean = sum(values) / len(values)
    samples = [{"doc_id": n, "filter": "none", "acc": value, "other": value} for n, value in enumerate(values)]
    return {
        "results": {task: {"acc,none": mean, "acc_stderr,none": 0.1, "other_stderr,none": "N/A", **metrics}},
        "n-shot": {task: 0},
        "n-samples": {task: {"original": 100, "effective": len(values)}},
        "higher_is_better": {task: {"acc": True, "other": False}},
        "samples": {task: samples},
    }  # fmt: skip


def test_rows_are_compared_where_a_metric_is_a_mean_of_shares():
    base, tuned = result([0.0] * 20 + [1.0] * 5), result([1.0] * 20 + [0.0] * 5, **{"other,none": 12.5})
    base["results"]["t"]["other,none"] = 10.0
    base["samples"]["t"].reverse()  # samples are paired by their number
    acc, other = benchmark_results.rows({"base": base, "trained": tuned})
    assert (acc["base"], acc["trained"], acc["count"], acc["stderr"]["base"]) == (0.2, 0.8, 25, 0.1)
    assert acc["verdict"] == "better" and acc["low"] > 0 and acc["label"] == "t: acc"
    assert other["verdict"] == "" and other["stderr"]["trained"] is None
    assert other["sentence"] == (
        "t: other: base model 10, trained model 12.5; not compared: no paired interval is available for this metric."
    )
    (alone,) = benchmark_results.rows({"trained": result([1.0, 0.0])})
    assert alone["base"] is None and alone["sentence"] == "t: acc: trained model 50.0%."


def test_values_that_are_no_numbers():
    """They do not lose the other figures, although JSON does not have them."""
    base = result([0.0] * 20, **{"ppl,none": 8.0, "mcc,none": float("nan"), "bleu,none": "N/A"})
    tuned = result([1.0] * 20, **{"ppl,none": float("inf"), "ppl_stderr,none": float("nan"), "mcc,none": 0.5})
    tuned["results"]["t"] |= {"bleu,none": 2.0, "only,none": 1.0}
    rows = {row["metric"]: row for row in benchmark_results.rows({"base": base, "trained": tuned})}
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    assert rows["acc"]["verdict"] == "better" and (rows["ppl"]["base"], rows["ppl"]["trained"]) == (8.0, None)
    assert rows["ppl"]["sentence"] == "t: ppl: base model 8, trained model not a number, so they are not compared."
    assert [rows[name]["base"] for name in ("mcc", "bleu", "only")] == [None] * 3


def test_no_praise_within_the_interval():
    sides = {"base": result([0.0] * 12 + [1.0] * 12), "trained": result([0.0] * 11 + [1.0] * 13)}
    (row,) = benchmark_results.rows(sides)
    assert row["verdict"] == "unclear" and "no clear change" in row["sentence"]
    few = {"base": result([0.0] * 7), "trained": result([1.0] * 7)}
    assert [row["verdict"] for row in benchmark_results.rows(few)] == ["few"]
    assert "t has too few samples" in benchmark_results.limits(few, benchmark_results.rows(few), 0, None, False)[-1]


def test_a_group_has_the_samples_of_its_tasks():
    def group(one, two):
        made, other = result(one, "a"), result(two, "b")
        for key in ("results", "samples", "n-shot", "n-samples", "higher_is_better"):
            made[key] |= other[key]
        mean = sum(one + two) / len(one + two)
        made["groups"] = {"g": {"alias": "g", "acc,none": mean, "acc_stderr,none": 0.05}}
        return {**made, "group_subtasks": {"g": ["a", "b"]}, "higher_is_better": {"g": {"acc": True}}}

    sides = {"base": group([0.0] * 10, [0.0] * 30), "trained": group([1.0] * 10, [1.0] * 30)}
    row = next(row for row in benchmark_results.rows(sides) if row["task"] == "g")
    assert (row["count"], row["verdict"], row["trained"]) == (40, "better", 1.0)


def test_limits():
    sides = {"trained": result([1.0] * 9)}
    found = benchmark_results.limits(sides, benchmark_results.rows(sides), 9, 5, True)
    assert found[0].startswith("t used only the first 9 of its 100 samples: do not compare")
    assert found[1] == "t has a fixed number of few-shot examples, not 5."
    assert found[2] == "At least one prompt exceeded the context length and was left-truncated."
