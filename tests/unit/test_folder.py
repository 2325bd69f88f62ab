"""Run folders: created atomically; state and sentence are computed from the files."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from backend.__main__ import main
from backend.cli import runs as cli_runs
from backend.runs import (
    CHECKPOINTS,
    COMPLETE,
    ESTIMATE,
    JOB,
    LOCK,
    LOG,
    METRICS,
    PROGRESS,
    RESULT,
    SCRIPT,
    STATE,
    STOP,
    WAITS_FOR_DISK,
    Plan,
    processes,
    queue,
)
from backend.runs.folder import Run, RunError, StopTimeouts, find, runs
from backend.runs.supervisor import Supervisor
from backend.runs.throughput import duration

NOW = datetime(2026, 11, 21, 9, 5, 12)
PLAN = Plan(("python", "-m", "train", "--n=1"), {"A": "b c"}, {"spec.yaml": "a: 1\n", "sub/x.json": "{}"}, ("Note.",))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path / "runs", "SmolLM2 / LoRA!", PLAN, NOW, {"method": "LoRA", "model": "SmolLM2"})


@pytest.fixture
def alive(run: Run) -> Iterator[Run]:
    lock = processes.acquire_lock(run.path)
    assert lock is not None
    os.write(lock, b"supervisor\n")
    yield run
    os.close(lock)


def test_a_released_lock_is_free_although_another_process_has_its_descriptor(run: Run) -> None:
    """The process that forked the supervisor has it, and on a busy machine may end later than a short run."""
    lock = processes.acquire_lock(run.path)
    assert lock is not None
    other = subprocess.Popen(["sleep", "60"], pass_fds=[lock])
    try:
        assert processes.is_locked(run.path)
        processes.release(lock)
        assert not processes.is_locked(run.path)
    finally:
        other.kill()
        other.wait()


def put(run: Run, name: str, value: Any) -> None:
    """Write a file after the lock, as the last start does."""
    (run.path / name).write_text(value if isinstance(value, str) else json.dumps(value))


def put_old(run: Run, name: str, value: Any) -> None:
    put(run, name, value)
    os.utime(run.path / name, (1, 1))


def test_an_estimate_is_kept_where_there_is_one(tmp_path: Path) -> None:
    said = {"device_bytes": 7}
    assert Run.create(tmp_path, "x", PLAN, NOW, {}, said).estimate() == said
    before = Run.create(tmp_path, "x", PLAN, NOW)
    assert before.estimate() == {} and not (before.path / ESTIMATE).exists()


def test_create_writes_what_the_plan_says(run: Run) -> None:
    assert run.id == "2026-11-21_090512_smollm2-lora"
    assert (run.path / "spec.yaml").read_text() == "a: 1\n" and (run.path / "sub/x.json").read_text() == "{}"
    assert stat.S_IMODE((run.path / SCRIPT).stat().st_mode) & 0o100
    assert run.plan() == PLAN
    longer = replace(PLAN, stop_timeout=7200.0)
    assert Run.create(run.path.parent, "longer", longer, NOW).plan() == longer
    summary = run.summary()
    assert summary["created"] == NOW.timestamp() and summary["name"] == "SmolLM2 / LoRA!"
    assert (summary["method"], summary["model"], summary["state"]) == ("LoRA", "SmolLM2", "new")
    assert (summary["started"], summary["ended"], summary["step"], summary["eta_seconds"]) == (None,) * 4


def test_two_runs_in_one_second_and_the_newest_first(tmp_path: Path) -> None:
    made = [Run.create(tmp_path, "x", PLAN, NOW).id for _ in range(3)]
    later = Run.create(tmp_path, "\u6a21\u578b/..", PLAN, NOW.replace(second=13)).id
    assert made == [f"2026-11-21_090512_x{n}" for n in ("", "-2", "-3")] and later == "2026-11-21_090513_run"
    assert Run.create(tmp_path / "accents", "Z\u00fcge \u00c9", PLAN, NOW).id == "2026-11-21_090512_zuge-e"
    (tmp_path / "a file").touch()
    (tmp_path / "no run").mkdir()
    (tmp_path / ".new-half").mkdir()
    assert [run.id for run in runs(tmp_path)] == [later, *reversed(made)]
    assert runs(tmp_path / "nowhere") == []


def test_find_knows_runs_only(run: Run) -> None:
    root = run.path.parent
    assert find(root, run.id).path == run.path
    for name in ("", ".", "..", f"../runs/{run.id}", "no", f"{run.id}/", ".new-x"):
        with pytest.raises(RunError, match="There is no run"):
            find(root, name)
    for name in (
        f"{run.id} (copy)",
        "\u00dcbung 2",
        "it's 50%, [a]",
    ):  # as file managers name copies, and as users rename folders
        shutil.copytree(run.path, root / name)
        assert find(root, name).id == name in [listed.id for listed in runs(root)]


def test_only_the_owner_can_read_a_run(tmp_path: Path) -> None:
    """Options may contain what others should not see, whatever the umask."""
    previous = os.umask(0)
    try:
        run = Run.create(tmp_path / "runs", "x", replace(PLAN, other_nodes={"node-1": ("a",)}), NOW, {}, {"bytes": 1})
    finally:
        os.umask(previous)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in run.path.iterdir() if path.is_file()}
    assert stat.S_IMODE((tmp_path / "runs").stat().st_mode) == stat.S_IMODE(run.path.stat().st_mode) == 0o700
    assert modes == {name: 0o700 if name.endswith(".sh") else 0o600 for name in modes} and len(modes) == 5


def test_runs_of_another_user_are_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resume would execute the commands in their plan.json."""
    root = run.path.parent
    assert find(root, run.id).path == run.path and runs(root)
    lstat = os.lstat

    def foreign(name: str) -> None:
        def changed(path: Any) -> os.stat_result:
            status = list(lstat(path))
            status[4] += 1000 if Path(path).name == name else 0  # st_uid
            return os.stat_result(status)

        monkeypatch.setattr(os, "lstat", changed)

    for name in (run.id, "plan.json"):
        foreign(name)
        with pytest.raises(RunError, match="belongs to another user"):
            find(root, run.id)
        assert runs(root) == []


