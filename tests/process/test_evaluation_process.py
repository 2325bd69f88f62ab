"""Evaluating the models of a run: losses and outputs are those of training, and a stopped evaluation continues."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from fake_judge import Asked, serve_judge
from fork_server import ForkServer
from test_chat_process import wait_for
from training_runs import log_text, make_spec, result
from transformers import AutoModelForCausalLM, AutoTokenizer

from backend.cli.evaluate import evaluate_each
from backend.config.options import edit
from backend.inference import examples
from backend.inference.evaluation import LOSS_WORK, Evaluation
from backend.inference.examples import Item
from backend.models import evaluation
from backend.models.evaluation import EXAMPLES, OUTPUTS, Settings
from backend.models.spec import read_spec
from backend.runs import MODEL, jobs, processes
from backend.runs.folder import ALIVE, Run, RunError
from backend.runs.listing import row
from backend.scoring.scorer import sha256_of
from backend.train.generation_eval import EvalPrompt, Generated

NEW_TOKENS = 6
TRAINED = {
    "save.final_model": True, "save.strategy": "steps", "save.steps": 2, "eval.num_generations": 3,
    "eval.per_device_eval_batch_size": 2, "eval.max_new_tokens": NEW_TOKENS, "eval.strategy": "epoch",
}  # fmt: skip
ALL = Settings(examples=10_000, max_new_tokens=NEW_TOKENS, general=False)


@pytest.fixture
def finish(fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Run]]:
    """Starts an evaluation and waits for its end; asserts that no process is left."""
    monkeypatch.setattr(sys, "executable", str(fork_server.python))
    started: list[Run] = []

    def finish_one(run: Run, settings: Settings, state: str = "done") -> Run:
        started.append(job := evaluation.start(run, settings))
        wait_for(lambda: job.state not in ALIVE)
        assert job.state == state, log_text(job.path)
        return job

    yield finish_one
    for job in started:
        assert not processes.run_processes(job.path)


@pytest.fixture(scope="module")
def run(fork_server: ForkServer, root: Path) -> Run:
    """A run that has trained an adapter whose initialization changed the base weights."""
    return Run(fork_server.train(root / "evaluated", make_spec({**TRAINED, "lora.init": "pissa"})))


def comparison(job: Run, name: str) -> dict[str, Any]:
    """What the result says about a score."""
    return next(each for each in job.result()["comparisons"] if each["name"] == name)


def test_it_measures_what_training_measured(run: Run, tiny: Path, finish: Callable[..., Run]) -> None:
    trained = result(run.path)
    job = finish(run, ALL)
    rows = evaluation.rows(job)
    assert len(rows) == job.result()["examples"] == 32 and not job.result()["limits"]
    loss = comparison(job, "loss")
    assert loss["trained"] == pytest.approx(trained["eval_loss"], abs=2e-5)
    by_prompt = {row["prompt"]: row for row in rows}
    for sample in trained["samples"]:
        example = by_prompt[sample["prompt"]]
        assert [example[key] for key in ("reference", "base", "trained")] == [
            sample[key] for key in ("reference", "before", "after")
        ]
    assert [found["scores"] for found in evaluation.numbers(job).values()] == [row["scores"] for row in rows]
    assert_loss_of(tiny, job, rows[0], run)
    assert (loss["low"] < loss["trained"] - loss["base"] < loss["high"]) and loss["count"] == 32
    ends = comparison(job, "ends")
    assert ends["trained"] == numpy.mean([row["scores"]["ends"][1] for row in rows])


def assert_loss_of(tiny: Path, job: Run, row: dict[str, Any], run: Run) -> None:
    """The loss of the base model for an example is that of transformers for the reference after the prompt."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny), AutoTokenizer.from_pretrained(run.path / MODEL)
    items = examples.read(read_spec(run), ALL, tokenizer, print)
    item = next(item for item in items if item.prompt and item.prompt.prompt == row["prompt"])
    assert tokenizer.decode([label for label in item.labels if label >= 0]).strip().startswith(row["reference"])
    with torch.no_grad():
        expected = float(model(torch.tensor([item.ids]), labels=torch.tensor([item.labels])).loss)
    assert row["scores"]["loss"][0] == pytest.approx(expected, abs=1e-5)


