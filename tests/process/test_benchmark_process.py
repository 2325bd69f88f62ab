"""Benchmarks: lm-eval's values are those of plain transformers, for adapter, merged model and base model.

`make test` replaces lm-eval by a stand-in; the tests with lm-eval itself belong to `make soak`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fork_server import ForkServer
from peft import PeftModel
from test_chat_process import wait_for
from training_runs import log_text, make_spec
from transformers import AutoModelForCausalLM, AutoTokenizer

from backend import environments
from backend.export import merge as merging
from backend.inference import benchmark as process
from backend.models import benchmark
from backend.models.benchmark import SAMPLES, Settings
from backend.runs import LOCK, MODEL, RESULT, STOP, processes
from backend.runs.folder import ALIVE, Run
from backend.train.run_log import RunLog, Stopped, TrainError

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of peft
TRAINED = {"train.learning_rate": 2e-2, "train.max_steps": 4, "save.final_model": True}
COLORS = ("blue", "green", "red")
THINGS = {"sky": 0, "grass": 1, "blood": 2, "leaf": 1, "ruby": 2, "ocean": 0, "tomato": 2, "emerald": 1, "sapphire": 0}
CHOICE = """
task: colors
dataset_path: json
dataset_kwargs: {data_files: {test: colors.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "The color of {{thing}} is"
doc_to_choice: [blue, green, red]
doc_to_target: color
"""
GENERATE = r"""
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: colors.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "The color of {{thing}} is"
doc_to_target: "{{thing}}"
generation_kwargs: {until: ["\n"], max_gen_toks: 6}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture(scope="module")
def run(fork_server: ForkServer, root: Path) -> Run:
    """A run that has trained an adapter on conversations."""
    return Run(fork_server.train(root / "benchmarked", make_spec(TRAINED)))


@pytest.fixture(scope="module")
def tasks(root: Path) -> Path:
    """A folder with a task of each kind, and their data."""
    folder = root / "tasks"
    folder.mkdir()
    (folder / "choice.yaml").write_text(CHOICE)
    (folder / "generate.yaml").write_text(GENERATE)
    lines = (json.dumps({"thing": thing, "color": COLORS[color]}) + "\n" for thing, color in THINGS.items())
    (folder / "colors.jsonl").write_text("".join(lines))
    return folder


class StandIn:
    """In place of lm_eval_harness: a task whose metric is the share of right next tokens of a text."""

    torch = torch
    lm_eval = SimpleNamespace(utils=SimpleNamespace(handle_non_serializable=str))
    Messages = staticmethod(lambda show: SimpleNamespace(truncated=False))

    def __init__(self) -> None:
        self.template: list[bool] = []

    def load(self, tasks: Sequence[str], shots: int | None, allow_code: bool) -> Any:
        if tasks == ("offline",):
            raise TrainError("cannot be downloaded")
        return tasks

    def count_requests(self, tasks: Any, limit: int) -> int:
        return 1

    def LoadedModel(self, model: Any, tokenizer: Any, ends: Any, report: Any, **_: Any) -> Any:
        return SimpleNamespace(model=model, tokenizer=tokenizer, report=report)

    def evaluate(self, lm: Any, tasks: Any, limit: int, template: bool, allow_code: bool) -> Mapping[str, Any]:
        self.template.append(template)
        value = next_tokens(lm.model, lm.tokenizer)
        lm.report()
        sample = {"doc_id": 0, "filter": "none", "acc": value}
        return {
            "results": {"t": {"acc,none": value}}, "samples": {"t": [sample]}, "n-shot": {"t": 0},
            "n-samples": {"t": {"original": 1, "effective": 1}}, "higher_is_better": {"t": {"acc": True}},
        }  # fmt: skip


@torch.no_grad()
def next_tokens(model: Any, tokenizer: Any) -> float:
    """A number from 0 to 1 that depends on all weights."""
    ids = tokenizer("The next train leaves at noon.", return_tensors="pt")["input_ids"]
    return float(model(ids).logits[0].softmax(-1).max(-1).values.mean())


@pytest.fixture
def in_process(run: Run, monkeypatch: pytest.MonkeyPatch) -> Callable[..., process.Benchmark]:
    """Makes benchmarks with the stand-in, without a process of their own."""
    stand_in = StandIn()
    monkeypatch.setattr(process, "harness", lambda environment: stand_in)

    def make(*tasks: str, **settings: Any) -> process.Benchmark:
        folder = run.path / "jobs" / f"{len(stand_in.template)}-{'-'.join(tasks)}"
        folder.mkdir(parents=True, exist_ok=True)
        values = {**Settings(tasks).__dict__, **settings, "environment": str(folder)}
        (folder / "benchmark.json").write_text(json.dumps(values))
        (folder / "plan.json").write_text("{}")
        (folder / LOCK).touch()
        return process.Benchmark(folder)

    return make


def references(run: Run, tiny: Path, root: Path) -> dict[str, Any]:
    """Base model, base model with the adapter, and the merged model, loaded with transformers and peft alone."""
    (target := root / "merged").mkdir(exist_ok=True)
    if not (target / MODEL).exists():
        merging.Merge(run, None, target, RunLog(target)).run_all()
    base = AutoModelForCausalLM.from_pretrained(tiny).eval()
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny), str(run.path / MODEL)).eval()
    return {"base": base, "adapter": adapted, "merged": AutoModelForCausalLM.from_pretrained(target / MODEL).eval()}