def test_links_in_a_run_are_not_followed(run: Run, tmp_path: Path) -> None:
    root, secret = run.path.parent, tmp_path / "secret"
    secret.write_text("secret")
    (run.path / "checkpoints").symlink_to(tmp_path)  # moved to another disk
    assert find(root, run.id).path == run.path
    for name in (LOG, METRICS, "spec.yaml", SCRIPT, STATE):
        kept = (run.path / name).read_text() if (run.path / name).exists() else None
        (run.path / name).unlink(missing_ok=True)
        (run.path / name).symlink_to(secret)
        with pytest.raises(RunError, match=f"{name} in the run folder .* is a symbolic link"):
            find(root, run.id)
        (run.path / name).unlink()
        if kept is not None:
            put(run, name, kept)
    (root / "2026-11-21_linked").symlink_to(run.path)
    with pytest.raises(RunError, match="is a symbolic link"):
        find(root, "2026-11-21_linked")
    assert [found.id for found in runs(root)] == [run.id]


def test_a_root_that_is_no_folder_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        RunError, match=r"The run folder could not be created in .*Not a directory. Nothing was started"
    ):
        Run.create(tmp_path / "file" / "runs", "x", PLAN, NOW)


FULL = """
import resource, sys
from datetime import datetime
from pathlib import Path
from backend.runs import Plan
from backend.runs.folder import Run, RunError
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    Run.create(Path(sys.argv[1]), "x", Plan(("a",), files={"small": "1", "big": "x" * 5000}), datetime.now())
except RunError as error:
    print(error)
"""


def test_a_full_disk_leaves_no_partial_run(tmp_path: Path) -> None:
    home = Path(__file__).resolve().parent.parent.parent
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], cwd=home, capture_output=True, text=True, check=True, timeout=60
    )
    assert "The run folder could not be created" in done.stdout and not list(tmp_path.iterdir())


def test_two_readers_do_not_block_each_other(run: Run) -> None:
    (run.path / LOCK).touch()
    with (run.path / LOCK).open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        assert not processes.is_locked(run.path)


