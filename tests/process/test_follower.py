"""The supervisor and the follower of a Slurm job, with stand-ins for Slurm's commands: a machine that shuts down, a
stop that escalates, and a cluster that does not respond."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from waiting import wait_for

from backend import runs
from backend.runs import JOB_SCRIPT, LOG, SCRIPT, STOP, follower, replace_text
from backend.runs.folder import Run, StopTimeouts
from backend.runs.slurm import INTERRUPTED

MakeRun = Callable[..., Run]
PATIENT = StopTimeouts(before_training=60)
# The commands begin in the run's folder. Files next to them say what happened to the job, and how the cluster behaves.
COMMANDS = {
    "sbatch": "echo 7 | tee -a $here/submitted",
    "squeue": 'state=RUNNING; [ ! -e stop ] || [ -e $here/hangs ] || state=COMPLETED\n'
    '[ ! -e $here/pending ] || state=PENDING\n[ ! -e $here/canceled ] || state=CANCELLED\n'
    'echo "7|$state|None|N/A"',
    "scancel": "touch $here/canceled",
}  # fmt: skip


class Cluster:
    """The stand-in for Slurm, and a run that is its job."""

    def __init__(self, folder: Path, make_run: MakeRun) -> None:
        self.folder = folder
        folder.mkdir()
        for name, code in COMMANDS.items():
            note = f"here={folder}\necho {name} >> $here/calls\nif [ -e $here/silent ]; then exit 1; fi\n"
            (folder / name).write_text(f"#!/bin/sh\n{note}{code}\n")
            (folder / name).chmod(0o755)
        self.run = make_run("", "-m", "backend.runs.slurm")
        (self.run.path / JOB_SCRIPT).touch()

    def set(self, name: str) -> None:
        (self.folder / name).touch()

    def has(self, name: str) -> bool:
        return (self.folder / name).exists()

    def lines(self, name: str) -> list[str]:
        return (self.folder / name).read_text().split()

    def signal(self, number: signal.Signals, *names: str) -> None:
        """Send a signal to the supervisor (pid) or the follower (launcher)."""
        state = self.run._json("state.json")
        for name in names:
            os.kill(state[name], number)

    def wait_for(self, condition: Callable[[], object]) -> None:
        wait_for(condition, 60, lambda: (self.run.summary(), (self.run.path / LOG).read_text()))

    def wait_for_state(self, *states: str) -> str:
        self.wait_for(lambda: self.run.state in states)
        return self.run.state


@pytest.fixture
def cluster(tmp_path: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("FOOTPLATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(follower.POLL, "0.1")
    return Cluster(tmp_path / "bin", make_run)


def start(cluster: Cluster, **timeouts: float) -> None:
    cluster.run.start(timeouts=StopTimeouts(**timeouts))
    cluster.wait_for(lambda: cluster.run.job().get("state") == "RUNNING")


def wait_for_requests(cluster: Cluster) -> None:
    """Wait until the cluster was asked about the job again."""
    calls = len(cluster.lines("calls"))
    cluster.wait_for(lambda: len(cluster.lines("calls")) > calls + 2)


def follow_again_and_stop(cluster: Cluster) -> None:
    """The job is followed again, and ends because of the stop request."""
    wait_for_requests(cluster)
    assert cluster.run.job()["state"] == "RUNNING"
    assert cluster.lines("submitted") == ["7"] and not cluster.has("canceled")
    cluster.run.stop()
    assert cluster.wait_for_state("stopped", "failed", "done") == "stopped"
    assert not cluster.has("canceled") and cluster.run.job()["ended"], cluster.run._json("state.json")


def test_a_job_goes_on_when_the_machine_of_its_run_shuts_down(cluster: Cluster) -> None:
    """All processes get SIGTERM, in any order."""
    start(cluster)
    cluster.signal(signal.SIGTERM, "launcher")
    wait_for_requests(cluster)
    assert cluster.run.state in ("starting", "running") and not cluster.has("canceled")
    cluster.signal(signal.SIGTERM, "pid", "launcher")
    assert cluster.wait_for_state("lost", "stopped", "failed") == "lost"
    assert "Its job 7 may continue" in cluster.run.summary()["sentence"]
    cluster.run.resume(timeouts=PATIENT)
    follow_again_and_stop(cluster)


@pytest.mark.soak
def test_a_job_goes_on_when_the_machine_of_its_run_shuts_down_during_a_stop(cluster: Cluster) -> None:
    """The job may still be saving: only the supervisor's own request, after its timeout, cancels the job."""
    cluster.set("hangs")
    start(cluster, before_training=60)
    cluster.run.stop()
    cluster.signal(signal.SIGTERM, "launcher")
    wait_for_requests(cluster)
    assert cluster.run.state == "stopping" and not cluster.has("canceled")
    cluster.signal(signal.SIGTERM, "pid", "launcher")
    assert cluster.wait_for_state("lost", "stopped", "failed") == "lost"
    assert "Its job 7 may continue" in cluster.run.summary()["sentence"]
    cluster.run.resume(timeouts=PATIENT)
    (cluster.folder / "hangs").unlink()
    follow_again_and_stop(cluster)


