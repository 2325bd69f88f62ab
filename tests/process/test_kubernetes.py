"""Runs as Kubernetes jobs over two nodes, with a stand-in for the cluster: stopped with a checkpoint, resumed, evicted,
started again after a failure, left by their follower."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
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
from cluster_runs import FULL, LONG, ON_TWO_NODES, SAVING, ClusterRun, followed, resumed
from kubernetes_cluster import PYTHON, FakeKubernetes, fake_kubernetes
from training_runs import last_step, make_spec

from backend.launch.clusters import answers
from backend.machine import probe
from backend.preflight import Report, preflight


@pytest.fixture(scope="module")
def cluster(root: Path) -> Iterator[FakeKubernetes]:
    with fake_kubernetes(root / "kubernetes") as started, followed(started):
        yield started


def check(changes: Mapping[str, Any]) -> Report:
    pod = {
        "kubernetes.image": "footplate:test",
        "kubernetes.volumes": (f"runs={tempfile.gettempdir()}",),
        "kubernetes.python": PYTHON,
    }
    spec = make_spec({"launch.place": "kubernetes", **pod, "kubernetes.cpus": 1, **ON_TWO_NODES, **changes})
    return preflight(spec, probe(Path.cwd()), Path.cwd())


@pytest.fixture
def start(root: Path, cache: Path, cluster: FakeKubernetes) -> Iterator[Callable[..., ClusterRun]]:
    runs: list[ClusterRun] = []

    def start_run(changes: Mapping[str, Any]) -> ClusterRun:
        report = check(changes)
        assert report.can_run, report.findings
        # The processes of a pod have the file of their node in the run's folder as a mark.
        runs.append(ClusterRun(root, report.plan, "FOOTPLATE_RUN"))
        return runs[-1]

    yield start_run
    for run in runs:
        run.end()
        run.wait_for(lambda: not cluster.unended())


@pytest.mark.soak
def test_two_nodes_stop_with_a_checkpoint_and_resume(root, fork_server, start, cluster) -> None:  # type: ignore[no-untyped-def]
    """The losses of all steps, before and after the stop, are those of one process."""
    alone = fork_server.train(root / "alone", make_spec({**FULL, "train.per_device_train_batch_size": 4}))
    unused = {"parallel.ddp_find_unused_parameters": True}  # torch warns on both ranks that there are none
    started = start({**FULL, **unused, "kubernetes.python": str(fork_server.python)})
    check_stop_and_resume(started, alone, lambda: not cluster.unended())
    text = (started.run.path / "log.txt").read_text()
    assert "[default0]:" in text and "[default1]:" in text, "the lines of both nodes"


def test_a_waiting_job_says_why_and_can_be_stopped(start, cluster) -> None:  # type: ignore[no-untyped-def]
    with cluster.occupied():
        started = start(FULL)
        started.wait_for(lambda: "1 Insufficient cpu." in started.run.summary()["sentence"])
        assert started.run.state == "queued"
        started.run.stop()
        assert started.wait("stopped") == "stopped"
        assert not started.processes()
    name = started.job["id"].split("/")[1]
    assert name not in cluster.jobs and name not in cluster.services


@pytest.mark.soak
def test_an_evicted_pod_saves_and_the_run_continues(start, cluster) -> None:  # type: ignore[no-untyped-def]
    started = start(LONG)
    started.wait_for_step(3)
    cluster.evict(1)
    started.wait_for(lambda: resumed(started) != [])
    saved = resumed(started)[0]
    assert started.run.checkpoints() == [saved] and saved >= 3
    started.wait_for_step(saved + 2)
    assert started.run.state == "running", started.text
    started.run.stop()
    assert started.wait("stopped", "failed") == "stopped", started.text


@pytest.mark.soak
def test_a_pod_that_is_evicted_before_training_begins_comes_back(start, cluster) -> None:  # type: ignore[no-untyped-def]
    started = start(LONG)
    started.wait_for(lambda: len(started.ranks()) == 2)
    assert started.run.state == "starting"
    job = started.job["id"]
    cluster.evict(1)
    started.wait_for_step(max(started.run.checkpoints(), default=0) + 3)
    assert started.job["id"] == job and started.run.state == "running", started.text
    assert (started.run.path / "kubernetes-nodes" / job.split("/")[1] / "ended-0").read_text() == "interrupted"
    started.run.stop()
    assert started.wait("stopped", "failed") == "stopped", started.text


@pytest.mark.soak
def test_a_run_continues_after_a_node_failed(start, cluster) -> None:  # type: ignore[no-untyped-def]
    """It waits for a node, and continues from the last complete checkpoint."""
    check_failed_node(start(SAVING), cluster, "")


@pytest.mark.soak
def test_a_job_that_someone_deletes_saves_and_is_stopped(start, cluster) -> None:  # type: ignore[no-untyped-def]
    started = start(LONG)
    started.wait_for_step(1)
    cluster.delete_job(started.job["id"].split("/")[1])
    assert started.wait("stopped", "failed") == "stopped", started.text
    assert "The Kubernetes job was deleted." in started.run.summary()["sentence"]
    assert started.run.checkpoints() == [last_step(started.run.path)]
    assert not started.processes()


@pytest.mark.soak
def test_a_suspended_job_saves_and_continues(start, cluster) -> None:  # type: ignore[no-untyped-def]
    """As Kueue preempts a job, and admits it again."""
    started = start({**LONG, "kubernetes.queue": "research"})
    name = ""

    def submitted() -> bool:
        nonlocal name
        name = started.job.get("id", "/").split("/")[1]
        return "Kueue has not started it from the queue research yet." in started.run.summary()["sentence"]

    started.wait_for(submitted)
    cluster.suspend(name, False)
    started.wait_for_step(2)
    cluster.suspend(name, True)
    started.wait("queued")
    cluster.suspend(name, False)
    started.wait_for(lambda: resumed(started) != [])
    assert resumed(started) == started.run.checkpoints()


@pytest.mark.soak
def test_a_train_job_of_kubeflow(start, cluster) -> None:  # type: ignore[no-untyped-def]
    started = start({**LONG, "kubernetes.kubeflow_runtime": "torch-distributed"})
    started.wait_for_step(2)
    assert re.fullmatch(r"team/footplate-job-\w{8}/TrainJob", started.job["id"])
    cluster.evict(0)
    started.wait_for(lambda: resumed(started) != [])
    started.run.stop()
    assert started.wait("stopped", "failed") == "stopped", started.text
    assert not started.processes()


def test_a_pod_without_the_run_folder_says_so(start, cluster, tmp_path) -> None:  # type: ignore[no-untyped-def]
    started = start({**FULL, "kubernetes.volumes": ("runs=/elsewhere",)})
    assert started.wait("failed", "done") == "failed"
    assert "is in none of kubernetes.volumes" in started.run.summary()["sentence"], started.text


def test_what_the_cluster_refuses_is_found_before_start(cluster) -> None:  # type: ignore[no-untyped-def]
    def messages(changes: Mapping[str, Any], level: str = "error") -> list[str]:
        answers.forget()
        found = check(changes).findings
        return [finding.message for finding in found if finding.code.startswith("CLU") and finding.level == level]

    assert not messages({}) and not messages({}, "warning")
    assert messages({"launch.nnodes": 3}, "warning")[0].startswith(
        "This run needs 3 nodes, but the Kubernetes cluster has only 2 usable nodes"
    )
    assert messages({"kubernetes.cpus": 9})[0].startswith("Each pod would request 9 CPUs")
    assert "no node with the labels gpu=h100" in messages({"kubernetes.node_labels": ("gpu=h100",)})[0]
    assert messages({"kubernetes.image": ""})[0].startswith("The Kubernetes job has no image. Set kubernetes.image")
    assert "strict decoding error" in messages({"kubernetes.extra_pod_spec": '{"hostNetwrk": true}'})[0]
    assert not messages({"kubernetes.extra_pod_spec": '{"hostNetwork": true}'})
    cluster.refusals["jobs"] = (403, 'jobs.batch is forbidden: User "me" cannot create resource "jobs"')
    assert 'User "me" cannot create resource "jobs".' in messages({})[0]
    cluster.refusals.clear()
    cluster.refusals["nodes"] = (403, "nodes is forbidden")
    assert messages({"launch.device": "cpu"}) == []
    assert "GPUs of a type" in messages({"launch.device": "cuda"})[0]
    cluster.refusals.clear()
