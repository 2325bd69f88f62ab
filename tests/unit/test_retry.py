"""Continuing a run that diverged or stopped after a spike: from which checkpoint, and when not."""

import json
from pathlib import Path

import pytest
from failed_runs import ended, failed_run, planted_run
from specs import rule_finding

from backend.__main__ import main
from backend.config import RunSpec
from backend.config.options import edit
from backend.machine import probe
from backend.rules.examples import DEMO, TWO_H100
from backend.runs import CHECKPOINTS, COMPLETE, EVENTS, METRICS
from backend.runs.folder import RunError
from backend.tasks import remedies, retry

SPEC = edit(RunSpec(), {"model.builtin": "tiny-llama", "train.learning_rate": 3e-4, "train.half_lr_retries": 2})
DIVERGED = (
    "backend.train.run_log.TrainError: Training diverged: the loss of steps 31 to 33 is NaN or infinite. The last "
    "finite weights are in checkpoint-20. Start a new run with a lower train.learning_rate or more train.warmup_steps, "
    "and with bf16 or fp32 if it uses fp16."
)
SPIKE = "The loss rose to 9; the median of the last 50 points is 2."


def save(run, *steps):
    for step in steps:
        (run.path / CHECKPOINTS / f"checkpoint-{step}").mkdir(parents=True)
        for name in (COMPLETE, "trainer_state.json", "optimizer.pt", "adapter_config.json"):
            (run.path / CHECKPOINTS / f"checkpoint-{step}" / name).touch()
    return run


def diverged(root, spec=SPEC, name="run"):
    return save(failed_run(root, spec, probe(Path.cwd()), DIVERGED, name), 10, 20)


def stopped(root, cause=SPIKE, spec=SPEC):
    run = save(planted_run(root, spec, probe(Path.cwd()), "spike"), 10, 20, 30, 33)
    (run.path / EVENTS).write_text(json.dumps({"kind": "loss spike", "step": 32, "text": SPIKE, "time": 1}) + "\n")
    return ended(run, end="stopped", exit_code=0, cause=cause)