def test_states_of_an_alive_run(alive: Run) -> None:
    put_old(alive, PROGRESS, {"phase": "done", "step": 40, "max_steps": 40})
    assert alive.state == "starting" and alive.summary()["step"] is None
    assert "Starting" in alive.summary()["sentence"]
    put(alive, PROGRESS, {"phase": "loading model", "text": "Loading the model."})
    assert alive.state == "running" and alive.summary()["sentence"] == "Running: loading the model."
    assert alive.can() == {"stop": True, "resume": False, "delete": False, "clean_up": False}
    alive.stop()
    assert alive.state == "stopping" and (alive.path / STOP).read_text() == "save"
    put(alive, PROGRESS, {"phase": WAITS_FOR_DISK, "text": "checkpoint-4 cannot be saved (no room): waiting."})
    why = "Checkpoint-4 cannot be saved (no room): waiting. Stopping after this step"
    assert alive.summary()["sentence"].startswith(why)
    evaluating = {"phase": "evaluating", "text": "Evaluating after step 8.", "unit": "batch", "done": 3, "total": 12}
    put(alive, PROGRESS, {**evaluating, "since": 100.0})
    why = "Evaluating after step 8 (3 of 12 batches, about 30 s left). Stopping after this step"
    assert alive.summary(now=110.0)["sentence"].startswith(why)
    alive.stop(save=False)
    assert "without a checkpoint" in alive.summary()["sentence"]


def test_the_command_says_what_a_stop_waits_for(
    alive: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(alive, PROGRESS, {"phase": "loading model", "text": "Loading the model."})
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    read: list[str] = []
    monkeypatch.setattr(Run, "last_points", lambda run: read.append(run.state) or [])
    polling = SimpleNamespace(sleep=lambda seconds: (alive.path / LOCK).unlink())
    monkeypatch.setattr(cli_runs, "time", polling)
    assert main(["stop", str(alive.path)]) == 0
    assert "\rStopping after this step, with a checkpoint..." in capsys.readouterr().err
    assert "stopping" not in read, "no metrics are read until it has ended"


def test_a_job_that_is_stopped_has_no_step_and_no_checkpoint(tmp_path: Path) -> None:
    """Such as a server that runs in the background, with `footplate stop`."""
    job = Run.create(tmp_path, "serve", PLAN, NOW, {"kind": "serve"})
    lock = processes.acquire_lock(job.path)
    assert lock is not None
    put(job, STOP, "save")
    assert job.summary()["sentence"] == "Stopping."
    put(job, STATE, {"started": 1.0, "stop_deadline": time.time() + 5})
    assert job.waits_for().startswith("Stopping. The processes can run until ")
    os.close(lock)


def test_a_running_run_shows_step_and_remaining_time(alive: Run) -> None:
    progress = {"phase": "training", "step": 12, "max_steps": 40, "time": 1012.0}
    progress |= {"first_step": 1, "first_step_time": 1001.0}
    put(alive, PROGRESS, progress)
    summary = alive.summary(now=1012.0)
    assert summary["eta_seconds"] == pytest.approx(28.0) and summary["fraction"] == pytest.approx(0.3)
    assert summary["sentence"] == "Running: step 12 of 40. Training: about 28 s left."
    points = [{"step": s, "loss": 1.0 / s, "time": 1000 + 5.0 * s} for s in (11, 12)]
    put(alive, METRICS, "".join(json.dumps(point) + "\n" for point in points))
    summary = alive.summary(now=1014.0)
    assert summary["eta_seconds"] == pytest.approx(138.0) and summary["loss"] == pytest.approx(1 / 12)
    assert "about 2 min left" in summary["sentence"]
    assert "no step for 8 min 20 s" in alive.summary(now=1512.0)["sentence"]


def test_the_pause_before_a_resume_counts_for_no_step(alive: Run) -> None:
    put(alive, PROGRESS, {"phase": "training", "step": 22, "max_steps": 32, "time": 9002.0})
    old = [{"step": s, "loss": 1.0, "time": 1000.0 + s} for s in range(15, 25)]
    new = [{"step": s, "loss": 2.0, "time": 8980.0 + s} for s in (21, 22)]
    rows = [*old, {"event": "resumed", "step": 20, "time": 9000.0}, *new]
    put(alive, METRICS, "".join(json.dumps(point) + "\n" for point in rows))
    assert alive.summary(now=9002.0)["eta_seconds"] == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("started_by", "kept", "files", "state"),
    [
        ("supervisor", {"end": "done", "exit_code": 0}, {}, "done"),
        ("supervisor", {"end": "stopped", "exit_code": 0}, {}, "stopped"),
        ("supervisor", {"end": "failed", "exit_code": 1}, {}, "failed"),
        ("supervisor", {"started": 1.0}, {}, "lost"),
        ("supervisor", "torn {", {}, "lost"),
        ("supervisor", {"started": 1.0}, {RESULT: {"steps": 3}}, "done"),
        ("shell", {"started": 1.0}, {RESULT: {}}, "done"),
        ("shell", {"end": "done"}, {STOP: "save"}, "stopped"),
        ("shell", {"end": "done"}, {}, "failed"),
    ],
)
def test_ended_states(run: Run, started_by: str, kept: Any, files: dict[str, Any], state: str) -> None:
    put(run, LOCK, f"{started_by}\n")
    put(run, STATE, kept)
    put(run, LOG, "hello\n")
    for name, value in files.items():
        put(run, name, value)
    assert run.state == state
    summary = run.summary()
    assert summary["ended"] and summary["sentence"].endswith(".")
    assert (run.failure() is not None) == (state == "failed")
    assert run.can()["delete"] and not run.can()["stop"]


