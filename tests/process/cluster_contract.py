"""Tests of every kind of cluster. The test modules of Slurm, Ray and Kubernetes import them, and have the fixtures
`cluster`, whose `unended()` has the ids of jobs that have not ended, and `start`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster_runs import LONG, SAVING, ClusterRun, resumed
from training_runs import REORDERING_TOLERANCE, last_step, losses, read_metrics, same_losses

from backend.launch.clusters import answers


@pytest.fixture(autouse=True)
def no_kept_answers() -> None:
    answers.forget()


def check_stop_and_resume(started: ClusterRun, alone: Path, has_ended: Callable[[], bool]) -> None:
    """Stopped with a checkpoint and resumed on two nodes: the losses of all steps are those of one process."""
    started.wait_for_step(2)
    run = started.run
    assert len(started.ranks()) == 2
    run.stop()
    assert started.wait("stopped", "done") == "stopped", started.text
    saved = run.checkpoints()
    assert len(saved) == 1 and saved[0] == last_step(run.path) < 60
    assert not started.processes() and has_ended()
    first = started.job["id"]
    run.resume()
    started.wait("done")
    assert started.job["id"] != first
    assert resumed(started) == saved
    assert losses(run.path) == same_losses(losses(alone), REORDERING_TOLERANCE)
    assert run.result()["ranks"][1]["backend"] == "gloo"


def check_failed_node(started: ClusterRun, cluster: Any, sentence: str) -> None:
    """It waits for a node, with this sentence, and continues from the last complete checkpoint."""
    started.wait_for_step(5)
    cluster.lose_node()
    started.wait("queued", seconds=120)
    assert sentence in started.run.summary()["sentence"]
    before = last_step(started.run.path)
    cluster.restore_node()
    started.wait_for(lambda: resumed(started) != [])
    assert all(4 <= step <= before for step in resumed(started))
    started.wait_for_step(before + 2)


@pytest.mark.soak
def test_a_failed_rank_is_started_again_until_the_limit(start) -> None:  # type: ignore[no-untyped-def]
    started = start({**SAVING, "launch.max_restarts": 1})
    started.wait_for_step(3)
    first = started.ranks()
    os.kill(first[0], signal.SIGKILL)
    started.wait_for(lambda: resumed(started) != [])
    second = started.ranks()
    assert len(second) == 2 and not set(first) & set(second)
    os.kill(second[0], signal.SIGKILL)
    assert started.wait("failed") == "failed"
    assert "SIGKILL" in started.run.summary()["sentence"], started.text


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
    assert not [point for point in read_metrics(run.path) if "event" in point]


@pytest.mark.soak
def test_a_killed_follower_ends_the_job(start, cluster) -> None:  # type: ignore[no-untyped-def]
    started = start(LONG)
    started.wait_for_step(1)
    os.kill(started.run._json("state.json")["launcher"], signal.SIGKILL)
    assert started.wait("failed") == "failed"
    assert not cluster.unended() and not started.processes()
