"""The outputs at the steps of a run, on the page's API: a damaged file has the lines that can be read."""

from planted_runs import plant_run
from small import client

from backend.runs import GENERATIONS, generations

PROMPTS = [{"prompt": "p", "reference": "r"}]
STEP = {"step": 5, "outputs": ["o"], "correct": [False], "rouge_l": [0.5], "scores": {"rouge_l": 0.5}}


def test_damaged_lines_are_left_out(tmp_path):
    damaged = [3, [STEP], {"step": 5}, {**STEP, "step": "6"}, {**STEP, "outputs": None}, {"prompts": 1}]
    run = plant_run(tmp_path, "run", {GENERATIONS: [{"prompts": PROMPTS}, *damaged, STEP]})
    with (run.path / GENERATIONS).open("a") as file:
        file.write("[" * 100_000 + "\n")
    with client(tmp_path) as http:
        found = http.get(f"/api/runs/{run.id}/generations?step=5").json()
    assert found["outputs"] == ["o"] and [line["step"] for line in found["steps"]] == [5]
    assert found["prompts"] == PROMPTS and generations.begin(run.path, PROMPTS, 5) == [5]
