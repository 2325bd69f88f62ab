"""The outputs at each evaluation during training: those of the weights of that step, and training as without them."""

from __future__ import annotations

import json
from pathlib import Path

from fork_server import ForkServer
from training_runs import losses, make_spec, result

from backend.runs import GENERATIONS, METRICS, generations
from backend.runs.metrics import points_with

TRAINED = {
    "train.max_steps": 6, "train.learning_rate": 0.02, "train.lr_scheduler_type": "constant", "train.warmup_steps": 0,
    "eval.strategy": "steps", "eval.steps": 2, "eval.num_generations": 3, "eval.max_new_tokens": 6,
    "save.strategy": "steps", "save.steps": 2, "save.total_limit": 0,
}  # fmt: skip


def test_each_evaluation_generates(fork_server: ForkServer, root: Path) -> None:
    """The outputs at step 2 are those of a run that ends there. A resumed run repeats the steps after its checkpoint,
    and leaves out no step and no line."""
    spec = make_spec({**TRAINED, "eval.generate_during_eval": True})
    folder = fork_server.train(root / "timeline", spec)
    two = fork_server.train(root / "timeline-two-steps", make_spec({**TRAINED, "train.max_steps": 2}))
    found, samples = generations.read(folder), result(folder)["samples"]
    assert found["prompts"] == [{key: sample[key] for key in ("prompt", "reference")} for sample in samples]
    assert [line["step"] for line in found["steps"]] == [0, 2, 4, None]
    first, second, third, after = (line["outputs"] for line in found["steps"])
    assert after == [sample["after"] for sample in samples]
    assert first == [sample["before"] for sample in samples]
    assert second == [sample["after"] for sample in result(two)["samples"]] != third
    assert losses(two) == {step: loss for step, loss in losses(folder).items() if step <= 2}
    scored = {point["step"]: point["eval_rouge_l"] for point in points_with(folder / METRICS, "eval_rouge_l")}
    assert list(scored) == [0, 2, 4, 6] and scored[6] == result(folder)["rouge_l_after"]
    assert not generations.size(two)

    before = (folder / GENERATIONS).read_text()
    with (folder / GENERATIONS).open("a") as file:
        file.write('{"step": 5, "outp')  # a killed process
    fork_server.resume(folder, 2)
    assert (folder / GENERATIONS).read_text() == before
    again = [point["step"] for line in (folder / METRICS).read_text().splitlines()
             if "eval_rouge_l" in (point := json.loads(line))]  # fmt: skip
    assert again == [0, 2, 4, 6, 4, 6], "step 0 and step 2 are not repeated"