@pytest.mark.parametrize(
    "kept",
    [
        {"queued": 1.0, "waiting": "x uses GPU 0.", "end": "stopped", "ended": 2.0},  # removed from the queue
        {"queued": 1.0, "waiting": "x uses GPU 0."},  # its supervisor was killed
        {"started": 1.0, "end": "failed", "exit_code": 1, "stop_deadline": 5.0, "earlier_seconds": 9.0},
    ],
)
def test_run_sh_has_nothing_to_do_with_an_earlier_start(run: Run, kept: dict[str, Any]) -> None:
    """state.json is that of an earlier start, which a supervisor had."""
    put(run, STATE, kept)
    put(run, LOG, "")
    lock = processes.acquire_lock(run.path)
    assert lock is not None
    put(run, LOCK, "shell\n")
    assert run.state == "starting" and "Waiting" not in run.summary()["sentence"]
    put(run, STOP, "save")
    assert run.state == "stopping" and "until" not in run.summary()["sentence"]
    os.close(lock)
    assert run.summary()["sentence"].startswith("Stopped. There is no checkpoint") and run.failure() is None
    (run.path / STOP).unlink()
    summary = run.summary()
    assert summary["sentence"].startswith("Failed. ") and summary["earlier_seconds"] is None


def test_the_time_in_the_queue_of_a_cluster_is_not_that_of_the_run(run: Run) -> None:
    """It would be in the duration of the run, and in the predicted start of later ones."""
    put(run, LOCK, "supervisor\n")
    job = {"id": "7", "cluster": "Slurm", "waits": False, "began": 4000.0, "ran": 0.0, "ended": True}
    put(run, JOB, job)
    put(run, STATE, {"end": "done", "started": 100.0, "ended": 4185.0, "exit_code": 0})
    summary = run.summary()
    assert (summary["started"], summary["earlier_seconds"]) == (4000.0, None)
    assert summary["sentence"] == "Done in 3 min 5 s."
    put(run, JOB, {**job, "ran": 60.0})  # it was put back into the queue
    assert run.summary()["sentence"] == "Done in 4 min 5 s."
    put(run, JOB, {**job, "began": 50.0})  # the job of an earlier start
    assert run.summary()["started"] == 100.0
    supervisor = Supervisor(run.path, False, StopTimeouts(), lock=-1)
    supervisor.state_before = {"started": 100.0, "ended": 4185.0, "earlier_seconds": 5.0}
    earlier = {}
    for began, ran in ((4000.0, 0.0), (4000.0, 60.0), (0.0, 60.0), (50.0, 60.0)):
        put(run, JOB, {**job, "began": began, "ran": ran})
        earlier[began, ran] = supervisor._earlier_seconds() - 5
    assert list(earlier.values()) == [185, 245, 60, 4085]


def test_sentences_of_ended_runs(run: Run) -> None:
    put(run, LOCK, "supervisor\n")
    put(run, STATE, {"end": "stopped", "started": 100.0, "ended": 285.0, "exit_code": 0})
    put(run, PROGRESS, {"phase": "training", "step": 12, "max_steps": 40})
    assert "start again at step 0" in run.summary()["sentence"]
    for step, whole in ((2, True), (10, True), (12, False)):
        folder = run.path / f"checkpoints/checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "optimizer.pt").touch()
        if whole:
            (folder / "complete").touch()
    assert run.checkpoints() == [2, 10]
    assert run.summary()["sentence"] == "Stopped after step 12. Resume continues from checkpoint 10."
    put(run, STATE, {"end": "done", "started": 100.0, "ended": 285.0})
    summary = run.summary()
    assert summary["sentence"] == "Done: 12 steps in 3 min 5 s." and summary["fraction"] == 1.0
    put(run, STATE, {})
    assert summary["started"] == 100.0 and run.summary()["sentence"].startswith("Lost after step 12")