def test_runs_with_other_seeds_have_the_same_examples(run: Run) -> None:
    """Otherwise the runs of a sweep over seeds could not be compared. The labels depend on the options."""
    tokenizer, few, spec = AutoTokenizer.from_pretrained(run.path / MODEL), replace(ALL, examples=8), read_spec(run)
    other = edit(spec, {"train.seed": 7, "data.loss_on": "all_tokens"})
    first, second = (examples.read(each, few, tokenizer, print) for each in (spec, other))
    assert [item.content for item in first] == [item.content for item in second] and len(first) == 8
    assert len({item.content for item in first}) == 8
    assert [item.labels for item in first] != [item.labels for item in second]


def test_custom_scores_use_the_outputs_that_exist(run: Run, finish: Callable[..., Run], tmp_path: Path) -> None:
    """The evaluation with all examples has their outputs; a function that counts characters finds all of them."""
    earlier = next((job for job in evaluation.find_all(run) if job.result()), None) or finish(run, ALL)
    file = tmp_path / "mine.py"
    file.write_text("def score(prompt, reference, output):\n    return len(output) / 1000 if prompt else 1 / 0\n")
    settings = replace(ALL, regex=r"(\w)", score_file=str(file), score_file_sha256=sha256_of(str(file)))
    job = finish(run, settings)
    assert evaluation._outputs(job) == evaluation._outputs(earlier), "nothing was computed again"
    rows = evaluation.rows(job)
    for example in rows:
        texts = [example["base"], example["trained"]]
        assert example["scores"]["score_file"] == [len(text) / 1000 for text in texts]
        assert example["scores"]["regex"] == [float(any(map(str.isalnum, text))) for text in texts]
    means = numpy.mean([example["scores"]["score_file"] for example in rows], axis=0)
    found = comparison(job, "score_file")
    assert [found["base"], found["trained"]] == pytest.approx(means) and found["label"] == "Score of mine.py"

    file.write_text("def score(prompt, reference, output):\n    return 1 / len(prompt and '')\n")
    broken = finish(run, replace(settings, score_file_sha256=sha256_of(str(file))), "failed")
    failure = broken.failure()
    assert failure and failure["sentence"].startswith(
        f"The score file {file} raised ZeroDivisionError in line 2: division by zero (example 1, output of the base"
    )


