"""The validation loss of a run belongs to the model that it saved, wherever it is shown."""

import json

import pytest
from planted_runs import plant_run
from small import client

from backend.__main__ import main
from backend.runs import LOCK, METRICS, RESULT, validation
from backend.runs.listing import row

LOSSES = {10: 3.0, 20: 1.5, 30: 2.0}
BEST = {"eval_loss": 1.5, "model_step": 20, "steps": 30, "model": "model"}


@pytest.fixture
def run(tmp_path):
    points = [{"step": step, "eval_loss": loss} for step, loss in LOSSES.items()]
    return plant_run(tmp_path / "runs", "best", {METRICS: points, LOCK: "", RESULT: BEST})


def test_list_page_and_command_line_show_that_of_the_saved_model(run, capsys):
    assert row(run)["eval_loss"] == 1.5
    with client(run.path.parent) as api:
        shown = api.get(f"/api/runs/{run.id}").json()
    assert (shown["result"]["eval_loss"], shown["validation"]) == (1.5, "of the saved model, the best one: step 20")
    assert main(["show", run.id, "--runs", str(run.path.parent)]) == 0
    assert "\neval loss: 1.5 (of the saved model, the best one: step 20)\n" in capsys.readouterr().out
    assert validation.lowest(run.path) == (1.5, 20) and validation.losses(run.path) == LOSSES


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_step": 30}, "of the saved model"),
        ({"model_step": 30, "model": None}, "of the model at the end"),
        ({"model": None}, "of the model at the end, the best one: step 20"),
        ({"model_step": 2000, "steps": 9000}, "of the saved model, the best one: step 2,000"),
        ({"model_step": None}, "of the last evaluation"),  # of an earlier version
        ({"eval_loss": None}, ""),
    ],
)
def test_which_model_is_said(changes, text):
    assert validation.model(BEST | changes) == text


def test_the_router_loss_of_a_mixture_is_said(run, capsys):
    assert validation.router_note({}) == validation.router_note({"router_loss_weight": 0.0}) == ""
    (run.path / RESULT).write_text(json.dumps(BEST | {"router_loss_weight": 0.001}))
    which = "the router's auxiliary loss, times router_aux_loss_coef (0.001)"
    said = f"The training loss includes {which}; the validation loss does not."
    with client(run.path.parent) as api:
        assert api.get(f"/api/runs/{run.id}").json()["router_note"] == said
    assert main(["show", run.id, "--runs", str(run.path.parent)]) == 0
    assert f"\n{said}\n" in capsys.readouterr().out


@pytest.mark.parametrize("value", [None, True, "1", float("nan"), float("inf")])
def test_values_that_are_no_loss(run, value):
    assert validation.loss(run.path, {"eval_loss": value}) == (2.0 if value is None else None)
