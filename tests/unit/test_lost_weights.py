"""Runs of earlier versions whose weights may be partly those of the base model are marked; others are not."""

import pytest
from planted_runs import plant_run
from small import client

from backend.__main__ import main
from backend.registry import METHODS
from backend.runs import LLAMAFACTORY, LOCK, METRICS, RESOLVED, RESULT, lost_weights
from backend.runs.listing import row

OLD, NEW = {"event": "resumed"}, {"event": "resumed", lost_weights.ALL_WEIGHTS: True}
BEST = "save: {load_best_model_at_end: true}\n"
PATH = "save:\n  resume_from: path\n  resume_path: /somewhere/checkpoint-2\n"


def make(
    root,
    kind="mixtral",
    method="full",
    points=(),
    spec="{}\n",
    strategy="ddp",
    world_size=2,
    result=None,
    saved="model",
):
    """A run as its folder looks at the end."""
    about = {"method": METHODS[method].label}
    resolved = {"strategy": strategy, "world_size": world_size}
    contents = {RESOLVED: resolved, METRICS: [*points], LOCK: ""}
    contents |= {f"{saved}/config.json": {"model_type": kind}} if saved else {}
    contents |= {RESULT: result} if result else {}
    return plant_run(root, f"{kind} {len(list(root.glob('*')))}", contents, spec, about=about)


def at(step, **more):
    return {"step": step, **more}


LOSSES = [at(2, eval_loss=2.0), at(4, eval_loss=1.0), at(6, eval_loss=3.0)]
RESUMED = [at(4, loss=1.0), at(4, **OLD), at(6, loss=1.0)]
DONE = {"steps": 6, "eval_loss": 3.0}


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ({"points": RESUMED}, "it was resumed after step 4 "),
        ({"points": RESUMED, "strategy": "single", "world_size": 1}, "it was resumed after step 4 "),
        ({"points": RESUMED, "strategy": "fsdp2", "world_size": 1}, "it was resumed after step 4 "),
        ({"points": RESUMED, "method": "freeze", "saved": "checkpoints/checkpoint-6"}, "it was resumed after step 4 "),
        ({"points": [*RESUMED, at(6, **NEW)]}, "it was resumed after step 4 "),
        ({"points": [at(2, **NEW), at(3, **OLD)]}, "it was resumed after step 3 "),
        ({"points": LOSSES, "spec": BEST, "result": DONE}, "it loaded its best model at the end "),
        ({"points": LOSSES, "spec": PATH}, "it was resumed from a checkpoint of another run "),
        ({"points": [*LOSSES, at(4, **NEW)], "spec": PATH}, "it was resumed from a checkpoint of another run "),
    ],
)
def test_a_damaged_run_is_marked(tmp_path, case, said):
    found = lost_weights.warning(make(tmp_path, **case))
    assert said in found and "converts for mixtral" in found
    assert "checkpoint-4" in found or "step 4" not in found


@pytest.mark.parametrize(
    "case",
    [
        {"points": LOSSES},
        {"points": RESUMED, "kind": "llama"},
        {"points": RESUMED, "method": "lora"},
        {"points": RESUMED, "strategy": "zero2"},
        {"points": RESUMED, "strategy": "zero2", "world_size": 1},
        {"points": RESUMED, "strategy": "fsdp2"},
        {"points": RESUMED, "saved": ""},
        {"points": [at(4, loss=1.0), at(4, **NEW)]},
        {"points": [*RESUMED, at(0, **OLD)]},  # began again
        {"points": [*RESUMED, at(2, **NEW)]},  # from before
        {"points": [*RESUMED, at(4, **NEW)]},
        {"points": LOSSES, "spec": BEST},  # has not ended
        {"points": LOSSES, "result": DONE},
        {"points": LOSSES, "spec": BEST, "result": DONE | {"model_step": 4}},
        {"points": LOSSES[:2], "spec": BEST, "result": DONE | {"steps": 4}},  # the best was the last
        {"points": [at(2, **NEW), *LOSSES[1:]], "spec": PATH},
    ],
)
def test_others_are_not(tmp_path, case):
    assert lost_weights.warning(make(tmp_path, **case)) == ""


def test_a_run_of_llamafactory_is_not(tmp_path):
    run = make(tmp_path, points=RESUMED)
    (run.path / LLAMAFACTORY).touch()
    assert lost_weights.warning(run) == ""


def test_list_page_and_command_line_say_it(tmp_path, capsys):
    run = make(tmp_path, points=RESUMED)
    said = lost_weights.warning(run)
    assert row(run)["warning"] == said != row(make(tmp_path))["warning"] == ""
    with client(tmp_path) as api:
        assert api.get(f"/api/runs/{run.id}").json()["warning"] == said
    assert main(["show", run.id, "--runs", str(tmp_path)]) == 0
    assert said in capsys.readouterr().out
    assert main(["list", "--runs", str(tmp_path)]) == 0
    assert said in capsys.readouterr().out