def test_both_models_are_those_of_the_run(
    run: Run, tiny: Path, root: Path, in_process: Callable[..., process.Benchmark]
) -> None:
    made = in_process("arc_easy")
    made.run_all()
    result = json.loads((made.folder / RESULT).read_text())
    (row,) = result["rows"]
    tokenizer = AutoTokenizer.from_pretrained(run.path / MODEL)
    own = {name: next_tokens(model, tokenizer) for name, model in references(run, tiny, root).items()}
    assert row["base"] == pytest.approx(own["base"], abs=1e-7)
    assert row["trained"] == pytest.approx(own["adapter"], abs=1e-7) and abs(row["trained"] - row["base"]) > 1e-5
    assert row["verdict"] == "few" and result["chat_template"], "trained on conversations"
    lines = [json.loads(line) for line in (made.folder / SAMPLES).read_text().splitlines()]
    assert [line["model"] for line in lines] == ["trained model", "base model"]


def test_errors_and_stops(in_process: Callable[..., process.Benchmark]) -> None:
    offline = in_process("offline")
    with pytest.raises(TrainError, match="cannot be downloaded"):
        offline.run_all()
    assert offline.models.tuned is None, "before the models are loaded"
    stopped = in_process("arc_easy", base=False, chat_template=False)
    loaded = stopped.models.load(None, "trained")
    (stopped.folder / STOP).write_text("discard")
    with pytest.raises(Stopped):
        stopped._phase("measuring", "")
    (stopped.folder / STOP).unlink()
    stand_in = process.harness(stopped.folder)
    stop = lambda: (stopped.folder / STOP).write_text("discard")  # noqa: E731
    stand_in.LoadedModel = lambda model, tokenizer, ends, report, **_: (
        stop(), SimpleNamespace(model=model, tokenizer=tokenizer, report=report)
    )[1]  # fmt: skip
    with pytest.raises(Stopped):  # within a forward pass
        stopped._measure(stand_in, "trained", loaded, (), [], False)


def test_lm_eval_is_that_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if Footplate's own environment has another one."""
    for name in ("own", "created"):
        (tmp_path / name / "stand_in").mkdir(parents=True)
        (tmp_path / name / "stand_in/__init__.py").write_text("from .part import name")
        (tmp_path / name / "stand_in/part.py").write_text(f"name = {name!r}")
    monkeypatch.syspath_prepend(tmp_path / "own")
    process._import_from("stand_in", str(tmp_path / "created"))
    for module in ("stand_in", "stand_in.part"):
        assert sys.modules.pop(module).name == "created"
    with pytest.raises(TrainError, match=r"does not contain stand_in\. Run `footplate env create lm-eval` again"):
        process._import_from("stand_in", str(tmp_path))


