"""A run on a disk that takes no more data or files: its log is complete afterwards, and it can be stopped. The process
that writes the log may be killed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import pytest
from log_writers import log_writers
from small_disk import fill, mounted, use_inodes
from waiting import wait_for

from backend.runs import LOG, Plan, log_writer, processes
from backend.runs.folder import Run

# As torchrun's thread: nothing is written after the first write that fails. It waits for the test twice.
PRINTS = """
import os, time
for number in range(3000):
    print(f"line {number:050d}", flush=True)
    if number in (1000, 2000):
        open(f"at-{number}", "w").close()
        while not os.path.exists(f"after-{number}"):
            time.sleep(0.01)
"""
STOPS = """
import json, os, time
open("progress.json", "w").write(json.dumps({"phase": "training", "step": 3}))
while not os.path.exists("stop"): time.sleep(0.02)
print("saved", open("stop").read())
"""
NOW = datetime(2026, 11, 21, 9, 5, 12)
LINES = [f"line {number:050d}" for number in range(3000)]


def lines(run: Run) -> list[str]:
    return [line for line in (run.path / LOG).read_text().splitlines() if line.startswith("line ")]


@pytest.fixture
def start() -> Iterator[Callable[[Path], Run]]:
    """A run that has printed 1001 lines."""
    runs: list[Run] = []

    def start_run(folder: Path) -> Run:
        plan = Plan((sys.executable, "child.py"), {}, {"child.py": PRINTS})
        runs.append(Run.create(folder / "runs", "try", plan, datetime.now()))
        runs[0].start()
        wait_for(lambda: len(lines(runs[0])) == 1001)
        return runs[0]

    yield start_run
    processes.terminate(runs[0].path, sigterm_seconds=0)
    wait_for(lambda: not processes.is_locked(runs[0].path) and not log_writers(runs[0]))


def go_on(run: Run, *numbers: int) -> None:
    for number in numbers:
        (run.path / f"after-{number}").touch()


def wait_until_done(run: Run) -> None:
    wait_for(lambda: not processes.is_locked(run.path))
    assert run.state == "done", (run.path / LOG).read_text()[-2000:]


def test_lines_that_were_printed_on_a_full_disk_are_in_the_log(small_disk: Path, start: Callable[[Path], Run]) -> None:
    run = start(small_disk)
    filler = fill(small_disk)
    go_on(run, 1000)
    wait_for((run.path / "at-2000").exists)
    assert run.state in ("starting", "running") and len(lines(run)) < 1100
    filler.unlink()
    go_on(run, 2000)
    wait_until_done(run)
    assert lines(run) == LINES


def test_the_log_goes_on_after_its_writer_was_killed(tmp_path: Path, start: Callable[[Path], Run]) -> None:
    run = start(tmp_path)
    (writer,) = log_writers(run)
    os.kill(writer, signal.SIGKILL)
    go_on(run, 1000, 2000)
    wait_until_done(run)
    assert lines(run) == LINES


def test_the_log_goes_on_without_the_supervisor(tmp_path: Path, start: Callable[[Path], Run]) -> None:
    run = start(tmp_path)
    os.kill(run._json("state.json")["pid"], signal.SIGKILL)
    go_on(run, 1000, 2000)
    wait_for(lambda: not processes.run_processes(run.path) and not log_writers(run))
    assert lines(run) == LINES


@pytest.mark.parametrize("save", [True, False])
def test_a_run_without_free_inodes_says_so_and_can_be_stopped(tmp_path: Path, save: bool) -> None:
    """No file can be created, not even an empty one; files that are there can be written and renamed."""
    with mounted(tmp_path / "disk", "size=64m,nr_inodes=200") as disk:
        run = Run.create(disk / "runs", "try", Plan((sys.executable, "child.py"), {}, {"child.py": STOPS}), NOW)
        run.start()
        wait_for(lambda: run.state == "running")
        use_inodes(disk)
        sentence = run.summary()["sentence"]
        assert sentence.startswith("Running, but the disk of the run's folder has no free inodes"), sentence
        run.stop(save)
        wait_for(lambda: not processes.is_locked(run.path))
        assert run.state == "stopped" and run._json("state.json")["end"] == "stopped"
        assert f"saved {'save' if save else 'discard'}" in (run.path / LOG).read_text()


def test_output_beyond_the_limit_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_writer, "KEPT_BYTES", 10)
    full = os.open("/dev/full", os.O_WRONLY)
    log = log_writer.Log(full)
    log.add(b"12345678")
    log.add(b"90abc")
    assert not log.flush()
    log.file = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    log.add(b"")
    for file in (full, log.file):
        os.close(file)
    expected = "1234567890\n3 bytes of output are missing here: the disk was full.\n"
    assert (tmp_path / "log").read_text() == expected