def test_after_divergence(tmp_path, capsys):
    run = diverged(tmp_path)
    assert main(["show", str(run.path)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("Training diverged: the loss of steps 31 to 33 is NaN") == 2, "in the state and the traceback"
    assert shown.index("Traceback") < shown.index("Suggested changes for a new run.")
    assert retry.applies(run)
    assert retry.changes(run, SPEC) == {
        "train.learning_rate": 1.5e-4,
        "save.resume_from": "path",
        "save.resume_path": str(run.path / CHECKPOINTS / "checkpoint-20"),
    }


def test_after_divergence_from_before_the_loss_exploded(tmp_path):
    """The loss of step 11 is the first that is far above the first ones, and that of the weights after step 10."""
    run = save(diverged(tmp_path), 5)
    losses = {step: 5.0 + 0.1 * step for step in range(1, 11)} | {step: 20.0 * step for step in range(11, 31)}
    lines = [json.dumps({"step": step, "loss": loss}) for step, loss in losses.items()]
    (run.path / METRICS).write_text("\n".join([*lines, '{"step": 31, "loss": NaN}', ""]))
    assert retry.changes(run, SPEC)["save.resume_path"].endswith("checkpoint-5")


@pytest.mark.parametrize(("interval", "step"), [(1, 20), (5, 20), (10, 10)])
def test_after_a_spike_the_checkpoint_before_it_is_used(tmp_path, interval, step):
    """The spike of step 32 was first seen in the interval before; weights of that time may be damaged, and those before
    it, too: the loss of a step is that of the weights before it."""
    spec = edit(SPEC, {"logging.steps": interval})
    run = stopped(tmp_path)
    assert retry.changes(run, spec)["save.resume_path"].endswith(f"checkpoint-{step}")


def test_a_run_that_ended_with_a_loss_far_above_its_first_ones(tmp_path):
    """It is reported with the fifth high value, so checkpoints of these steps may be damaged."""
    run = save(planted_run(tmp_path, SPEC, probe(Path.cwd()), "rise"), 10, 20, 30)
    text = "The loss rose from 10.8 to 1,588. Lower the learning rate."
    (run.path / EVENTS).write_text(json.dumps({"kind": "loss rise", "step": 32, "text": text, "time": 1}) + "\n")
    run = ended(run, end="done", exit_code=0)
    assert run.state == "done" and retry.applies(run)
    assert retry.changes(run, edit(SPEC, {"logging.steps": 1}))["save.resume_path"].endswith("checkpoint-20")
    assert retry.changes(run, edit(SPEC, {"logging.steps": 3}))["save.resume_path"].endswith("checkpoint-10")


def test_a_run_that_the_user_stopped_is_not_continued(tmp_path):
    run = stopped(tmp_path, cause="")
    assert not retry.applies(run)
    with pytest.raises(RunError, match="neither diverged nor stopped after a spike"):
        retry.changes(run, SPEC)
    assert main(["retry", str(run.path), "--automatic"]) == 0
    assert len(list(tmp_path.iterdir())) == 1


def test_other_failures_are_not_continued(tmp_path, capsys):
    run = save(failed_run(tmp_path, SPEC, probe(Path.cwd()), "OSError: [Errno 28] No space left on device", "x"), 10)
    assert main(["retry", str(run.path)]) == 2
    assert "neither diverged nor stopped after a spike" in capsys.readouterr().err


def test_without_a_checkpoint_from_before(tmp_path):
    run, no_checkpoint = stopped(tmp_path), "no checkpoint from before the problem"
    with pytest.raises(RunError, match=no_checkpoint):
        retry.changes(run, edit(SPEC, {"logging.steps": 12}))
    for step in run.checkpoints():  # those of save.only_model, or of Stop, may have the weights only
        (run.path / CHECKPOINTS / f"checkpoint-{step}/optimizer.pt").unlink()
    with pytest.raises(RunError, match=no_checkpoint):
        retry.changes(run, SPEC)


def test_a_retry_that_fails_before_its_first_checkpoint(tmp_path):
    """The next one starts from where it started."""
    start = str(tmp_path / "first/checkpoints/checkpoint-10")
    spec = edit(SPEC, {"save.resume_from": "path", "save.resume_path": start})
    run = failed_run(tmp_path, SPEC, probe(Path.cwd()), DIVERGED, "again")
    assert retry.changes(run, spec)["save.resume_path"] == start
    save(run, 20)
    assert retry.changes(run, spec)["save.resume_path"].endswith("again/checkpoints/checkpoint-20")


def test_the_last_automatic_retry_ends_the_chain(tmp_path):
    run = diverged(tmp_path, edit(SPEC, {"train.half_lr_retries": 0}))
    with pytest.raises(RunError, match="no retry is left"):
        retry.start(run, lambda spec: pytest.fail("checked"), automatic=True)


def test_it_is_the_first_remedy_of_a_diverged_run(tmp_path):
    first = remedies.find(diverged(tmp_path), probe(Path.cwd()), Path.cwd()).fixes[0]
    assert first.label == "Continue from checkpoint-20 with learning rate 1.5e-4"


@pytest.mark.parametrize(("method", "rate", "usual"), [("lora", 10, 2e-4), ("full", 0.5, 2e-5), ("lora", 0.2, 2e-4)])
def test_a_far_too_high_learning_rate_becomes_a_usual_one(tmp_path, method, rate, usual):
    """A fifth of it would diverge, too, and its checkpoints are of no use."""
    run = diverged(tmp_path, edit(SPEC, {"method.kind": method, "train.learning_rate": rate}))
    fixes = remedies.find(run, probe(Path.cwd()), Path.cwd()).fixes
    assert fixes[0].patch == {"train.learning_rate": usual}
    assert not [fix for fix in fixes if "save.resume_path" in fix.patch]


@pytest.mark.parametrize(("rate", "lower"), [(3e-3, 1.5e-3), (0.5, 2e-5)])
def test_pretraining_has_higher_rates(tmp_path, rate, lower):
    """Small models from random weights are trained with rates that would be far too high for SFT."""
    changes = {"train.stage": "pretraining", "method.kind": "full", "train.learning_rate": rate}
    spec = edit(SPEC, changes)
    assert retry.changes(diverged(tmp_path, spec), spec)["train.learning_rate"] == lower


def test_a_run_that_stopped_after_a_spike_has_remedies_and_one_that_the_user_stopped_has_none(tmp_path, capsys):
    machine = probe(Path.cwd())
    found = remedies.find(stopped(tmp_path / "spike"), machine, Path.cwd()).fixes
    assert [fix.label for fix in found[:2]] == [
        "Continue from checkpoint-20 with learning rate 1.5e-4",
        "Learning rate 6e-5",
    ]
    assert main(["show", str(next((tmp_path / "spike").iterdir()))]) == 0
    assert "Suggested changes for a new run.\n  Continue from checkpoint-20" in capsys.readouterr().out
    assert remedies.find(stopped(tmp_path / "user", cause=""), machine, Path.cwd()).fixes == ()


@pytest.mark.parametrize(
    ("patch", "words"),
    [
        ({"save.strategy": "no"}, "save.strategy is no"),
        ({"save.only_model": True}, "save.only_model is on"),
        ({"save.strategy": "steps", "save.steps": 20}, "the first checkpoint is that of the last step, 20"),
        ({"save.strategy": "epoch"}, "the first checkpoint is that of the last step, 20"),  # of the first 25
        ({"save.strategy": "steps", "save.steps": 19}, ""),
        ({"save.strategy": "no", "train.half_lr_retries": 0}, ""),
        ({"save.strategy": "no", "save.resume_from": "path", "save.resume_path": "checkpoint-1"}, ""),
        ({"parallel.strategy": "tensor", "launch.nproc_per_node": 2}, "cannot restore the optimizer state"),
    ],
)
def test_retries_need_a_checkpoint_before_the_problem(patch, words):
    options = {"train.duration": "steps", "train.max_steps": 20, "train.half_lr_retries": 1, **patch}
    found = rule_finding("TRN011", options, TWO_H100, DEMO)
    assert words in found.message if words and found else found is None and not words
    for fix in found.fixes if found else ():
        assert rule_finding("TRN011", {**options, **fix.patch}, TWO_H100, DEMO) is None