def test_a_job_that_is_interrupted_before_training_begins_goes_on(cluster: Cluster) -> None:
    """There is no checkpoint to wait for, and yet the job comes back; a user's stop still cancels it."""
    cluster.set("hangs")
    start(cluster, before_training=0.2, sigterm=60)
    replace_text(cluster.run.path / STOP, f"save\n{INTERRUPTED}\n")  # by the job's scripts
    time.sleep(1)
    wait_for_requests(cluster)
    assert cluster.run.state == "stopping" and not cluster.has("canceled")
    assert INTERRUPTED in cluster.run.summary()["sentence"]
    cluster.set("pending")
    cluster.wait_for_state("queued")
    cluster.wait_for(lambda: not (cluster.run.path / STOP).exists())
    (cluster.folder / "pending").unlink()
    cluster.wait_for_state("starting")
    replace_text(cluster.run.path / STOP, f"save\n{INTERRUPTED}\n")
    wait_for_requests(cluster)
    cluster.run.stop()
    assert cluster.wait_for_state("stopped", "failed") == "stopped" and cluster.has("canceled")
    assert cluster.lines("submitted") == ["7"]


def test_sigterm_ends_a_follower_without_a_supervisor(cluster: Cluster) -> None:
    """The run was started from a shell."""
    shell = subprocess.Popen(["bash", cluster.run.path / SCRIPT], stdout=subprocess.DEVNULL)
    cluster.wait_for(lambda: cluster.run.job().get("state") == "RUNNING")
    shell.send_signal(signal.SIGTERM)
    assert shell.wait(60) == -signal.SIGTERM and not cluster.has("canceled")


def test_a_lost_run_waits_until_its_cluster_responds(cluster: Cluster) -> None:
    start(cluster)
    cluster.signal(signal.SIGKILL, "pid", "launcher")
    cluster.wait_for_state("lost")
    cluster.set("silent")
    cluster.run.resume(timeouts=PATIENT)
    cluster.wait_for(lambda: " has been unknown since " in cluster.run.summary()["sentence"])
    assert cluster.run.summary()["sentence"].endswith("the job is not affected. squeue: exit status 1.")
    (cluster.folder / "silent").unlink()
    follow_again_and_stop(cluster)


@pytest.mark.parametrize("silent", [pytest.param(False, marks=pytest.mark.soak), True])
def test_a_stop_that_escalates_cancels_the_job(cluster: Cluster, silent: bool) -> None:
    """If the cluster does not respond, it is asked again."""
    cluster.set("hangs")
    start(cluster, before_training=0.2, sigterm=60)
    if silent:
        cluster.set("silent")
    cluster.run.stop()
    cluster.wait_for(lambda: "scancel" in cluster.lines("calls"))
    if silent:
        assert cluster.run.state == "stopping" and not cluster.has("canceled")
        (cluster.folder / "silent").unlink()
    assert cluster.wait_for_state("stopped", "failed") == "stopped" and cluster.has("canceled")


@pytest.mark.soak
def test_a_lost_run_that_is_stopped_before_its_cluster_responds_submits_nothing(cluster: Cluster) -> None:
    cluster.set("hangs")
    start(cluster)
    cluster.signal(signal.SIGKILL, "pid", "launcher")
    cluster.wait_for_state("lost")
    cluster.set("silent")
    cluster.run.start(timeouts=StopTimeouts(before_training=0.2, sigterm=60))
    cluster.run.stop()
    cluster.wait_for(lambda: "scancel" in cluster.lines("calls"))
    (cluster.folder / "silent").unlink()
    assert cluster.wait_for_state("stopped", "failed") == "stopped"
    assert cluster.has("canceled") and cluster.lines("submitted") == ["7"]


def test_a_stop_that_cannot_be_written_cancels_the_job(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk without space for a file, and a stop without a checkpoint."""
    start(cluster)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(runs, "replace_text", full)
        patch.setattr(Path, "replace", full)
        cluster.run.stop(save=False)
    cluster.wait_for_state("stopped", "failed")
    assert cluster.has("canceled")