@pytest.mark.parametrize("starter", ["supervisor", "shell"])
def test_a_run_that_stopped_itself_says_why(run: Run, starter: str) -> None:
    """Without a supervisor, only the stop file does."""
    put(run, LOCK, f"{starter}\n")
    put(run, STATE, {"end": "stopped", "started": 1.0, "exit_code": 0, "cause": "It reached its limit."})
    put(run, STOP, "save\nIt reached its limit.\n")
    assert run.summary()["sentence"] == "Stopped. It reached its limit."


def test_a_stop_that_failed_says_why(run: Run) -> None:
    put(run, LOCK, "supervisor\n")
    put(run, LOG, "Traceback (most recent call last):\n  x\nOSError: [Errno 28] No space left on device\n")
    put(run, STATE, {"end": "stopped", "exit_code": 1})
    assert run.summary()["sentence"] == "Stopped. The disk is full, or its quota is exceeded."
    put(run, STATE, {"end": "stopped", "exit_code": -15, "forced": "SIGTERM"})
    assert run.failure() is None


def test_delete(run: Run) -> None:
    run.delete()
    assert runs(run.path.parent) == [] and not list(run.path.parent.iterdir())
    with pytest.raises(RunError, match="could not be deleted"):
        run.delete()


def test_a_list_of_many_runs(tmp_path: Path) -> None:
    for _ in range(50):
        run = Run.create(tmp_path, "x", PLAN, NOW)
        put(run, LOCK, "supervisor\n")
        put(run, STATE, {"end": "failed", "exit_code": 1})
        put(run, LOG, "said\n" * 10_000)
    assert len([run.summary() for run in runs(tmp_path)]) == 50


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "0 s"), (59.4, "59 s"), (60, "1 min"), (185, "3 min 5 s"), (7260, "2 h 1 min"), (180_000, "2 d 2 h")],
)
def test_duration(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_times_come_from_the_files(run: Run) -> None:
    put(run, LOCK, "shell\n")
    put(run, RESULT, "{}")
    summary = run.summary()
    assert abs(summary["started"] - time.time()) < 5 and summary["ended"] >= summary["started"]


def test_a_stopped_run_shows_the_step_that_was_saved(run: Run) -> None:
    """Stop saves after the step, which may be one more than the last one that was logged."""
    put(run, LOCK, "supervisor\n")
    put(run, PROGRESS, {"phase": "training", "step": 6, "max_steps": 9})
    put(run, STATE, {"started": 1.0, "ended": 2.0, "end": "stopped", "exit_code": 0})
    saved = run.path / CHECKPOINTS / "checkpoint-7"
    saved.mkdir(parents=True)
    (saved / "optimizer.pt").touch()
    (saved / COMPLETE).touch()
    assert run.summary()["step"] == 7
    assert run.summary()["sentence"] == "Stopped after step 7. Resume continues from checkpoint 7."


@pytest.mark.parametrize(
    ("before", "sigterm", "state", "sentence"),
    [
        ({"started": 1.0, "end": "failed", "exit_code": 1}, False, "failed", "Failed. "),
        ({"started": 1.0}, False, "lost", "Lost: the run's supervisor process was killed"),
        (None, False, "stopped", "Not started. It was removed from the queue."),
        (None, True, "lost", "Lost: it was waiting in the queue when"),
        ({"started": 1.0, "end": "stopped", "exit_code": 0}, True, "lost", "Lost: it was waiting in the queue when"),
    ],
)
def test_what_a_run_is_after_it_has_left_the_queue(
    run: Run, monkeypatch: pytest.MonkeyPatch, before: Any, sigterm: bool, state: str, sentence: str
) -> None:
    monkeypatch.setenv(queue.FOLDER, str(run.path.parent.parent / "queue"))
    supervisor = Supervisor(run.path, False, StopTimeouts(), lock=-1)
    supervisor.state |= {"queued": 2.0}
    supervisor.turn, supervisor.state_before = queue.Turn(reason="x uses GPU 0."), before
    supervisor.sigterm_received = sigterm
    put(run, LOCK, "supervisor\n")
    put(run, LOG, "")
    supervisor._end_in_queue()
    assert run.state == state and run.summary()["sentence"].startswith(sentence)
