"""Runs as jobs of a real Slurm cluster of two nodes: submitted, stopped with a checkpoint, resumed, interrupted by the
time limit and by a job of higher priority, left by their follower, and refused before they are submitted."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cluster_contract import (  # noqa: F401  the tests of every cluster
    check_stop_and_resume,
    no_kept_answers,
    test_a_killed_follower_ends_the_job,
    test_the_run_is_followed_again_after_its_supervisor_was_killed,
)
from cluster_runs import FULL, LONG, ON_TWO_NODES, SAVING, ClusterRun, followed, resumed
from slurm_cluster import SlurmCluster, slurm_cluster
from training_runs import (
    REORDERING_TOLERANCE,
    last_step,
    losses,
    make_spec,
    same_losses,
)

from backend.launch.clusters import answers
from backend.launch.clusters.slurm_options import parse
from backend.machine import probe
from backend.preflight import Report, preflight
from backend.runs import JOB, JOB_SCRIPT, slurm
from backend.runs.folder import RunError, StopTimeouts

ON_SLURM = {"launch.place": "slurm", **ON_TWO_NODES}


@pytest.fixture(scope="module")
def cluster(root: Path) -> Iterator[SlurmCluster]:
    with slurm_cluster(root / "slurm") as started, followed(started):
        yield started


def check(changes: Mapping[str, Any], python: str | Path = sys.executable) -> Report:
    machine = replace(probe(Path.cwd()), python=str(python))
    return preflight(make_spec({**ON_SLURM, **changes}), machine, Path.cwd())


class SlurmRun(ClusterRun):
    """A run that was started as a Slurm job. `partition`: what the partition has become between the check and the
    start. `python`: a stand-in for Python (fork_server.py)."""

    def __init__(
        self,
        root: Path,
        changes: Mapping[str, Any],
        partition: str = "main",
        timeouts: StopTimeouts | None = None,
        python: str | Path = sys.executable,
    ) -> None:
        report = check({"slurm.partition": "main", **changes}, python)
        assert report.can_run, report.findings
        script = report.plan.files[JOB_SCRIPT].replace("--partition=main", f"--partition={partition}")
        plan = replace(report.plan, files={**report.plan.files, JOB_SCRIPT: script})
        super().__init__(root, plan, "SLURM_SUBMIT_DIR", timeouts)

    def signal_batch_script(self, number: signal.Signals) -> None:
        scripts = [pid for pid, words in self.processes().items() if "slurm_script" in words]
        assert scripts
        for pid in scripts:
            os.kill(pid, number)


@pytest.fixture
def start(root: Path, cache: Path, cluster: SlurmCluster) -> Iterator[Callable[..., SlurmRun]]:
    runs: list[SlurmRun] = []

    def start_run(*arguments: Any, **more: Any) -> SlurmRun:
        runs.append(SlurmRun(root, *arguments, **more))
        return runs[-1]

    yield start_run
    for run in runs:
        run.end()
        run.wait_for(lambda: not cluster.unended())


def test_two_nodes_stop_with_a_checkpoint_and_resume(root, fork_server, start) -> None:  # type: ignore[no-untyped-def]
    """The losses of all steps, before and after the stop, are those of one process."""
    alone = fork_server.train(root / "alone", make_spec({**FULL, "train.per_device_train_batch_size": 4}))
    started = start(FULL, python=fork_server.python)
    started.wait_for_step(2)
    assert started.run.state in ("running", "done")
    check_stop_and_resume(started, alone, lambda: not slurm.jobs(max_age=0)[started.job["id"]].waits)


@pytest.mark.soak
@pytest.mark.parametrize("how", ["time limit", "preemption"])
def test_an_interrupted_job_saves_and_continues(how: str, start, cluster) -> None:  # type: ignore[no-untyped-def]
    """A time limit signals the batch script, a preemption all processes of the nodes, including DataLoader workers."""
    started = start({**LONG, "train.dataloader_num_workers": 1})
    run = started.run
    started.wait_for_step(3)
    if how == "time limit":  # what --signal=B:TERM@300 does
        started.signal_batch_script(signal.SIGTERM)
    else:
        cluster.command("sbatch", "--partition=urgent", "--nodes=2", "--output=/dev/null", "--wrap=sleep 4")
    started.wait("queued")
    assert "Waiting in Slurm's queue" in run.summary()["sentence"]
    saved = run.checkpoints()
    assert len(saved) == 1 and saved[0] >= 3
    started.wait("running")
    started.wait_for_step(saved[0] + 2)
    assert resumed(started) == saved
    assert started.job["id"] in cluster.unended()  # the same job
    run.stop()
    assert started.wait("stopped") == "stopped"
    assert run.summary()["sentence"].startswith(f"Stopped after step {run.checkpoints()[-1]}. Resume continues")


@pytest.mark.soak
@pytest.mark.parametrize("how", ["preemption", "requeue"])
@pytest.mark.parametrize("moment", ["set-up", "ranks"])
def test_a_job_that_is_interrupted_before_training_begins_continues(how, moment, start, cluster) -> None:  # type: ignore[no-untyped-def]
    """While the node's set-up runs, and while the ranks load their libraries: nothing is saved, and nothing fails."""
    started = start({**LONG, "slurm.setup": ("sleep 3",)})
    run, job = started.run, lambda: started.job.get("id", "")
    started.wait_for(lambda: bool(started.ranks() if moment == "ranks" else "sleep 3" in started.processes().values()))
    if how == "preemption":
        cluster.command("sbatch", "--partition=urgent", "--nodes=2", "--output=/dev/null", "--wrap=sleep 4")
    else:
        cluster.command("scontrol", "requeue", job())
    first = job()
    started.wait_for(lambda: run.state in ("queued", "done", "stopped", "failed", "lost"))
    assert run.state == "queued", started.text
    started.wait_for_step(max(run.checkpoints(), default=0) + 1)
    assert job() == first and run.state == "running", started.text
    run.stop()
    assert started.wait("stopped") == "stopped"
    assert run.checkpoints()


