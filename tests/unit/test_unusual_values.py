"""Values that JSON allows, and that break writers, fonts and arithmetic: lone surrogates, huge steps and losses."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from small import client
from test_damaged_runs import make

from backend.__main__ import main
from backend.machine import Machine
from backend.runs import ANNOTATIONS, ERROR, ESTIMATE, EVENTS, LOG, METRICS, PLAN, PROGRESS, RESULT, json_values
from backend.runs.folder import Run, runs

HALF = "a\ud800b"
ENDPOINTS = ("", "/log", "/metrics", "/series", "/values", "/metrics.csv", "/log.txt", "/spec.yaml", "/bundle.zip")
IMAGES = ("/report.png", "/charts/loss.png?smoothing=0.9&log=true")
# The images show only the name, the metrics and the events of a run.
IN_NO_IMAGE = {f"half a character in the {name}" for name in ("plan", "result", "estimate", "error", "note", "log")}
IN_NO_IMAGE |= {"half a character in progress", "half a character in the model"}
# In `make test`, the chart of the loss has each kind of value once.
IN_ONE_IMAGE = {"half a character in the name", "half a character in metrics", "an event at a huge step", "a huge loss"}
IN_ONE_IMAGE |= {"a checkpoint of a huge step", "progress of a huge step", "a huge step"}


def changed(name: str, /, **values: object) -> Callable[[Path], object]:
    """The JSON object of a file with these values."""

    def change(folder: Path) -> None:
        kept = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps({**kept, **values}))

    return change


def lines(name: str, *values: object) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text("".join(json.dumps(value) + "\n" for value in values))


def checkpoint(step: int) -> Callable[[Path], object]:
    def make_checkpoint(folder: Path) -> None:
        place = folder / "checkpoints" / f"checkpoint-{step}"
        place.mkdir(parents=True)
        (place / "complete").write_text("{}")

    return make_checkpoint


def model(folder: Path) -> None:
    (folder / "model").mkdir()
    for name, text in (
        ("model.safetensors", "x"), ("tokenizer_config.json", "{}"), (os.fsdecode(b"note\xff"), "x"),
        ("config.json", json.dumps({"architectures": [HALF], "task_type": HALF})),
    ):  # fmt: skip
        (folder / "model" / name).write_text(text)
    changed(RESULT, model="model")(folder)


UNUSUAL: dict[str, Callable[[Path], object]] = {
    "half a character in the name": changed(PLAN, name=HALF, about={"method": HALF, "model": HALF}),
    "half a character in the plan": changed(PLAN, argv=["true", HALF], notes=[HALF]),
    "half a character in metrics": lines(METRICS, {"step": 3, "loss": 2.5, "note": HALF, HALF: 1.0}),
    "half a character in events": lines(EVENTS, {"kind": HALF, "step": 3, "time": 1.0, "text": HALF}),
    "half a character in progress": changed(PROGRESS, phase=HALF),
    "half a character in the result": changed(RESULT, samples=[{"prompt": HALF, "after": HALF}], text=HALF),
    "half a character in the estimate": changed(ESTIMATE, note=HALF),
    "half a character in the error": changed(ERROR, message=HALF),
    "half a character in the note": changed(ANNOTATIONS, note=HALF, tags=[HALF]),
    "half a character in the log": lambda folder: (folder / LOG).write_bytes(b"a\xed\xa0\x80b\n\xff\xfe\n"),
    "half a character in the model": model,
    "a huge step": lines(METRICS, {"step": 1, "loss": 1.0}, {"step": 10**30, "loss": 2.0, "eval_loss": 3.0}),
    "a step of 400 digits": lines(METRICS, {"step": 10**400, "loss": 2.0}, {"step": 2, "loss": 10**400}),
    "the largest steps": lines(METRICS, {"step": -1e308, "loss": 1.0}, {"step": 1e308, "loss": 2.0}),
    "an event at a huge step": lines(EVENTS, {"kind": "saved", "step": 10**30, "time": 10**30, "text": "Saved."}),
    "an event at an infinite time": lines(EVENTS, {"kind": "saved", "step": 1, "time": 10**400, "text": "Saved."}),
    "a checkpoint of a huge step": checkpoint(10**30),
    "progress of a huge step": changed(PROGRESS, step=10**400, max_steps=10**401, fraction=1e308),
    "a huge loss": lines(METRICS, {"step": 1, "loss": 1e308, "grad_norm": 1e308}),
    "the largest losses": lines(
        METRICS,
        *({"step": i, "loss": 1.7e308 * (-1) ** i, "eval_loss": 1.7e308, "learning_rate": 1e308} for i in range(1, 60)),
    ),
}


@pytest.fixture(scope="module")
def unusual(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """A run with each of the values, in one folder."""
    root = tmp_path_factory.mktemp("unusual") / "runs"
    found = {}
    for name, change in UNUSUAL.items():
        found[name] = make(root, name)
        change(found[name].path)
    return found


@pytest.mark.parametrize("in_one_image", [IN_ONE_IMAGE, pytest.param(set(), marks=pytest.mark.soak)])
def test_no_value_makes_a_request_fail(
    unusual: dict[str, Run], capfd: pytest.CaptureFixture[str], in_one_image: set[str]
) -> None:
    """Before, half a character in one run made the list of all runs fail, and large values the images."""
    root = next(iter(unusual.values())).path.parent
    with client(root, detect_machine=lambda _: Machine()) as api:
        assert {row["id"] for row in api.get("/api/runs").json()["runs"]} == {run.id for run in unusual.values()}
        assert unusual.keys() > IN_NO_IMAGE | in_one_image
        for name, run in unusual.items():
            images = IMAGES[: 0 if name in IN_NO_IMAGE else 1 if name in in_one_image else 2]
            for path in (*ENDPOINTS, *images):
                found = api.get(f"/api/runs/{run.id}{path}")
                assert found.status_code in (200, 204, 404), (name, path, found.text)
            measurement = api.get(f"/api/runs/{run.id}/measurement.json")
            assert measurement.status_code in (200, 409), (name, measurement.text)
        ids = ",".join(run.id for run in list(unusual.values())[-8:])
        for path in ("", "/curves.csv", "/curves.png"):
            assert api.get(f"/api/comparison{path}?ids={ids}").status_code == 200, path
    assert "Traceback" not in "".join(capfd.readouterr())


def test_no_value_makes_a_command_fail(unusual: dict[str, Run], capfd: pytest.CaptureFixture[str]) -> None:
    """Into a file, where Python's stdout is strict UTF-8."""
    root = next(iter(unusual.values())).path.parent
    assert main(["list", "--runs", str(root)]) == 0
    for run in unusual.values():
        for command in ("show", "metrics", "logs"):
            assert main([command, run.id, "--runs", str(root)]) in (0, 2), (command, run.id)
    assert "Traceback" not in capfd.readouterr().err


def test_half_a_character_becomes_a_replacement_character(tmp_path: Path) -> None:
    run = make(tmp_path, "one")
    UNUSUAL["half a character in the name"](run.path)
    assert [found.name for found in runs(tmp_path)] == ["a\ufffdb"]
    assert json_values.parse(json.dumps({"a😀": ["\\ud800", HALF]})) == {"a😀": ["\\ud800", "a\ufffdb"]}
