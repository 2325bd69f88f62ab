"""The device test: which rank and which link is called slow, and the command that starts it."""

import os
import time
from pathlib import Path

import pytest

from backend.cli import device_test as device_test_command
from backend.config import RunSpec
from backend.config.options import edit
from backend.launch.plan import plan
from backend.machine import Machine, machines
from backend.preflight import preflight
from backend.presets import read
from backend.runs import JOB_SCRIPT, NODE_JOB
from backend.runs.device_speeds import problems
from backend.runs.folder import ALIVE, RunError
from backend.tasks.device_test import LEFT_SECONDS, TEST, TRAINER, create, planned_test


def rank(host="a", flops=600e12, to_next=200e9):
    return {"host": host, "device": "cuda:0", "flops": flops, "to_next": to_next}


def test_equal_ranks_have_no_problems():
    assert list(problems([rank()])) == []
    assert list(problems([rank(flops=600e12 + number * 5e12) for number in range(8)])) == []
    # Links between nodes are slower than those within one.
    nodes = [rank("a"), rank("a", to_next=40e9), rank("b"), rank("b", to_next=39e9)]
    assert list(problems(nodes)) == []


def test_a_slow_device_is_named():
    ranks = [rank() for _ in range(8)]
    ranks[5] = rank("b", flops=400e12)
    (found,) = [text for text in problems(ranks) if "matmul" in text]
    assert found.startswith("Rank 5 (cuda:0 on b) is slow: its matmul throughput is 67% of the median of all ranks.")


def test_a_slow_link_is_named():
    ranks = [rank("a"), rank("a", to_next=40e9), rank("b"), rank("b", to_next=41e9), rank("c"), rank("c", to_next=9e9)]
    (found,) = problems(ranks)
    assert found.startswith(
        "The link from rank 5 on c to rank 0 on a is slow: its bandwidth is 22% of the median inter-node bandwidth."
    )
    ranks = [rank(to_next=20e9 if number == 2 else 200e9) for number in range(4)]
    (found,) = problems(ranks)
    assert "rank 2 on a to rank 3 on a" in found and "10% of the median intra-node bandwidth" in found


def test_the_test_never_starts_a_training(tmp_path):
    """The command of another trainer has no part that the test could replace."""
    spec = edit(read("two-nodes"), {"launch.trainer": "llamafactory", "llamafactory.environment": "/env"})
    report = preflight(spec, machines()["2x8x80gb"], tmp_path)
    with pytest.raises(RunError, match=r"^Only Footplate's own trainer .* launch\.trainer=footplate"):
        create(tmp_path, report)
    assert not list(tmp_path.iterdir())


def test_the_command_says_what_the_test_waits_for(monkeypatch, capsys):
    """In any queue, and each text once."""
    first, then = "Waiting in the queue. x uses GPU 0.", "Waiting in Slurm's queue (job 7). Waiting for free nodes."
    states, texts = iter([*["queued"] * 5, "done"]), iter([first, first, then, then, ""])
    monkeypatch.setattr(device_test_command, "POLL_SECONDS", 0)

    class Waiting:
        state = property(lambda _: next(states))

        def waits_for(self):
            return next(texts)

    device_test_command._wait(Waiting())
    assert capsys.readouterr().err.splitlines() == [first, then]


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate", "deepspeed"])
def test_every_node_starts_the_test(launcher):
    spec = edit(read("two-nodes"), {"launch.launcher": launcher})
    plan = preflight(spec, machines()["2x8x80gb"], Path.cwd()).plan
    tested = planned_test(plan)
    for argv in (tested.argv, *tested.other_nodes.values()):
        assert TEST in argv and TRAINER not in argv
    assert tested.other_nodes.keys() == plan.other_nodes.keys()
    assert tested.files == plan.files and tested.env == plan.env


def test_one_process_is_tested_too():
    assert TEST in planned_test(preflight(RunSpec(), machines()["1x80gb"], Path.cwd()).plan).argv


def test_a_test_deletes_only_what_is_old(tmp_path):
    """Two tests at once: neither deletes the other's folder, not even before that has started or once it has ended."""
    report = preflight(RunSpec(), machines()["1x80gb"], Path.cwd())
    first = create(tmp_path, report)
    assert first.state not in ALIVE
    second = create(tmp_path, report)
    assert first.path.is_dir() and second.path.is_dir()
    (first.path / "mark").touch()
    os.utime(first.path, (0, time.time() - 2 * LEFT_SECONDS))
    create(tmp_path, report)
    assert not (first.path / "mark").exists() and second.path.is_dir()


def test_a_slurm_job_runs_the_test_on_its_nodes():
    tested = planned_test(plan(edit(RunSpec(), {"launch.place": "slurm", "parallel.strategy": "ddp"}), Machine()))
    assert f"-m {TEST} ." in tested.files[NODE_JOB] and f"-m {TRAINER} ." not in tested.files[NODE_JOB]
    assert tested.argv[-1] == JOB_SCRIPT