# -- lm-eval itself ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def environment(cache: Path) -> Path:
    return environments.create("lm-eval", lambda _: None)


@pytest.fixture
def finish(fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Run]]:
    """Starts a benchmark and waits for its end; asserts that no process is left."""
    monkeypatch.setattr(sys, "executable", str(fork_server.python))
    started: list[Run] = []

    def finish_one(run: Run, settings: Settings, state: str = "done") -> Run:
        started.append(job := benchmark.start(run, settings))
        wait_for(lambda: job.state not in ALIVE, 300)
        assert job.state == state, log_text(job.path)
        return job

    yield finish_one
    for job in started:
        assert not processes.run_processes(job.path)


@torch.no_grad()
def choices(model: Any, tokenizer: Any, prompt: str) -> list[float]:
    """The log-probability of each color after a prompt, in nats."""
    found, context = [], tokenizer(prompt)["input_ids"]
    for color in COLORS:
        ids = tokenizer(f"{prompt} {color}")["input_ids"]
        scores = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        found.append(sum(float(scores[n - 1, ids[n]]) for n in range(len(context), len(ids))))
    return found


def generated(model: Any, tokenizer: Any, prompt: str) -> str:
    ids = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**ids, max_new_tokens=6, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    return str(tokenizer.decode(output[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)).split("\n")[0]


@pytest.mark.soak
def test_values_are_those_of_transformers(
    run: Run, tiny: Path, root: Path, tasks: Path, environment: Path, finish: Callable[..., Run]
) -> None:
    files = tuple(str(tasks / name) for name in ("choice.yaml", "generate.yaml"))
    job = finish(run, Settings(files, limit=0, chat_template=False))
    lines = [json.loads(line) for line in (job.path / SAMPLES).read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(run.path / MODEL)
    for name, model in references(run, tiny, root).items():
        side = "base model" if name == "base" else "trained model"
        right = []
        for line in (line for line in lines if line["model"] == side):
            prompt = f"The color of {line['doc']['thing']} is"
            if line["task"] == "colors":
                own = choices(model, tokenizer, prompt)
                found = [answer[0][0] for answer in line["resps"]]
                assert found == pytest.approx(own, abs=2e-3 if name == "merged" else 1e-4)
                right.append(own.index(max(own)) == THINGS[line["doc"]["thing"]])
                assert line["acc"] == right[-1]
            else:
                assert line["resps"][0][0] == generated(model, tokenizer, prompt)
        acc = next(row for row in job.result()["rows"] if row["name"] == "colors,acc,none")
        assert acc["base" if name == "base" else "trained"] == pytest.approx(sum(right) / len(right))
    assert {row["task"] for row in job.result()["rows"]} == {"colors", "sums"} and len(lines) == 4 * len(THINGS)


@pytest.mark.soak
def test_what_lm_eval_refuses(run: Run, tasks: Path, environment: Path, finish: Callable[..., Run]) -> None:
    job = finish(run, Settings(("arc_esy",)), "failed")
    assert "Did you mean arc_easy" in (job.failure() or {})["sentence"]
    escape = tasks / "escape.yaml"
    escape.write_text(CHOICE.replace("{{thing}}", "{{ ''.__class__.__mro__ }}"))
    job = finish(run, Settings((str(escape),)), "failed")
    assert "is unsafe (SecurityError)" in (job.failure() or {})["sentence"], "templates are rendered in a sandbox"
    metric = tasks / "metric.yaml"
    metric.write_text(CHOICE + f"metric_list: [{{metric: {tasks}/mine.py, aggregation: mean, higher_is_better: true}}]")
    job = finish(run, Settings((str(metric),)), "failed")
    assert "lm-eval has no metric" in (job.failure() or {})["sentence"], "the package evaluate would run that file"
    few = finish(run, Settings((str(tasks / "choice.yaml"),), limit=2, shots=3, base=False))
    assert few.result()["chat_template"] and few.result()["rows"][0]["shots"] == 3
    assert "used only the first 2 of its 9 samples" in few.result()["limits"][0]
