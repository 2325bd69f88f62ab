"""Sweeps: which runs they start, and which of them stop early."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from planted_runs import plant_run
from small import client

from backend.__main__ import main
from backend.config import RunSpec
from backend.config.options import SpecError, edit
from backend.runs import METRICS, STOP, SWEEP, sweeps, validation
from backend.runs.folder import Run, RunError
from backend.tasks import start_sweep, sweep
from webui.api import sweeps as sweeps_api
from webui.api.checking import form_values

RATE, RANK = "train.learning_rate", "lora.r"


def patches(*varied: str, **more: Any) -> list[dict[str, Any]]:
    return sweep.patches(RunSpec(), [sweep.parse(text) for text in varied], **more)


def test_a_grid_has_every_combination() -> None:
    assert patches(f"{RATE}=1e-5,1e-4", f"{RANK}=4,8") == [
        {RATE: rate, RANK: rank} for rate in (1e-5, 1e-4) for rank in (4, 8)
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{RATE}=log:1e-5..1e-3/3", [1e-5, 1e-4, 1e-3]),
        (f"{RATE}=0.1..0.3/3", [0.1, 0.2, 0.3]),
        (f"{RANK}=log:4..64/5", [4, 8, 16, 32, 64]),
        (f"{RANK}=1..3/9", [1, 2, 3]),  # equal values once
        ("train.optim=adamw_torch,lion_32bit", ["adamw_torch", "lion_32bit"]),
        ("lora.target_modules=q_proj|q_proj,v_proj", [("q_proj",), ("q_proj", "v_proj")]),
        ("lora.target_modules=[q_proj,v_proj],[q_proj], k_proj", [("q_proj", "v_proj"), ("q_proj",), ("k_proj",)]),
        ("lora.target_modules=[q_proj,v_proj]", [("q_proj", "v_proj")]),
        ('data.system_prompt="Be brief, please","Say \\"|\\"", none', ["Be brief, please", 'Say "|"', "none"]),
        ("data.system_prompt=Be [brief, Hello", ["Be [brief", "Hello"]),
        ('data.chat_template_kwargs={"a": 1, "b": 2},{"a": 3}', ['{"a": 1, "b": 2}', '{"a": 3}']),
        ("data.packing=true,false", [True, False]),
    ],
)
def test_values(text: str, expected: list[Any]) -> None:
    name = text.partition("=")[0]
    assert [patch[name] for patch in patches(text)] == expected


def test_the_weight_of_a_dataset() -> None:
    spec = edit(RunSpec(), {"data.sources": [{}, {"builtin": "trains"}]})
    varied = [sweep.parse("data.sources[1].weight=0.5..2/2")]
    assert sweep.patches(spec, varied) == [{"data.sources[1].weight": 0.5}, {"data.sources[1].weight": 2.0}]
    with pytest.raises(SpecError, match="there is one dataset"):
        sweep.patches(RunSpec(), [sweep.parse("data.sources[2].weight=1,2")])


def test_samples_are_inside_the_range_and_repeatable() -> None:
    found = patches(f"{RATE}=log:1e-6..1e-2", f"{RANK}=4..64", samples=40)
    assert found == patches(f"{RATE}=log:1e-6..1e-2", f"{RANK}=4..64", samples=40)
    assert len(found) == 40 and all(1e-6 <= p[RATE] <= 1e-2 and 4 <= p[RANK] <= 64 for p in found)
    below = sum(p[RATE] < 1e-4 for p in found)
    assert 10 < below < 30, "half of the samples are below the geometric mean"
    assert all(isinstance(p[RANK], int) for p in found)


def test_seeds_multiply_the_runs() -> None:
    found = patches(f"{RATE}=1e-5,1e-4", seeds=3)
    assert [(p[RATE], p["train.seed"]) for p in found] == [(r, s) for r in (1e-5, 1e-4) for s in (42, 43, 44)]


def test_runs_with_the_same_effect_are_one_run() -> None:
    """AdamW has no momentum, so the sweep has one run with it."""
    optimizers, momentum = sweep.parse("train.optim=adamw_torch,muon"), sweep.parse("train.momentum=0.8,0.9")
    assert [patch["train.optim"] for patch in start_sweep.plan(RunSpec(), [optimizers, momentum]).patches] == [
        "adamw_torch", "muon", "muon",
    ]  # fmt: skip
    with pytest.raises(SpecError, match=r"train\.momentum: has no effect with the other options"):
        start_sweep.plan(RunSpec(), [momentum])
    rates, momenta = sweep.parse(f"{RATE}=log:1e-5..1e-3"), sweep.parse("train.momentum=0.8..0.99")
    with pytest.raises(SpecError, match=r"train\.momentum: has no effect"):  # although no two runs are the same
        start_sweep.plan(RunSpec(), [rates, momenta], samples=4)
    assert len(start_sweep.plan(edit(RunSpec(), {"train.optim": "muon"}), [rates, momenta], samples=4).patches) == 4


def test_seeds_with_other_validation_examples_are_not_compared() -> None:
    split = {"data.source": "files", "data.files": ["a"], "data.validation": "split", "eval.strategy": "steps"}
    rates = [sweep.parse(f"{RATE}=1e-5,1e-4")]
    for changes, seeds, halving in ((split, 1, 3), (split, 2, 0), ({"eval.strategy": "steps"}, 2, 3)):
        planned = start_sweep.plan(edit(RunSpec(), changes), rates, seeds=seeds, halving=halving)
        assert planned.compares_other_examples == (halving == 0)
    with pytest.raises(SpecError, match=r"data\.validation: must be files"):
        start_sweep.plan(edit(RunSpec(), split), rates, seeds=2, halving=3)
    with pytest.raises(SpecError, match=r"train\.seed: is varied already"):
        start_sweep.plan(RunSpec(), [sweep.parse("train.seed=1,2")], seeds=2)


def test_losses_that_the_options_decide_are_not_compared() -> None:
    """Another beta scales the loss of DPO; another maximum length averages over other tokens."""
    spec = edit(RunSpec(), {"eval.strategy": "steps", "train.stage": "dpo", "data.builtin": "train-pairs"})
    rates, betas = sweep.parse(f"{RATE}=1e-5,1e-4"), sweep.parse("preference.beta=0.1,0.5")
    assert start_sweep.plan(spec, [rates]).note == ""
    assert "preference.beta decides what the validation loss is" in start_sweep.plan(spec, [rates, betas]).note
    assert start_sweep.plan(spec, [rates, sweep.parse("preference.beta=0.5")]).note == ""
    with pytest.raises(SpecError, match=r"launch\.trainer: must be footplate"):
        start_sweep.plan(edit(spec, {"launch.trainer": "llamafactory"}), [rates], halving=3)
    with pytest.raises(SpecError, match=r"preference\.beta: decides what the validation loss is"):
        start_sweep.plan(spec, [betas], halving=3)


def test_other_batch_sizes_are_compared_at_the_same_step_only() -> None:
    spec, batches = edit(RunSpec(), {"eval.strategy": "steps"}), "train.per_device_train_batch_size=2,4"
    for varied, halving, is_said in (([batches], 2, True), ([batches], 0, False), ([f"{RATE}=1e-5,1e-4"], 2, False)):
        note = start_sweep.plan(spec, [sweep.parse(each) for each in varied], halving=halving).note
        assert ("has trained on more examples" in note) == is_said
    same = {"train.per_device_train_batch_size": 2, "train.gradient_accumulation_steps": 2}
    assert start_sweep.SweepPlan(edit(spec, same), ({}, dict.fromkeys(same, 2)), halving=2).note == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (RATE, "expected section.key=values"),
        ("train.lr=1e-4", "did you mean train.learning_rate"),
        (f"{RATE}=1e-5..1e-3", "add the number of grid points to the range, such as 1e-05..0.001/3"),
        (f"{RATE}=1e-3..1e-5/3", "must start with the smaller number"),
        (f"{RATE}=log:0..1/3", "must start with the smaller number, above 0"),
        (f"{RATE}=a..b/3", "is not a range of numbers"),
        ("train.optim=1..2/2", "only numeric options can have a range"),
        (f"{RANK}=0,8", "must be at least"),
        (f"{RANK}=1..99/60", "has 60 runs, more than the limit of 50"),
        (f"{RATE}=1e-6..1/99999999999", "at most 1000 grid points"),
    ],
)
def test_mistakes_are_named(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        patches(text)


def test_labels_are_short() -> None:
    assert sweeps.label({RATE: 1e-4, "lora.target_modules": ("q_proj", "v_proj")}) == (
        "learning_rate=1e-4 target_modules=q_proj+v_proj"
    )


# -- successive halving ------------------------------------------------------------------------------------------------

MakeMember = Callable[..., Run]


@pytest.fixture
def make(tmp_path: Path) -> MakeMember:
    """Makes runs of a sweep with validation losses at steps."""

    def made(losses: dict[int, float | None], sweep_id: str = "s", factor: int = 3) -> Run:
        part = sweeps.Member(sweep_id, {RANK: 8}, 10, factor)
        points = [{"step": step, "eval_loss": loss} for step, loss in losses.items()]
        return plant_run(tmp_path, "member", {SWEEP: part.to_json(), METRICS: points})

    return made


def test_rungs() -> None:
    assert [step for step in range(200) if sweeps.Member("s", {}, 10, 3).is_rung(step)] == [10, 30, 90]
    assert not any(sweeps.Member("s", {}).is_rung(step) for step in range(200))


def test_runs_behind_the_others_stop(make: MakeMember) -> None:
    losses = [2.0, 3.0, 1.0, 4.0, 5.0, 1.5]
    runs = [make({10: loss}) for loss in losses]
    stopped = [bool(sweeps.stop_if_behind(run.path, 10)) for run in runs]
    assert stopped == [True, True, False, True, True, False], "the best third goes on"
    reason = sweeps.stop_if_behind(runs[0].path, 10)
    assert reason == "Its validation loss at step 10 ranks number 3 among 6 runs; only the best 2 continue."
    assert (runs[0].path / STOP).read_text() == f"save\n{reason}\n"
    assert not (runs[2].path / STOP).exists()


def test_runs_are_compared_at_the_same_step_only(make: MakeMember) -> None:
    slow = make({10: 3.0, 20: 9.0})
    for _ in range(2):
        make({10: 2.0, 30: 0.1})
    assert not sweeps.stop_if_behind(slow.path, 20), "not a rung"
    assert not sweeps.stop_if_behind(slow.path, 30), "fewer than three runs have got there"
    assert sweeps.stop_if_behind(slow.path, 10)


def test_other_sweeps_and_single_runs_do_not_count(make: MakeMember, tmp_path: Path) -> None:
    run = make({10: 3.0})
    for _ in range(5):
        make({10: 1.0}, sweep_id="other")
    assert not sweeps.stop_if_behind(run.path, 10)
    assert not sweeps.stop_if_behind(plant_run(tmp_path, "single").path, 10)


def test_a_loss_that_is_not_finite_stops_the_run(make: MakeMember) -> None:
    run = make({10: None})
    for _ in range(3):
        make({10: 1.0})
    assert sweeps.stop_if_behind(run.path, 10)
    assert math.isnan(validation.losses(run.path).get(10, math.nan))


# -- command line ------------------------------------------------------------------------------------------------------


def test_nothing_starts_if_one_run_cannot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sweep", "first-run", "--runs", str(tmp_path), "--vary", "train.stage=sft,kto"]
    assert main(words) == 1
    assert "Nothing was started. The checks report errors for stage=kto:" in capsys.readouterr().out
    assert main([*words, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["error"].startswith("stage=kto: Cannot run") and found["findings"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("method", "left"), [("create", 0), ("start", 2)])
def test_an_error_within_a_sweep_says_what_was_started(
    method: str, left: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a full disk: the third run cannot be created, or started."""
    calls: list[str] = []
    original = Run.create

    def fails(*given: Any, **more: Any) -> Any:
        calls.append(method)
        if len(calls) == 3:
            raise RunError("No room. Nothing was started." if method == "create" else "No room.")
        return original(*given, **more) if method == "create" else None

    started: list[str] = []
    monkeypatch.setattr(Run, "start", lambda run, **_: started.append(run.id))
    monkeypatch.setattr(Run, method, fails)
    assert main(["sweep", "first-run", "--runs", str(tmp_path), "--vary", f"{RANK}=4,8,16"]) == 2
    error, runs_left = capsys.readouterr().err, [path for path in tmp_path.iterdir() if path.name[0] != "."]
    assert not started and len(runs_left) == left
    assert ("2 runs of the sweep" in error) == ("Nothing was started" not in error) == (method == "start")


