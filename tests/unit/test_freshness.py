"""Which files the last start has written, after the clock was set back and in copies of a run's folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from datetime import datetime
from pathlib import Path

import pytest

from backend.runs import ERROR, LOCK, PROGRESS, RANK_LOGS, RESULT, SPEC, STATE, SUPERVISOR, Plan, lock_file
from backend.runs.folder import Run
from backend.runs.freshness import BEFORE, file_versions
from backend.runs.rehearsals import ABOUT, FOLDER, delete_old
from backend.runs.scratch import STOP_SECONDS

FUTURE = 4_000_000_000.0  # in the year 2096


def make(root: Path, *argv: str) -> Run:
    return Run.create(root, "one", Plan(argv or ("true",), files={SPEC: ""}), datetime.now())


def write_error(folder: Path, launch: str, attempt: int, message: str, when: float) -> Path:
    """The error file of rank 0 in an attempt of a launch, at a time."""
    place = folder / RANK_LOGS / launch / f"attempt_{attempt}"
    (place / "0").mkdir(parents=True)
    (place / "0" / "stderr.log").touch()
    (place / "0" / ERROR).write_text(json.dumps({"message": f"Traceback (most recent call last):\n{message}"}))
    for path in (place / "0" / ERROR, place / "0", place, place.parent):
        os.utime(path, (when, when))
    return place


def record_start(run: Run, **state: object) -> None:
    """As a supervisor does."""
    (run.path / LOCK).write_text(f"{SUPERVISOR}\nid\n{run.path}\n")
    (run.path / STATE).write_text(json.dumps({"started": 1.0, BEFORE: file_versions(run.path), **state}))


def test_an_error_of_an_earlier_start_in_the_future_is_not_that_of_the_last(tmp_path: Path) -> None:
    """Before, the newest file counted: after the clock was set back, that of an earlier start."""
    run = make(tmp_path)
    write_error(run.path, "earlier", 0, "KeyError: 'earlier'", FUTURE)
    record_start(run, end="failed", ended=2.0, exit_code=1)
    last = write_error(run.path, "last", 0, "ValueError: the last one", 1.0)
    failure = run.failure()
    assert failure and "the last one" in failure["sentence"]
    assert run.rank_logs() == {0: (last / "0" / "stderr.log",)}


def test_an_error_of_an_earlier_start_of_one_process_in_the_future(tmp_path: Path) -> None:
    run = make(tmp_path)
    (run.path / ERROR).write_text(json.dumps({"message": "Traceback (most recent call last):\nKeyError: 'earlier'"}))
    os.utime(run.path / ERROR, (FUTURE, FUTURE))
    record_start(run, end="failed", ended=2.0, exit_code=3)
    failure = run.failure()
    assert failure and failure["sentence"] == "The launcher exited with code 3."


def test_the_last_attempt_of_a_start_is_the_one_with_the_largest_number(tmp_path: Path) -> None:
    run = make(tmp_path)
    record_start(run, end="failed", ended=2.0, exit_code=1)
    last = write_error(run.path, "last", 10, "ValueError: ten", 100.0)
    write_error(run.path, "last", 9, "ValueError: nine", FUTURE)
    assert run.rank_logs() == {0: (last / "0" / "stderr.log",)}
    failure = run.failure()
    assert failure and "ten" in failure["sentence"]


@pytest.mark.parametrize("copy", ["cp -a", "rsync -a"])
def test_a_copy_of_a_run_has_the_same_state(tmp_path: Path, copy: str) -> None:
    """Before, the result of an earlier start had another inode in a copy, so that a lost run was done."""
    if not shutil.which(copy.split()[0]):
        pytest.skip(f"{copy} is not installed")
    run = make(tmp_path / "runs")
    (run.path / RESULT).write_text("{}")
    (run.path / PROGRESS).write_text(json.dumps({"phase": "training", "step": 7}))
    record_start(run)
    assert (run.state, run.progress()) == ("lost", {})
    (tmp_path / "copies").mkdir()
    subprocess.run([*copy.split(), str(run.path), str(tmp_path / "copies")], check=True)
    copied = Run(tmp_path / "copies" / run.id)
    assert (copied.state, copied.progress()) == ("lost", {})


def test_a_start_by_run_sh_after_the_clock_was_set_back(tmp_path: Path) -> None:
    """The first start finishes, the second one fails. Before, its result was that of the first, from the future."""
    run = make(tmp_path, "sh", "-c", "test ! -e result.json && echo '{}' > result.json")
    script = ["bash", str(run.path / "run.sh")]
    assert subprocess.run(script, check=False, capture_output=True).returncode == 0
    assert run.state == "done"
    for name in (RESULT, LOCK):
        os.utime(run.path / name, (FUTURE, FUTURE))
    assert subprocess.run(script, check=False, capture_output=True).returncode == 1
    assert lock_file.read(run.path).files_before == {RESULT: [3, int(FUTURE) * 10**9]}
    assert (run.state, run.result()) == ("failed", {})


def test_the_lock_of_an_earlier_version_is_read() -> None:
    """run.sh of a run of an earlier version wrote no versions of files: then times decide."""
    assert lock_file.parse("shell\n17-3\n/runs/one\n") == lock_file.LockFile("shell", "17-3", "/runs/one", None)
    assert lock_file.parse("") == lock_file.LockFile()
    parsed = lock_file.parse("shell\n17-3\n/runs/one\nFiles before this start:\n\n")
    assert parsed.files_before == {}


def test_versions_with_an_inode_are_those_of_an_earlier_version(tmp_path: Path) -> None:
    run = make(tmp_path)
    (run.path / RESULT).write_text("{}")
    file = (run.path / RESULT).stat()
    record_start(run)
    (run.path / STATE).write_text(json.dumps({"started": 1.0, BEFORE: {RESULT: [5, file.st_size, file.st_mtime_ns]}}))
    assert run.state == "lost"


def test_a_rehearsal_that_is_being_created_is_kept_by_its_time(tmp_path: Path) -> None:
    """A time is right here: nothing but its age tells a rehearsal that is about to start from one whose process was
    killed before. A wrong clock only keeps the folder until the next rehearsal after its time."""
    new, left, future = (tmp_path / FOLDER / name for name in ("1", "2", "3"))
    for path, age in ((new, 0.0), (left, 2 * STOP_SECONDS), (future, -1e6)):
        path.mkdir(parents=True)
        (path / ABOUT).write_text("{}")
        when = datetime.now().timestamp() - age
        os.utime(path, (when, when))
    delete_old(tmp_path)
    assert [path.exists() for path in (new, left, future)] == [True, False, True]
