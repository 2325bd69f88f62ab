"""The comparison of runs: options that differ, curves as CSV and over other axes, and the API."""

import csv
import io
import json
from datetime import datetime

import pytest
from matplotlib.axes import Axes
from small import client

from backend.config.options import edit, options, parse
from backend.runs import LOCK, METRICS, PROGRESS, RESOLVED, RESULT, SPEC, Plan
from backend.runs.folder import Run
from backend.runs.metrics import read_points
from webui.api.compare_runs import (
    DECIDE_EVAL_LOSS,
    DECIDE_SPLIT,
    MOST,
    csv_text,
    distinct_names,
    option_differences,
    resolved_differences,
    shared_samples,
)
from webui.curves import Curves
from webui.images import compare_runs_image, run_image

LORA = parse({"model.builtin": "tiny-llama", "method.kind": "lora"})


def points(path, *values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    reader = Curves(path)
    reader.read()
    return reader


def point(step, time, tokens, **more):
    return {"step": step, "time": time, "epoch": step / 4, "tokens": tokens, "tokens_per_second": 10.0, **more}


# -- options -----------------------------------------------------------------------------------------------------


def test_only_options_that_differ():
    specs = {"a": edit(LORA, {"lora.r": 4, "logging.run_name": "a"}), "b": edit(LORA, {"lora.r": 64})}
    (row,) = option_differences(specs)
    assert row["key"] == "lora.r" and "rank" in row["label"].lower() and row["values"] == {"a": 4, "b": 64}
    assert option_differences({"a": LORA}) == option_differences({}) == []


def test_an_option_without_effect_has_no_value():
    specs = {"a": edit(LORA, {"lora.r": 4}), "b": edit(LORA, {"lora.r": 4, "method.kind": "full"})}
    rows = {row["key"]: row["values"] for row in option_differences(specs)}
    assert rows["lora.r"] == {"a": 4, "b": None}
    assert rows["method.kind"]["a"] != rows["method.kind"]["b"]
    assert "lora.alpha" not in rows  # hidden in b, at its default in a


def test_options_that_decide_the_validation_loss():
    def decisive(changes, **data):
        spec = edit(LORA, {f"data.{name}": value for name, value in data.items()})
        rows = option_differences({"a": spec, "b": edit(spec, changes)})
        return [row["key"] for row in rows if row["decides_eval_loss"]]

    assert {option.name for option in options()} >= DECIDE_EVAL_LOSS | DECIDE_SPLIT
    assert decisive({"data.max_length": 64, "model.builtin": "smollm2-135m-instruct"}) == [
        "model.builtin", "data.max_length",
    ]  # fmt: skip
    assert decisive({"data.add_tokens": ("<tool>",)}) == ["data.add_tokens"]  # texts with it have fewer tokens
    assert not decisive({"data.dataset_num_proc": 2, "data.max_samples": 9, "model.attn_implementation": "sdpa"})
    assert not decisive({"train.seed": 7})  # the validation set of built-in data is not split off
    own = {"source": "files", "files": ("a.jsonl",)}
    assert decisive({"train.seed": 7}, **own) == ["train.seed"]
    assert not decisive({"train.seed": 7}, **own, validation="files", validation_files=("b.jsonl",))


def test_secrets_are_masked():
    specs = {"a": LORA, "b": edit(LORA, {"launch.env": {"HF_TOKEN": "hf_abcdefghijklmnopqrstuvwxyz0123456"}})}
    (row,) = option_differences(specs)
    assert row["key"] == "launch.env" and "HF_TOKEN" in row["values"]["b"] and "hf_abc" not in json.dumps(row)


def test_resolved_values_that_were_not_recorded_do_not_differ():
    rows = resolved_differences(
        {"a": {"world_size": 1, "global_batch_size": 4}, "b": {"global_batch_size": 8}, "c": {}}
    )
    assert [(row["key"], row["values"]) for row in rows] == [("global_batch_size", {"a": 4, "b": 8, "c": None})]


def test_generations_for_the_same_prompt():
    def sample(prompt, after):
        return {"prompt": prompt, "reference": "r", "before": "", "after": after}

    runs = {"a": [sample("p", "1"), sample("q", "2")], "b": [sample("p", "3"), sample("q", None)], "c": []}
    assert shared_samples(runs) == [{"prompt": "p", "reference": "r", "outputs": {"a": "1", "b": "3"}}]


# -- curves ------------------------------------------------------------------------------------------------------


def test_axes_of_a_resumed_run(tmp_path):
    """Tokens and seconds continue from the step that the second start resumes from."""
    reader = points(
        tmp_path / "m", point(1, 100, 50, loss=5), point(2, 104, 90, loss=4), {"step": 2, "time": 106, "eval_loss": 3},
        point(3, 110, 130, loss=9), {"event": "resumed", "step": 2, "time": 900}, point(3, 902, 40, loss=2),
        point(4, 903, 80, loss=1),
    )  # fmt: skip
    assert reader.series(axis="tokens")["series"]["loss"] == {"x": [50, 90, 130, 170], "y": [5, 4, 2, 1]}
    assert reader.series(axis="seconds")["series"]["loss"]["x"] == [5, 9, 11, 12]  # the first one: 50 tokens at 10/s
    assert reader.series(axis="epoch")["series"]["eval_loss"] == {"x": [0.5], "y": [3]}
    assert reader.series(axis="tokens", low=80, high=140)["series"]["loss"]["x"] == [50, 90, 130, 170]
    assert reader.series(axis="tokens", low=100, high=120)["series"]["loss"]["x"] == [50, 90, 130, 170]
    assert [p["step"] for p in read_points(reader.path)] == [1, 2, 2, 3, 4]


def test_values_between_two_points_are_interpolated(tmp_path):
    reader = points(tmp_path / "m", point(2, 0, 20, loss=1), {"step": 3, "eval_loss": 1}, point(4, 9, 60, loss=1))
    assert reader.series(axis="tokens")["series"]["eval_loss"]["x"] == [40]


def test_an_axis_that_was_not_logged(tmp_path):
    reader = points(tmp_path / "m", {"step": 1, "loss": 1, "tokens": 0}, {"step": 2, "loss": 1, "tokens": 0})
    assert reader.series(axis="tokens")["series"] == reader.series(axis="seconds")["series"] == {}
    assert reader.series()["series"]["loss"]["x"] == [1, 2]


def test_csv_of_two_runs(tmp_path):
    one = points(tmp_path / "1", point(1, 0, 50, loss=5.5), point(2, 4, 90, loss=None))
    two = points(tmp_path / "2", {"step": 7, "eval_loss": 0.5, "note": "x"})
    text = "".join(csv_text([("one", one), ("two", two)]))
    rows = list(csv.DictReader(io.StringIO(text)))
    assert list(rows[0]) == ["run", "step", "epoch", "tokens", "seconds", "tokens_per_second", "loss", "eval_loss"]
    assert [(r["run"], r["step"], r["loss"], r["tokens"], r["eval_loss"]) for r in rows] == [
        ("one", "1", "5.5", "50.0", ""), ("one", "2", "", "90.0", ""), ("two", "7", "", "", "0.5"),
    ]  # fmt: skip


@pytest.mark.parametrize("count", [0, 1, MOST])
def test_image(count):
    curve = {"x": [float(x) for x in range(30)], "y": [1.0] * 30}
    runs = [(f"$run$ {n}", {"loss": curve, "eval_loss": curve, "learning_rate": curve}) for n in range(count)]
    assert compare_runs_image.draw(runs, "seconds").startswith(b"\x89PNG")
    assert len(set(run_image.MANY_COLORS)) == MOST


@pytest.mark.parametrize(("axis", "what"), [("step", ""), ("epoch", " with an epoch"), ("seconds", " with a time")])
def test_an_image_without_values(monkeypatch, axis, what):
    written = []
    monkeypatch.setattr(Axes, "text", lambda *given, **_: written.append(given[3]))
    compare_runs_image.draw([("a", {})], axis)
    assert written == [f"No metrics{what} were logged"]


def test_runs_with_the_same_name_are_told_apart():
    a, b, c, d = "2026-11-26_192608_a", "2026-11-26_192609_a", "2026-11-26_192609_a-2", "old"
    assert distinct_names([(a, "a"), (b, "b")]) == {a: "a", b: "b"}
    assert distinct_names([(a, "a"), (b, "a")]) == {a: "a (2026-11-26 19:26:08)", b: "a (2026-11-26 19:26:09)"}
    found = distinct_names([(a, "a"), (b, "a"), (c, "a"), (d, "a")])
    assert found == {a: "a (2026-11-26 19:26:08)", b: f"a ({b})", c: f"a ({c})", d: "a (old)"}


# -- the API -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    root = tmp_path_factory.mktemp("compare") / "runs"
    for number, spec in enumerate(("lora:\n  r: 4\n", "lora:\n  r: 8\n", "no: [")):
        run = Run.create(root, f"run {number}", Plan(("true",), files={SPEC: spec}), datetime(2026, 11, 23))
        points(run.path / METRICS, point(1, 0, 50, loss=5.0), {"step": 1, "eval_loss": 3.0 - number})
        (run.path / RESOLVED).write_text('{"total_steps": null}')  # as with packing, before the data is prepared
        (run.path / PROGRESS).write_text(f'{{"step": 1, "max_steps": {number + 4}}}')
    (run.path / LOCK).touch()
    (run.path / RESULT).write_text('{"peak_bytes": 1, "samples": {"a": 1}}')
    with client(root) as found:
        yield found


IDS = ("2026-11-23_000000_run-0", "2026-11-23_000000_run-1", "2026-11-23_000000_run-2")


def compare(api, *ids):
    return api.get("/api/comparison", params={"ids": ",".join(ids)})


def test_two_runs(api):
    found = compare(api, *IDS[:2]).json()
    assert [(run["id"], run["best_eval_loss"], run["best_eval_step"]) for run in found["runs"]] == [
        (IDS[0], 3.0, 1.0), (IDS[1], 2.0, 1.0),
    ]  # fmt: skip
    assert [run["seconds"] for run in found["runs"]] == [None, None], "only a run that is done knows its training time"
    assert [row["key"] for row in found["options"]] == ["lora.r", "total_steps"] and found["problems"] == []
    assert found["options"][1]["values"] == {IDS[0]: 4, IDS[1]: 5}
    assert api.get(f"/api/runs/{IDS[0]}/series?x=tokens").json()["series"]["loss"] == {"x": [50.0], "y": [5.0]}
    assert "run" in api.get("/api/comparison/curves.csv", params={"ids": ",".join(IDS)}).text.splitlines()[0]


def test_damaged_and_deleted_runs_are_named_and_the_others_compared(api):
    found = compare(api, *IDS, "2026-01-01_000000_gone", "../runs", "x" * 5000).json()
    assert [run["id"] for run in found["runs"]] == list(IDS[:2]), found["problems"]
    assert found["options"][0]["values"] == {IDS[0]: 4, IDS[1]: 8}
    named = [problem["id"] for problem in found["problems"]]
    assert sorted(named) == sorted([IDS[2], "2026-01-01_000000_gone", "../runs", "x" * 200])


@pytest.mark.parametrize("path", ["/api/comparison", "/api/comparison/curves.csv", "/api/comparison/curves.png"])
def test_limits(api, path):
    for ids in ("", IDS[0], f"{IDS[0]},{IDS[0]}", ",".join(f"run-{n}" for n in range(MOST + 1))):
        response = api.get(path, params={"ids": ids})
        assert response.status_code == 422 and "2 to 20 runs" in response.json()["error"]
    assert api.get(f"/api/runs/{IDS[0]}/series?x=time").status_code == 422
    assert api.get("/api/comparison/curves.png", params={"ids": ",".join(IDS), "x": "?"}).status_code == 422