def test_a_judge_compares_the_outputs_that_exist(
    run: Run, finish: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails in the middle; the next evaluation asks for the missing verdicts only. The key is in no file."""
    monkeypatch.setenv("JUDGE_API_KEY", "sk-judge-s3cret")

    def prefer_longer(asked: Asked) -> str:
        one, other = map(len, asked.pair)
        return f"[[{'C' if one == other else 'A' if one > other else 'B'}]]"

    with serve_judge(prefer_longer, "[[C]]", "[[C]]", (404, "sk-judge-s3cret is unknown")) as judge:
        settings = replace(ALL, judge_url=judge.url, judge_model="m1", judge_key="JUDGE_API_KEY")
        settings = evaluation.with_consent(settings)
        failed = finish(run, settings, "failed")
        assert (failure := failed.failure()) and failure["sentence"].startswith(f"The judge m1 at {judge.url} refused")
        assert failed.progress()["fraction"] < 0.99, "the requests to the judge are work, too"
        before, log = len(judge.asked), log_text(failed.path)
        job = finish(run, settings)
    rows, found = evaluation.rows(job), comparison(job, evaluation.JUDGE)
    different = [row for row in rows if row["base"] != row["trained"]]
    assert len(judge.asked) == 3 + 2 * len(different) - 2, "each order of each example once, and the refused request"
    assert before == 3 and all(asked.headers["Authorization"] == "Bearer sk-judge-s3cret" for asked in judge.asked)
    pairs = [asked.pair for asked in judge.asked]
    assert {(row["trained"], row["base"]) for row in different} < set(pairs), "both orders"
    longer = [len(row["trained"]) - len(row["base"]) for row in rows]
    expected = [0.5 if each == 0 else float(each > 0) for each in longer]
    expected[rows.index(different[0])] = 0.5  # the first two replies
    assert [row["scores"]["judge"][1] for row in rows] == expected and found["trained"] == numpy.mean(expected)
    assert job.result()["judge"]["without_verdict"] == 0 and found["count"] == len(rows)
    texts = [path.read_bytes() for path in run.path.rglob("*") if path.is_file()]
    assert not any(b"s3cret" in text for text in texts) and "s3cret" not in log


def test_the_command_compares_runs(run: Run, finish: Callable[..., Run], capsys: pytest.CaptureFixture[str]) -> None:
    """A copy of the run has the same outputs, so nothing is certain; the evaluation of the first run is used again."""
    copy = shutil.copytree(run.path, run.path.parent / "evaluated-copy", ignore=shutil.ignore_patterns("jobs"))
    settings = replace(ALL, examples=12, max_new_tokens=2)
    job = finish(run, settings)
    assert evaluate_each([run, Run(copy)], settings, as_json=True) == 0
    out, err = capsys.readouterr()
    assert f"{run.id}: using the evaluation {job.id}." in err
    found = json.loads(out)
    assert [each["id"] for each in found["runs"]] == [run.id, "evaluated-copy"] and not found["problems"]
    rows = {each["name"]: each for each in found["rows"]}
    assert rows["loss"]["count"] == rows["exact_match"]["count"] == 12
    for name, shown in rows.items():
        first, second = shown["cells"]
        expected = [comparison(job, name)[key] for key in ("base", "trained", "low")]
        assert [shown["base"], first["value"], first["low"]] == pytest.approx(expected)
        assert second["value"] == pytest.approx(first["value"]) and second["verdict"] == "unclear", name


def test_a_stopped_evaluation_continues_with_what_it_has(run: Run, finish: Callable[..., Run]) -> None:
    settings = Settings(step=2, examples=8, max_new_tokens=4000, general=False)
    job = evaluation.start(run, settings)
    wait_for(lambda: '"loss"' in evaluation._outputs(job) and job.progress().get("phase") == "evaluating")
    with pytest.raises(RunError, match=r"This run is being evaluated .*Wait until that has finished, or stop it\."):
        evaluation.start(run, ALL)
    assert evaluation.start(run, settings).id == job.id, "the same evaluation is not started twice"
    job.stop(save=False)
    wait_for(lambda: job.state not in ALIVE, 30)
    assert job.state == "stopped" and not job.result() and not processes.run_processes(job.path)

    kept = [json.loads(line) for line in evaluation._outputs(job).splitlines()]
    changed = [{**line, "loss": 1000.0} if "loss" in line else line for line in kept]  # shows which are used again
    items = examples.read(read_spec(run), settings, AutoTokenizer.from_pretrained(run.path / MODEL), print)
    changed += [{"side": side, "content": item.content, "text": "x", "ended": True} for side in ("base", "trained")
                for item in items]  # fmt: skip
    changed += [{"side": "trained", "key": f"example {n}", "loss": 2000.0} for n in range(8)]  # of an older version
    (job.path / OUTPUTS).write_text("".join(json.dumps(line) + "\n" for line in changed))
    later = finish(run, settings)
    assert job.path.exists() == (later.id == job.id), "the same id, if it started in the same second"
    losses = [row["scores"]["loss"][1] for row in evaluation.rows(later)]
    assert sum(loss > 10 for loss in losses) == sum(line.get("side") == "trained" and "loss" in line for line in kept)
    assert all(row["trained"] == "x" for row in evaluation.rows(later))


def test_the_remaining_time_is_that_of_the_work_of_this_start() -> None:
    """What both models have from an earlier start counts from the beginning; scores may take long after all of it."""
    started, item = Evaluation.__new__(Evaluation), Item("a", [1], [1], prompt=EvalPrompt("a", "a", "b", "a"))
    started.settings, started.found = Settings(max_new_tokens=10, samples_per_prompt=2), {("base", "a"): {"loss": 1.0}}
    started.outputs = {("base", "a"): dict.fromkeys((0, 1, 2), Generated("", True))}
    assert [started._kept_work(side, item) for side in ("base", "trained")] == [LOSS_WORK + 2 * 10, 0]
    started.models_work = started.total = 100
    started.began = (time.monotonic() - 60, 50)
    assert [started._left(done) for done in (51, 75, 100)] == ["", ", about 1 min left", ""]


@pytest.mark.soak
def test_samples_are_drawn_again_with_the_same_seeds(run: Run, finish: Callable[..., Run]) -> None:
    """An evaluation that continues, and one with more samples, have the outputs of one that does all at once."""
    four = replace(ALL, examples=3, samples_per_prompt=4, temperature=1.5)
    job = finish(run, four)
    rows = evaluation.rows(job)
    texts = [[one["text"] for one in row["samples"][side]] for row in rows for side in ("base", "trained")]
    assert all(len(each) == 4 for each in texts) and all(len(set(each)) > 1 for each in texts)
    means = [numpy.mean([sample["scores"]["chrf"] for sample in row["samples"]["trained"]]) for row in rows]
    assert means == pytest.approx([row["scores"]["chrf"][1] for row in rows])  # Python 3.12 adds in another way
    assert comparison(job, "exact_match_pass_at_4")["count"] == 3 and job.result()["generated_outputs"] == 24
    lines = [json.loads(line) for line in evaluation._outputs(job).splitlines()]
    kept = [line for line in lines if line.get("sample", 0) in (0, 3) or line["side"] == "base"]
    assert len(kept) == 2 * 3 + 2 * 3 + 4 * 3
    (job.path / OUTPUTS).write_text("".join(json.dumps(line) + "\n" for line in kept))
    later = finish(run, replace(four, samples_per_prompt=5, pass_at_k=2))
    assert later.result()["generated_outputs"] == 2 * 3 + 2 * 3, "two missing ones of the trained model, and the fifth"
    five = [[one["text"] for one in row["samples"][side]] for row in evaluation.rows(later)
            for side in ("base", "trained")]  # fmt: skip
    assert [each[:4] for each in five] == texts and comparison(later, "exact_match_pass_at_2")["label"].endswith("@2")


def test_other_data_and_general_texts(run: Run, finish: Callable[..., Run], tmp_path: Path) -> None:
    data = tmp_path / "mine.jsonl"
    turns = [{"role": "user", "content": "Two?"}, {"role": "assistant", "content": '{"n": 2}'}]
    data.write_text(f"{json.dumps({'messages': turns})}\n" * 2)
    job = finish(run, Settings(data=str(data), examples=1, max_new_tokens=2))
    (example,) = evaluation.rows(job)
    assert (example["prompt"], example["reference"]) == ("Two?", '{"n": 2}')
    assert {each["name"] for each in job.result()["comparisons"]} == {
        "exact_match", "valid_json", "json_fields", "rouge_l", "chrf", "ends", "loss", "general_loss",
    }  # fmt: skip
    general = comparison(job, "general_loss")
    listed = row(run)
    assert general["count"] == 216 and listed["general_loss"] == general["trained"]
    assert listed["forgetting"] == general["trained"] - general["base"] != 0
    assert job.result()["limits"] == ["1 example is too few to tell a change from chance. Use at least 100 if you can."]

    tokenizer = AutoTokenizer.from_pretrained(run.path / MODEL)
    item = examples.read(read_spec(run), replace(ALL, data=str(data)), tokenizer, print)[0]
    assert item.prompt and "As JSON" in item.prompt.text, "the system prompt of training"
    data.write_text('{"question": 1}\n')
    broken = finish(run, Settings(data=str(data), examples=1, general=False), "failed")
    failure = broken.failure()
    assert failure and "mine.jsonl" in failure["sentence"]
    assert next(found.id for found in jobs.find_all(run, jobs.EVALUATION)) == broken.id
    with pytest.raises(RunError, match="This evaluation has no examples"):
        evaluation.rows(broken)
    assert not (broken.path / EXAMPLES).exists()


@pytest.mark.soak
def test_examples_without_a_loss_are_told(run: Run, finish: Callable[..., Run], tmp_path: Path) -> None:
    """The prompt of one example alone is longer than data.max_length."""
    data = tmp_path / "mine.jsonl"
    data.write_text("".join(json.dumps({"prompt": "Two? " * n, "completion": "2"}) + "\n" for n in (1, 1, 300)))
    found = finish(run, Settings(data=str(data), examples=10, max_new_tokens=1, general=False))
    assert found.result()["limits"][0] == (
        "1 example of 3 has no completion within the first 256 tokens (data.max_length). The loss is computed "
        "on the others."
    )
    assert (comparison(found, "loss")["count"], comparison(found, "chrf")["count"]) == (2, 3)


def test_texts_and_full_weights(fork_server: ForkServer, root: Path, finish: Callable[..., Run]) -> None:
    """Pretraining has no prompts; the base model is loaded after the trained one was given up."""
    options = {"method.kind": "full", "train.stage": "pretraining", "eval.num_generations": 0}
    run = Run(fork_server.train(root / "evaluated-texts", make_spec({**TRAINED, **options})))
    assert not evaluation.offer(run).generates
    job = finish(run, ALL)
    assert comparison(job, "loss")["trained"] == pytest.approx(result(run.path)["eval_loss"], abs=2e-5)
    assert comparison(job, "loss")["verdict"] == "better" and len(job.result()["comparisons"]) == 1
    assert "Loading the base model." in log_text(job.path)


@pytest.mark.soak
def test_a_continued_adapter_is_compared_with_the_base_model(
    run: Run, fork_server: ForkServer, root: Path, finish: Callable[..., Run]
) -> None:
    """Not with the adapter that training started with, which may be deleted: the result says so."""
    adapter = run.path / MODEL
    own = {"lora.adapter_path": str(adapter), "lora.r": 32, "lora.alpha": 64.0}  # PiSSA's ranks are doubled
    later = Run(fork_server.train(root / "evaluated-continued", make_spec({**TRAINED, **own})))
    settings = Settings(examples=40, max_new_tokens=1, general=False)
    first, second = (finish(each, settings) for each in (run, later))
    assert comparison(first, "loss")["base"] == pytest.approx(comparison(second, "loss")["base"], abs=1e-5)
    (limit,) = second.result()["limits"]
    assert f"This run continued the adapter in {adapter}, so what that adapter had learned" in limit


@pytest.mark.soak
def test_datasets_of_texts_and_conversations(fork_server: ForkServer, root: Path, finish: Callable[..., Run]) -> None:
    """Each example is prepared as in training, whatever the format of the others is, and no dataset is left out."""
    turns = [{"role": "user", "content": "Which train?"}, {"role": "assistant", "content": "The next one."}]
    examples = {"chats": {"messages": turns}, "texts": {"text": "The next train leaves at noon."}}
    sources = []
    for name, example in examples.items():
        (root / f"{name}.jsonl").write_text(f"{json.dumps(example)}\n" * 8)
        sources.append({"source": "files", "files": [str(root / f"{name}.jsonl")], "validation_split": 0.5})
    run = Run(fork_server.train(root / "evaluated-datasets", make_spec({**TRAINED, "data.sources": sources})))
    job = finish(run, ALL)
    assert comparison(job, "loss")["trained"] == pytest.approx(result(run.path)["eval_loss"], abs=2e-5)
    assert (comparison(job, "loss")["count"], comparison(job, "exact_match")["count"]) == (8, 4)
    two = evaluation.rows(finish(run, Settings(examples=2, max_new_tokens=2, general=False)))
    assert [row["prompt"] for row in two] == ["Which train?", ""]
