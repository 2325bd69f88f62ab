"""Runs as Ray jobs over two nodes: stopped with a checkpoint, resumed, started again after a failure, left by their
follower. Once with a stand-in for Ray, and in `make soak` with a real cluster on two simulated hosts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cluster_contract import (  # noqa: F401  the tests of every cluster
    check_failed_node,
    check_stop_and_resume,
    no_kept_answers,
    test_a_failed_rank_is_started_again_until_the_limit,
    test_a_killed_follower_ends_the_job,
    test_the_run_is_followed_again_after_its_supervisor_was_killed,
)
from cluster_runs import FULL, LONG, ON_TWO_NODES, SAVING, ClusterRun, followed
from ray_cluster import FakeCluster, RayCluster, fake_cluster, real_cluster
from training_runs import make_spec

from backend.machine import probe
from backend.preflight import Report, preflight
from backend.runs import RUN_MARKER


@pytest.fixture(scope="module", params=["fake", pytest.param("real", marks=pytest.mark.soak)])
def cluster(request: pytest.FixtureRequest, root: Path) -> Iterator[RayCluster]:
    make = {"fake": fake_cluster, "real": real_cluster}[request.param]
    with make(root / f"ray-{request.param}") as started, followed(started):
        yield started


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
    assert started.run.state in ("running", "done")
    check_stop_and_resume(started, alone, lambda: not cluster.unended())


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
    check_failed_node(start(SAVING), cluster, "the Ray cluster has 1 of that size")


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
def test_a_job_that_someone_stops_is_stopped(start, cluster) -> None:  # type: ignore[no-untyped-def]
    started = start(LONG)
    started.wait_for_step(1)
    cluster.stop_job(started.job["id"])
    assert started.wait("stopped", "failed") == "stopped", started.text
    assert "The Ray job was stopped." in started.run.summary()["sentence"]
    assert not started.processes()


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
    assert messages({"launch.nnodes": 3}, "warning")[0].startswith(
        "This run needs 3 nodes, but the Ray cluster has only 2 usable nodes"
    )
    assert messages({"ray.cpus": 9}, "error")[0].startswith("Each node would reserve 9 CPUs")
    assert "has no node with the resources fast" in messages({"ray.resources": ("fast=1",)}, "error")[0]