@pytest.mark.parametrize("option", ["--random", "--seeds", "--limit"])
def test_numbers_of_runs_are_positive(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["sweep", "first-run", "--runs", str(tmp_path), "--vary", f"{RANK}=4,8", option, "-1"])
    assert raised.value.code == 2 and "'-1' is not a whole number from 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--halving", "1"], "successive halving needs a factor of at least 2"),
        (["--halving", "3", "--set", "eval.strategy=epoch"], "eval.strategy: must be steps for early stopping"),
    ],
)
def test_halving_needs_evaluations(
    more: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", "first-run", "--runs", str(tmp_path), "--vary", f"{RANK}=4,8", *more]) == 2
    assert message in capsys.readouterr().err


def test_the_table_has_the_best_run_first(make: MakeMember, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [make({10: loss, 20: loss / 2}) for loss in (4.0, 2.0)] + [make({})]
    assert main(["list", "--runs", str(tmp_path), "--sweep", "s", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(row["id"], row["eval_loss"]) for row in found] == [
        (runs[1].id, 1.0),
        (runs[0].id, 2.0),
        (runs[2].id, None),
    ]
    assert main(["list", "--runs", str(tmp_path), "--sweep", "s"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("r=8")
    assert main(["list", "--runs", str(tmp_path), "--sweep", "nothing"]) == 2


def test_the_page_gets_labels_too(make: MakeMember, tmp_path: Path) -> None:
    run = make({10: 4.0})
    found = sweeps_api.show(SimpleNamespace(runs=tmp_path), "s")  # type: ignore[arg-type]
    assert found["labels"] == {RANK: "LoRA rank (r)"}
    assert [row["id"] for row in found["runs"]] == [run.id]
    with pytest.raises(RunError, match="There is no sweep named 'nothing'"):
        sweeps_api.show(SimpleNamespace(runs=tmp_path), "nothing")  # type: ignore[arg-type]


# -- page --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs that would have been started."""
    found: list[str] = []
    monkeypatch.setattr(Run, "start", lambda run, **options: found.append(run.id))
    return found


def sweep_request(**more: Any) -> dict[str, Any]:
    values = form_values(edit(RunSpec(), {"model.builtin": "tiny-llama"}))
    return {"values": values, "vary": [{"name": RATE, "values": "1e-5, 1e-4"}], **more}


def test_the_page_shows_what_would_run_and_starts_it_once(tmp_path: Path, started: list[str]) -> None:
    api = client(tmp_path)
    body = sweep_request(seeds=2, key="a-key-of-this-click")
    rows = api.post("/api/sweeps/check", json=body).json()["runs"]
    assert [row["label"] for row in rows][:2] == ["learning_rate=1e-5 seed=42", "learning_rate=1e-5 seed=43"]
    assert len(rows) == 4 and not any(row["errors"] for row in rows) and not started
    first, again = (api.post("/api/sweeps", json=body) for _ in range(2))
    assert first.status_code == again.status_code == 201 and len(started) == 4
    assert sorted(first.json()["runs"]) == sorted(started)
    assert again.json()["sweep"] == first.json()["sweep"]
    assert len(api.get(f"/api/sweeps/{first.json()['sweep']}").json()["runs"]) == 4


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"vary": []}, "Choose an option to vary."),
        ({"vary": [{"name": RATE, "values": " "}]}, "Enter the values of Learning rate."),
        ({"vary": [{"name": "train.lr", "values": "1"}]}, "did you mean train.learning_rate"),
        ({"vary": [{"name": RATE, "values": "1e-5..1e-3"}]}, "add the number of grid points"),
        ({"vary": [{"name": RANK, "values": "1..60/60"}]}, "has 60 runs, more than the limit of 50"),
        ({"vary": [{"name": RANK, "values": ",".join(map(str, range(1, 400)))}] * 8}, "more than the limit of 50"),
        ({"halving": 3}, "must be steps for early stopping (successive halving)"),
        ({"seeds": 51}, "seeds must be at most 50"),
        ({"key": "x"}, "must be 8 to 64 letters"),
    ],
)
def test_the_page_names_mistakes(more: dict[str, Any], message: str, tmp_path: Path, started: list[str]) -> None:
    api = client(tmp_path)
    for path in ("/api/sweeps/check", "/api/sweeps"):
        response = api.post(path, json=sweep_request(**more))
        assert response.status_code in (400, 422) and message in response.json()["error"]
    assert not started


def test_all_runs_together_wait_no_longer_than_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[str]
) -> None:
    waits, real = [], sweeps_api.run_preflight

    def slow(state: Any, spec: Any, wait_seconds: float = 0) -> Any:
        waits.append(wait_seconds)
        time.sleep(0.05)
        return real(state, spec)

    monkeypatch.setattr(sweeps_api, "run_preflight", slow)
    monkeypatch.setattr(sweeps_api, "INSPECTION_SECONDS", 0.12)
    body = sweep_request(vary=[{"name": RATE, "values": "1e-5,1e-4,1e-3,1e-2"}], key="")
    client(tmp_path).post("/api/sweeps", json=body)
    assert len(started) == 4 and waits[0] <= 0.12 and waits[1] < 0.08 and waits[3] == 0


def test_the_page_starts_nothing_if_one_run_cannot(tmp_path: Path, started: list[str]) -> None:
    body = sweep_request(vary=[{"name": "train.stage", "values": "sft,kto"}])
    rows = client(tmp_path).post("/api/sweeps/check", json=body).json()["runs"]
    assert not rows[0]["errors"] and rows[1]["errors"]
    response = client(tmp_path).post("/api/sweeps", json=body)
    assert response.status_code == 422 and response.json()["error"].startswith("Nothing was started. stage=kto: ")
    assert not started and not list(tmp_path.glob("2*"))
