"""The follower of a cluster's job, with a cluster that gives prepared answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from backend.runs import JOB, LOCK, RESULT, STATE, STOP, follower
from backend.runs.follower import DONE, STOPPED, Cluster, ClusterError, Follower, Job


class Answers(Cluster):
    """A cluster whose answers about its jobs are prepared; without another one, it does not know the job."""

    name = "Slurm"

    def __init__(self, *answers: Job) -> None:
        self.answers = list(answers)
        self.calls: list[str] = []

    def submit(self, arguments: Sequence[str]) -> str:
        self.calls.append(" ".join(["submit", *arguments]))
        return "8"

    def find(self, job: str, max_age: float) -> Job | None:
        return self.answers.pop(0) if self.answers else None

    def cancel(self, job: str) -> None:
        self.calls.append(f"cancel {job}")


RUNS, WAITS, ENDS = Job("8", "RUNNING"), Job("8", "PENDING", waits=True), Job("8", "COMPLETED", end=DONE)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(follower, "POLL_SECONDS", 0)
    monkeypatch.setattr(follower.signal, "signal", lambda *_: None)
    (tmp_path / LOCK).write_text("supervisor\n")
    put(tmp_path, STATE, {"files_before": {}})
    return tmp_path


def put(folder: Path, name: str, value: Any) -> None:
    (folder / name).write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2.5", 2.5), ("3600", 3600), ("5s", None), ("0", None), ("-1", None), ("nan", None), ("inf", None)],
)
def test_an_interval_that_cannot_be_waited_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, text: str, seconds: float | None
) -> None:
    """It ended every command with a traceback, or the follower, whose job was canceled then."""
    monkeypatch.setenv(follower.POLL, text)
    assert follower.poll_seconds(text) == seconds
    assert Follower(folder, Answers(RUNS, ENDS)).follow([]) == 0
    assert (f"{follower.POLL} is {text!r}, but must be" in capsys.readouterr().out) == (seconds is None)


@pytest.mark.parametrize("arguments", [[], ["--from-scratch"]])
def test_a_restart_from_scratch_does_not_continue_an_earlier_job(folder: Path, arguments: list[str]) -> None:
    """The job goes on if the machine of its run was restarted. It would train on from its checkpoints."""
    put(folder, JOB, {"id": "7", "cluster": "Slurm", "ended": False})
    cluster = Answers(Job("7", "RUNNING"), Job("7", "CANCELLED", end=STOPPED), *([ENDS] if arguments else []))
    assert Follower(folder, cluster).follow(arguments) == 0
    assert cluster.calls == (["cancel 7", "submit --from-scratch"] if arguments else [])


@pytest.mark.parametrize("has_result", [False, True])
def test_a_job_that_its_cluster_has_forgotten(folder: Path, has_result: bool, capsys: Any) -> None:
    """Clusters forget jobs after a while, as when the follower could not ask for some minutes."""
    if has_result:
        put(folder, RESULT, {})
    assert Follower(folder, Answers(RUNS)).follow([]) == int(not has_result)
    assert ("how it ended is not known" in capsys.readouterr().out) != has_result


def test_an_answer_that_cannot_be_read_does_not_end_the_follower(folder: Path) -> None:
    """Such as the login page of a proxy. If the follower ended, its job would be canceled."""
    broken = Answers(RUNS, ENDS)
    find, pages = broken.find, [ValueError("<html>"), AttributeError("get"), KeyError("items")]

    def with_pages(job: str, max_age: float) -> Job | None:
        if pages:
            raise pages.pop()
        return find(job, max_age)

    broken.find = with_pages  # type: ignore[method-assign]
    followed = Follower(folder, broken)
    followed.job = RUNS
    assert followed._look(0) is None and "KeyError: 'items'" in followed.problem
    assert followed.follow([]) == 0 and not pages
    put(folder, JOB, {"id": "7", "cluster": "Slurm", "ended": False})
    pages.append(ValueError("<html>"))
    with pytest.raises(ClusterError, match="or of a proxy, cannot be read"):
        followed.follow([follower.FROM_SCRATCH])


def test_the_times_of_a_job(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits until 102, runs until 104, waits again until 105, and runs until its end."""
    clock = iter(range(100, 200))
    monkeypatch.setattr(follower.time, "time", lambda: float(next(clock)))
    followed = Follower(folder, Answers())
    seen = []
    for found in (WAITS, RUNS, RUNS, WAITS, WAITS, RUNS, ENDS):
        followed.cluster = Answers(found)
        followed._look(0)
        followed._record()
        seen.append(follower.running_times(follower.read(folder)))
    assert seen == [(0, 0), (100, 0), (100, 0), (0, 1), (0, 1), (102, 1), (102, 1)]
    assert follower.running_times({"began": "x", "ran": None}) == (0, 0)


@pytest.mark.parametrize(("starter", "canceled"), [("supervisor", True), ("shell", False)])
def test_only_a_supervisor_says_that_the_ranks_did_not_end_in_time(folder: Path, starter: str, canceled: bool) -> None:
    """With run.sh, state.json is that of an earlier start: the job still has to save its checkpoint."""
    (folder / LOCK).write_text(f"{starter}\n")
    put(folder, STATE, {"files_before": {}, "forced": "SIGTERM"})
    (folder / STOP).write_text("save")
    put(folder, JOB, {"id": "8", "cluster": "Slurm", "ended": False})
    cluster = Answers(RUNS, RUNS, ENDS)
    assert Follower(folder, cluster).follow([]) == 0
    assert cluster.calls == (["cancel 8"] if canceled else [])