def test_a_waiting_job_says_why_and_can_be_stopped(start, cluster) -> None:  # type: ignore[no-untyped-def]
    other = cluster.command("sbatch", "--parsable", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 99")
    try:
        started = start(FULL)
        started.wait_for(lambda: "free nodes" in started.run.summary()["sentence"])
        assert started.run.state == "queued" and started.run.summary()["started"] is None
        started.run.stop()
        assert started.wait("stopped") == "stopped"
        assert started.job["state"] == "CANCELLED" and cluster.unended() == [other]
    finally:
        cluster.command("scancel", other)
    started.wait_for(lambda: not cluster.unended())


@pytest.mark.soak
def test_a_job_that_someone_cancels_is_stopped(start, cluster) -> None:  # type: ignore[no-untyped-def]
    started = start(LONG)
    started.wait_for_step(1)
    cluster.command("scancel", started.job["id"])
    assert started.wait("stopped", "failed") == "stopped", started.text
    assert "The Slurm job was canceled." in started.run.summary()["sentence"]


@pytest.mark.soak
def test_a_failed_rank_fails_the_run_with_its_traceback(start, cluster, tmp_path) -> None:  # type: ignore[no-untyped-def]
    started = start({**LONG, "slurm.setup": ("if [ $SLURM_NODEID = 1 ]; then export FOOTPLATE_NONE=1; fi",)})
    started.wait_for_step(1)
    os.kill(started.ranks()[0], signal.SIGKILL)
    assert started.wait("failed") == "failed"
    assert "SIGKILL" in started.run.summary()["sentence"]
    assert not cluster.unended()


@pytest.mark.soak
def test_a_job_in_a_container(start, cluster, tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """With a stand-in for Apptainer that notes its arguments and starts the command outside of a container."""
    (tmp_path / "apptainer").write_text(f'#!/bin/bash\necho "$*" >> {tmp_path}/calls\nexec "${{@:9}}"\n')
    (tmp_path / "apptainer").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    image = {"slurm.container": "/images/footplate.sif", "slurm.container_mounts": ("/data",)}
    started = start({**LONG, **image, "slurm.container_python": sys.executable})
    started.wait_for_step(2)
    started.run.stop()
    assert started.wait("stopped", "failed") == "stopped", started.text
    assert started.run.checkpoints() and not started.processes()
    calls = (tmp_path / "calls").read_text().splitlines()
    folder = started.run.path
    assert len(calls) == 2, "one on each node"
    begin = f"exec --bind {folder} --bind /data --pwd {folder} /images/footplate.sif {sys.executable} -m torch"
    assert all(call.startswith(begin) for call in calls), calls


def test_what_slurm_would_refuse_is_found_before_start(cluster) -> None:  # type: ignore[no-untyped-def]
    def problem(changes: Mapping[str, Any]) -> str:
        found = [finding.message for finding in check(changes).findings if finding.code == "CLU001"]
        return found[0] if found else ""

    assert problem({}) == ""
    assert problem({"slurm.partition": "gpu"}).startswith("Slurm has no partition gpu. It has main, urgent.")
    assert "node" in problem({"launch.nnodes": 3}).lower()
    assert problem({"slurm.constraint": "a100|h100"}) == ""
    assert problem({"slurm.extra": ("--comment 'for the team'",)}) == ""
    assert "feature" in problem({"slurm.constraint": "v100|h100"}).lower()
    assert "reservation" in problem({"slurm.extra": ("--reservation team",)}).lower()
    assert "memory" in problem({"slurm.memory_gib": 100}).lower() or "node" in problem({"slurm.memory_gib": 100})
    assert problem({"slurm.partition": "urgent", "slurm.time_limit": "2:00:00"}).startswith(
        "The partition urgent allows 1:00:00, and the job requests 2:00:00."
    )


@pytest.mark.soak
def test_a_controller_that_does_not_respond_is_named(start, cluster) -> None:  # type: ignore[no-untyped-def]
    started = start(LONG)
    started.wait_for_step(1)
    with cluster.without_controller():
        answers.forget()
        messages = [finding.message for finding in check(LONG).findings if finding.code == "CLU001"]
        assert messages and "sinfo" in messages[0]
        started.wait_for(lambda: " has been unknown since " in started.run.summary()["sentence"])
    started.wait_for(lambda: "Slurm has not" not in started.run.summary()["sentence"])
    assert started.run.state == "running"
    assert (started.run.path / JOB).exists()


@pytest.mark.soak
def test_a_job_is_canceled_once_the_controller_responds_again(start, cluster) -> None:  # type: ignore[no-untyped-def]
    started = start(LONG, timeouts=StopTimeouts(save=1))
    started.wait_for_step(1)
    for rank in started.ranks():
        os.kill(rank, signal.SIGSTOP)  # they do not see the stop request
    with cluster.without_controller():
        started.run.stop()
        started.wait_for(lambda: "forced" in started.run._json("state.json"))
        started.wait_for(lambda: started.job["silent_since"])
        assert started.run.state == "stopping" and len(started.ranks()) == 2
    assert started.wait("stopped", "failed") == "stopped", started.text
    assert started.job["state"] == "CANCELLED" and not cluster.unended()


@pytest.mark.soak
def test_a_run_continues_after_a_node_failed(start, cluster) -> None:  # type: ignore[no-untyped-def]
    """Slurm puts the job back into the queue, and the run continues from the last complete checkpoint."""
    started = start(SAVING)
    started.wait_for_step(5)
    cluster.command("scontrol", "update", "nodename=n1", "state=down", "reason=test")
    started.wait("queued", seconds=60)
    started.wait_for(lambda: resumed(started) != [])
    assert all(step >= 4 for step in resumed(started))


@pytest.mark.soak
def test_a_job_that_is_refused_after_the_check_says_why(start) -> None:  # type: ignore[no-untyped-def]
    started = start(FULL, "removed")
    assert started.wait("failed", "done") == "failed"
    assert "invalid partition" in started.run.summary()["sentence"].lower()


def test_extra_options_are_read_as_sbatch_reads_them(cluster: SlurmCluster, tmp_path: Path) -> None:
    """In every way to write them; the later one of two wins."""
    lines = ("--nodes=1 --ntasks-per-n=1", "-HN2 -t 5", "--comment '-n 7' --ntasks-per-node 2", "--wrap=hostname")
    script = tmp_path / "job.sh"
    script.write_text("\n".join(["#!/bin/bash", *(f"#SBATCH {line}" for line in lines), "true"]))
    job = cluster.command("sbatch", "--parsable", f"--chdir={tmp_path}", str(script)).strip()
    shown = cluster.command("scontrol", "show", "job", job)
    cluster.command("scancel", job)
    last = {option.name: option.value for option in parse(lines)}
    assert last == {
        "nodes": "2", "ntasks-per-node": "2", "hold": "", "time": "5", "comment": "-n 7", "wrap": "hostname",
    }  # fmt: skip
    for part in ("NumNodes=2-2", "NumTasks=4", "TimeLimit=00:05:00", "Comment=-n 7", "Reason=JobHeldUser"):
        assert part in shown, shown
    assert f"Command={script}" in shown, "wrap is ignored"


EVENTS = ("preemption", "requeue", "time limit", "controller", "followers killed", "stop")


@pytest.mark.soak
def test_random_scheduler_events(root, fork_server, start, cluster) -> None:  # type: ignore[no-untyped-def]
    """At random moments, even before training begins: no point is lost or counted twice, the losses are those of one
    process, and only a user's stop ends the run. FOOTPLATE_FAULTS and FOOTPLATE_FAULT_SEED as in test_faults.py."""
    seed = int(os.environ.get("FOOTPLATE_FAULT_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
    count = int(os.environ.get("FOOTPLATE_FAULTS", "6"))
    print(f"FOOTPLATE_FAULT_SEED={seed}")
    choice = random.Random(seed)
    alone = fork_server.train(root / "events-alone", make_spec({**FULL, "train.per_device_train_batch_size": 4}))
    expected, counts = losses(alone), Counter[str]()
    events = [choice.choice(EVENTS) for _ in range(count)]
    while events:
        started = start({**FULL, "slurm.setup": ("sleep 1",)})
        while events and started.run.state != "done":
            event = events.pop()
            wait_for_a_moment(started, choice)
            if started.run.state == "done":
                events.append(event)
                break
            inject(event, started, cluster)
            counts[event] += 1
            print(f"{sum(counts.values())} {event}: {started.run.state}", flush=True)
        assert started.wait("done", "stopped", "failed", "lost", seconds=600) == "done", started.text
        assert losses(started.run.path) == same_losses(expected, REORDERING_TOLERANCE)
        assert not started.processes() and not cluster.unended()
    print(dict(counts))


def wait_for_a_moment(started: SlurmRun, choice: random.Random) -> None:
    """Some steps after the last point, or at any time after the job has started."""
    run = started.run
    if choice.random() < 0.6:
        step = last_step(run.path) + choice.randrange(1, 6)
        started.wait_for(lambda: last_step(run.path) >= step or run.state == "done")
    else:
        started.wait_for(lambda: started.job.get("state") == "RUNNING" or run.state == "done")
        time.sleep(choice.random() * 4)


def inject(event: str, started: SlurmRun, cluster: SlurmCluster) -> None:
    """One event; afterwards the run is alive, or done."""
    run, job = started.run, started.job.get("id", "")
    if event == "preemption":
        cluster.command("sbatch", "--partition=urgent", "--nodes=2", "--output=/dev/null", "--wrap=sleep 2")
    elif event == "requeue" and job in cluster.unended():
        subprocess.run(["scontrol", "requeue", job], check=False, capture_output=True)  # it may have ended meanwhile
    elif event == "time limit":
        with suppress(AssertionError, ProcessLookupError):
            started.signal_batch_script(signal.SIGTERM)
    elif event == "controller":
        with cluster.without_controller():
            time.sleep(1)
    elif event == "followers killed":
        state = run._json("state.json")
        for pid in (state["pid"], state["launcher"]):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        started.wait("lost", "done")
    elif event == "stop":
        with suppress(RunError):
            run.stop()
        assert started.wait("stopped", "done") in ("stopped", "done"), started.text
    if run.state in ("lost", "stopped"):
        run.resume()
    assert run.state in ("queued", "starting", "running", "stopping", "done"), started.text
