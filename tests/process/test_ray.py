"""Runs as Ray jobs over two nodes: stopped with a checkpoint, resumed, started again after a failure, left by their
follower. Once with a stand-in for Ray, and in `make soak` with a real cluster on two simulated hosts."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cluster_runs import FULL, LONG, ON_TWO_NODES, ClusterRun
from ray_cluster import FakeCluster, RayCluster, fake_cluster, real_cluster
from training_runs import (
    REORDERING_TOLERANCE,
    last_step,
    losses,
    make_spec,
    read_metrics,
    same_losses,
)

from backend.launch.clusters import answers
from backend.machine import probe
from backend.preflight import Report, preflight
from backend.runs import RUN_MARKER, follower

SAVING = {**LONG, "save.strategy": "steps", "save.steps": 2}


@pytest.fixture(scope="module", params=["fake", pytest.param("real", marks=pytest.mark.soak)])
def cluster(request: pytest.FixtureRequest, root: Path) -> Iterator[RayCluster]:
    make = {"fake": fake_cluster, "real": real_cluster}[request.param]
    with pytest.MonkeyPatch.context() as patch, make(root / f"ray-{request.param}") as started:
        for name, value in started.environment.items():
            patch.setenv(name, value)
        patch.setenv(follower.POLL, "0.3")
        yield started


@pytest.fixture(autouse=True)
def no_kept_answers() -> None:
    answers.forget()


def check(cluster: RayCluster, changes: Mapping[str, Any], python: str | Path = sys.executable) -> Report:
    """The checks of a run whose nodes have this Python."""
    spec = make_spec({"launch.place": "ray", "ray.cpus": 1, "ray.python": cluster.python, **ON_TWO_NODES, **changes})
    return preflight(spec, replace(probe(Path.cwd()), python=str(python)), Path.cwd())


@pytest.fixture
def start(root: Path, cache: Path, cluster: RayCluster) -> Iterator[Callable[..., ClusterRun]]:
    runs: list[ClusterRun] = []

    def start_run(changes: Mapping[str, Any], python: str | Path = sys.executable) -> ClusterRun:
        report = check(cluster, changes, python)
        assert report.can_run, report.findings
        runs.append(ClusterRun(root, report.plan, RUN_MARKER))
        return runs[-1]

    yield start_run
    for run in runs:
        run.end()
        run.wait_for(lambda: not cluster.unended())
        assert not list((run.run.path / "ray-nodes").glob("*"))


@pytest.mark.soak
def test_two_nodes_stop_with_a_checkpoint_and_resume(root, fork_server, start, cluster) -> None:  # type: ignore[no-untyped-def]
    """The losses of all steps, before and after the stop, are those of one process."""
    name = f"alone-{type(cluster).__name__}"
    alone = fork_server.train(root / name, make_spec({**FULL, "train.per_device_train_batch_size": 4}))
    # The fork server's processes run on this host, outside the networks of a real cluster's nodes.
    started = start(FULL, fork_server.python if isinstance(cluster, FakeCluster) else sys.executable)
    started.wait_for_step(2)
    run = started.run
    assert run.state in ("running", "done")
    assert len(started.ranks()) == 2
    run.stop()
    assert started.wait("stopped", "done") == "stopped", started.text
    saved = run.checkpoints()
    assert len(saved) == 1 and saved[0] == last_step(run.path) < 60
    assert not started.processes() and not cluster.unended()
    first = started.job["id"]
    run.resume()
    started.wait("done")
    assert started.job["id"] != first
    assert [p["step"] for p in read_metrics(run.path) if p.get("event") == "resumed"] == saved
    assert losses(run.path) == same_losses(losses(alone), REORDERING_TOLERANCE)
    assert run.result()["ranks"][1]["backend"] == "gloo"


def test_a_waiting_job_says_why_and_can_be_stopped(start, cluster) -> None:  # type: ignore[no-untyped-def]
    with cluster.occupied():
        started = start({**FULL, "ray.cpus": 2})
        started.wait_for(lambda: "Waiting for 2 nodes with 2 CPUs each" in started.run.summary()["sentence"])
        assert started.run.state == "queued" and "which other Ray jobs use" in started.run.summary()["sentence"]
        started.run.stop()
        assert started.wait("stopped") == "stopped"
        assert not started.processes()


@pytest.mark.soak
def test_a_run_continues_after_a_node_failed(start, cluster) -> None:  # type: ignore[no-untyped-def]
    """It waits for a node, and continues from the last complete checkpoint."""
    started = start(SAVING)
    run = started.run
    started.wait_for_step(5)
    cluster.lose_node()
    started.wait("queued", seconds=120)
    assert "the Ray cluster has 1 of that size" in run.summary()["sentence"]
    before = last_step(run.path)
    cluster.restore_node()
    started.wait_for(lambda: any(p.get("event") == "resumed" for p in read_metrics(run.path)))
    assert all(4 <= p["step"] <= before for p in read_metrics(run.path) if p.get("event") == "resumed")
    started.wait_for_step(before + 2)


@pytest.mark.soak
def test_a_run_whose_node_failed_before_training_began_continues(start, cluster) -> None:  # type: ignore[no-untyped-def]
    started = start(SAVING)
    started.wait_for(lambda: len(started.ranks()) == 2)
    assert started.run.state == "starting"
    cluster.lose_node()
    started.wait("queued", seconds=120)
    cluster.restore_node()
    started.wait_for_step(3)
    assert started.run.state == "running", started.text


@pytest.mark.soak
def test_a_failed_rank_is_started_again_until_the_limit(start, cluster) -> None:  # type: ignore[no-untyped-def]
    started = start({**SAVING, "launch.max_restarts": 1})
    started.wait_for_step(3)
    first = started.ranks()
    os.kill(first[0], signal.SIGKILL)
    started.wait_for(lambda: any(p.get("event") == "resumed" for p in read_metrics(started.run.path)))
    second = started.ranks()
    assert len(second) == 2 and not set(first) & set(second)
    os.kill(second[0], signal.SIGKILL)
    assert started.wait("failed") == "failed"
    assert "SIGKILL" in started.run.summary()["sentence"], started.text


@pytest.mark.soak
def test_a_job_that_someone_stops_is_stopped(start, cluster) -> None:  # type: ignore[no-untyped-def]
    started = start(LONG)
    started.wait_for_step(1)
    cluster.stop_job(started.job["id"])
    assert started.wait("stopped", "failed") == "stopped", started.text
    assert "The Ray job was stopped." in started.run.summary()["sentence"]
    assert not started.processes()


@pytest.mark.soak
def test_the_run_is_followed_again_after_its_supervisor_was_killed(start, cluster) -> None:  # type: ignore[no-untyped-def]
    started = start(LONG)
    run = started.run
    started.wait_for_step(1)
    job = started.job["id"]
    state = run._json("state.json")
    for pid in (state["pid"], state["launcher"]):
        os.kill(pid, signal.SIGKILL)
    started.wait("lost")
    assert f"Its job {job} may continue" in run.summary()["sentence"]
    run.resume()
    started.wait_for_step(last_step(run.path) + 2)
    assert cluster.unended() == [job], "not submitted again"
    assert not [p for p in read_metrics(run.path) if "event" in p]


@pytest.mark.soak
def test_a_killed_follower_ends_the_job(start, cluster) -> None:  # type: ignore[no-untyped-def]
    started = start(LONG)
    started.wait_for_step(1)
    os.kill(started.run._json("state.json")["launcher"], signal.SIGKILL)
    assert started.wait("failed") == "failed"
    assert not cluster.unended() and not started.processes()


def test_a_job_without_ray_says_so(start) -> None:  # type: ignore[no-untyped-def]
    started = start({**FULL, "ray.python": "/nowhere/python"})
    assert started.wait("failed", "done") == "failed"
    sentence = started.run.summary()["sentence"]
    assert "/nowhere/python" in sentence and "ray.python" in sentence, started.text


def test_what_the_cluster_lacks_is_found_before_start(cluster) -> None:  # type: ignore[no-untyped-def]
    def messages(changes: Mapping[str, Any], level: str) -> list[str]:
        found = check(cluster, changes).findings
        return [finding.message for finding in found if finding.code.startswith("CLU") and finding.level == level]

    assert not messages({}, "error") and not messages({}, "warning")
    assert messages({"launch.nnodes": 3}, "warning")[0].startswith("This run needs 3 nodes, and the Ray cluster has 2")
    assert messages({"ray.cpus": 9}, "error")[0].startswith("Each node would reserve 9 CPUs")
    assert "has no node with the resources fast" in messages({"ray.resources": ("fast=1",)}, "error")[0]
