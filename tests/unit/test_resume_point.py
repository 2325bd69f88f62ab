"""The checkpoint that a run resumes from: the page, the command line and the trainer find the same one, and
one that is missing or cannot be read does not count as "there is no checkpoint"."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from planted_runs import plant_run
from privileges import needs_root
from small import client

from backend.__main__ import main
from backend.machine import Machine
from backend.runs import CHECKPOINTS, COMPLETE, EVENTS, LOCK, METRICS, STATE, resume_point
from backend.runs.folder import Run, RunError


def write_checkpoint(run: Run, step: int, start: str = "a1") -> Path:
    folder = run.path / CHECKPOINTS / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "optimizer.pt").write_bytes(b"state")
    files = {"optimizer.pt": resume_point.fingerprint(folder / "optimizer.pt")}
    (folder / COMPLETE).write_text(json.dumps({"files": files, "start": start}))
    with (run.path / EVENTS).open("a") as file:
        file.write(json.dumps({"kind": "saved", "step": step, "time": 0, "text": ""}) + "\n")
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run that was stopped at step 60, with checkpoints 55 and 60."""
    state = {"end": "stopped", "started": 1.0, "ended": 2.0, "exit_code": 0}
    points = [{"step": k, "loss": 1.0} for k in range(1, 61)]
    made = plant_run(tmp_path / "runs", "x", {LOCK: "supervisor\na1\n", STATE: state, METRICS: points})
    for step in (55, 60):
        write_checkpoint(made, step)
    return made


def replace_by_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


def empty_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


GONE: dict[str, tuple[Callable[[Path], object], str]] = {
    "moved away": (lambda folder: folder.rename(folder.with_name("away")), "checkpoint-60 is missing"),
    "a file": (replace_by_file, "checkpoints cannot be read (Not a directory)"),
    "a dangling link": (
        lambda folder: (folder.rename(folder.with_name("away")), folder.symlink_to("nowhere")), "checkpoint-60 is miss",
    ),
    "empty": (empty_folder, "checkpoint-60 is missing"),
    "all are files": (
        lambda folder: [replace_by_file(path) for path in list(folder.iterdir())], "checkpoint-60 cannot be read (Not",
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", GONE)
def test_checkpoints_that_are_away_are_not_no_checkpoint(
    run: Run, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before, Resume started at step 0 and hid the 60 points that were logged."""
    change, problem = GONE[how]
    change(run.path / CHECKPOINTS)
    before = (run.path / METRICS).read_bytes()
    sentence = run.summary()["sentence"]
    assert problem in sentence
    assert "Restart from scratch" in sentence
    assert "starts at step 0" not in sentence
    with pytest.raises(RunError, match="Not resumed") as refused:
        run.resume()
    assert problem in str(refused.value)
    assert main(["resume", run.id, "--runs", str(run.path.parent)]) == 2
    assert problem in "".join(capsys.readouterr())
    with client(run.path.parent, detect_machine=lambda _: Machine()) as api:
        answer = api.post(f"/api/runs/{run.id}/resume", json={})
        assert answer.status_code == 409, answer.text
        assert problem in answer.json()["error"]
    assert (run.path / METRICS).read_bytes() == before
    assert json.loads((run.path / STATE).read_text())["end"] == "stopped", "nothing was started"


def test_a_run_that_has_saved_nothing_starts_at_step_0(run: Run) -> None:
    shutil.rmtree(run.path / CHECKPOINTS)
    (run.path / EVENTS).unlink()
    assert run.resume_point() == resume_point.ResumePoint()
    assert run.summary()["sentence"].endswith("There is no checkpoint, so the run would start again at step 0.")


def test_what_was_saved_before_a_restart_does_not_count(run: Run) -> None:
    shutil.rmtree(run.path / CHECKPOINTS)
    with (run.path / EVENTS).open("a") as file:
        file.write(json.dumps({"kind": "resumed", "step": 0}) + "\n")
    assert run.resume_point() == resume_point.ResumePoint()


SKIPPED: dict[str, tuple[Callable[[Path], object], str]] = {
    "deleted": (shutil.rmtree, "is missing, although the run has saved it"),
    "a file": (replace_by_file, "cannot be read (Not a directory)"),
    "without its mark": (lambda folder: (folder / COMPLETE).unlink(), "its file complete is missing"),
    "truncated": (lambda folder: os.truncate(folder / "optimizer.pt", 1), "optimizer.pt has 1 bytes, but 5 were saved"),
    "without a file": (lambda folder: (folder / "optimizer.pt").unlink(), "its file optimizer.pt is missing"),
    "mark is not JSON": (lambda folder: (folder / COMPLETE).write_text("{"), "its file complete cannot be read"),
    "mark is a list": (lambda folder: (folder / COMPLETE).write_text("[]"), "its file complete cannot be read"),
}


@pytest.mark.parametrize("how", SKIPPED)
def test_a_newer_checkpoint_that_cannot_be_used_is_skipped(run: Run, how: str) -> None:
    change, problem = SKIPPED[how]
    change(run.path / CHECKPOINTS / "checkpoint-60")
    found = run.resume_point()
    assert found.checkpoint == run.path / CHECKPOINTS / "checkpoint-55"
    assert problem in found.skipped["checkpoint-60"]
    sentence = run.summary()["sentence"]
    assert "Resume continues from checkpoint 55: checkpoint-60 " in sentence
    assert problem in sentence


def test_weights_alone_are_not_resumed(run: Run) -> None:
    for step in (55, 60):
        folder = run.path / CHECKPOINTS / f"checkpoint-{step}"
        (folder / "optimizer.pt").rename(folder / "model.safetensors")
        (folder / COMPLETE).write_text("")
    assert run.summary()["sentence"].endswith(
        "There is no checkpoint with optimizer state, so the run would start again at step 0."
    )


@needs_root
@pytest.mark.parametrize("closed", ["checkpoints", "checkpoints/checkpoint-60"])
def test_folders_without_permissions(run: Run, tmp_path: Path, closed: str) -> None:
    """As another user: before, the state promised checkpoint 55 and the trainer failed on 60."""
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)
    for path in (run.path.parent, run.path, *run.path.rglob("*")):
        os.chown(path, 65534, 65534)
        path.chmod(0o755)
    (run.path / closed).chmod(0)
    os.seteuid(65534)
    try:
        sentence = run.resume_point().sentence
    finally:
        os.seteuid(0)
    if closed == "checkpoints":
        assert "The run cannot be resumed" in sentence
        assert "checkpoints cannot be read (Permission denied)" in sentence
    else:
        assert sentence == "Resume continues from checkpoint 55: checkpoint-60 cannot be read (Permission denied)."


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"global_step": 7, "epoch": 0.5}', (7, 0.5)),
        ('{"global_step": 7, "epoch": 0.5, "stateful_callbacks": {"stream": []}}', (0, 0.0)),
        ('{"global_step": 7, "epoch": NaN}', (0, 0.0)),
        ('{"global_step": 7, "epoch": true}', (0, 0.0)),
        ("{", (0, 0.0)),
    ],
)
def test_the_position_of_a_checkpoint(tmp_path: Path, text: str, found: tuple[int, float]) -> None:
    """The check and the trainer read the same one: a stream has no epochs."""
    (tmp_path / "trainer_state.json").write_text(text)
    assert resume_point.position(tmp_path) == found
