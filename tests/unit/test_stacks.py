"""What `footplate stacks` reads from the ranks' files, and how it explains a run without progress."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backend.runs import LLAMAFACTORY, PLAN, RUN_MARKER, STACKS, processes, stacks
from backend.runs.stacks import Collective, RankStack
from backend.train import stacks as train_stacks

C10D = "/venv/lib/python3.13/site-packages/torch/distributed/distributed_c10d.py"
WAITS = ((C10D, 3000, "all_reduce"), ("/venv/site-packages/torch/distributed/c10d_logger.py", 80, "wrapper"))
CLIP = ("/venv/site-packages/accelerate/accelerator.py", 2900, "clip_grad_norm_")
PROGRAM = """
import faulthandler, os, signal, sys, time
from pathlib import Path
from backend.runs import processes
path = Path(sys.argv[1])
file = path.open("ab", buffering=0)
if sys.argv[2] == "answers":
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)
else:
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
file.write(f"PID {os.getpid()}, started at {processes.started(os.getpid())}, on {os.uname().nodename}\\n".encode())

def wait_here():
    time.sleep(60)

print("ready", flush=True)
wait_here()
"""


def rank(number: int, condition: str = "running", entered: int = 0, at: float = 1000.0, **more: Any) -> RankStack:
    """It entered its last collective `at`, and was asked at 1184.2."""
    known: dict[str, Any] = {"collectives": {"0 default_pg": Collective(entered, "all_reduce", at)}, "time": 1184.2}
    return RankStack(number, 100 + number, "host", condition, **(known if entered else {}), **more)


def test_a_rank_that_did_not_enter_a_collective_is_named() -> None:
    found = stacks.explain(
        [
            rank(0, entered=7, frames=(*WAITS, CLIP)),
            rank(1, entered=6, at=990, frames=(("/home/me/project/loss.py", 12, "slow"),)),
            rank(2, entered=7, at=1000.2, frames=(*WAITS, CLIP)),
        ]
    )
    assert found == (
        "Ranks 0, 2 entered all_reduce (collective 7 of the process group) 184 s ago; rank 1 did not. "
        "Ranks 0, 2: waiting in all_reduce, called by clip_grad_norm_ (accelerate/accelerator.py, line 2900). "
        "Rank 1: in slow (me/project/loss.py, line 12)."
    )


def test_a_stopped_rank_is_behind() -> None:
    found = stacks.explain([rank(0, entered=7), rank(1, "stopped"), rank(2, "ended")], now=1010)
    assert "entered all_reduce (collective 7 of the process group) 10 s ago; ranks 1, 2 did not." in found


def test_ranks_of_a_healthy_run_are_not_behind() -> None:
    """They are asked one after the other while they train."""
    ahead = rank(0, entered=7, at=1184.0)
    assert "entered" not in stacks.explain([ahead, rank(1, entered=6, at=1183.0)])
    earlier = replace(rank(1, entered=2, at=1179.0), time=1179.2)
    assert "entered" not in stacks.explain([ahead, earlier])


@pytest.mark.parametrize(
    ("stack", "text"),
    [
        (rank(0, "stopped"), "stopped by a signal; kill -CONT 100 continues it"),
        (rank(0, "ended"), "no process"),
        (rank(0, "elsewhere"), "on host host; run footplate stacks there"),
        (rank(0, "silent"), "no answer within the time limit, perhaps waiting for a disk or a device driver"),
        (rank(0), "running no Python code"),
        (rank(0, frames=(("/a/torch/cuda/__init__.py", 9, "synchronize"),)), "waiting for the device in synchronize"),
        (rank(0, frames=(("/a/torch/autograd/graph.py", 9, "_engine_run_backward"),)), "in the backward pass"),
        (
            rank(0, frames=(("x", 1, "get"), ("/torch/utils/data/dataloader.py", 9, "_get_data"))),
            "waiting for the data loader",
        ),
    ],
)
def test_what_a_rank_does(stack: RankStack, text: str) -> None:
    assert text in stacks.explain([stack])


def test_ranks_that_wait_in_different_groups_are_not_compared() -> None:
    other = {"1 other": Collective(9, "barrier", 1000.0)}
    one, two = rank(0, entered=3), RankStack(1, 1, "host", "running", collectives=other, time=1184.2)
    assert "entered" not in stacks.explain([one, two])


def start(folder: Path, number: int, how: str) -> subprocess.Popen[str]:
    path = folder / STACKS / f"{number}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, RUN_MARKER: str(folder)}
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, path, how], env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    return process


def test_stacks_of_processes(tmp_path: Path) -> None:
    """One that answers, twice; one that does not; one stopped; one that ended; and a file that names a process of
    another run, which must not receive the signal."""
    folder = tmp_path / "run"
    ranks = [start(folder, 0, "answers"), start(folder, 1, "silent"), start(folder, 2, "answers")]
    foreign = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        os.kill(ranks[2].pid, signal.SIGSTOP)
        while processes.condition(ranks[2].pid) != "T":
            time.sleep(0.01)
        header = f"PID {foreign.pid}, started at {processes.started(foreign.pid)}, on {socket.gethostname()}\n"
        (folder / STACKS / "3.txt").write_text(header)
        (folder / STACKS / "4.txt").write_text("garbage")
        (folder / STACKS / "0.json").write_text("[")
        for _ in range(2):
            found = stacks.collect(folder, seconds=1)
            assert [s.condition for s in found] == ["running", "silent", "stopped", "ended", "ended"]
            assert [s.frames[0][2] for s in found if s.frames] == ["wait_here"]
            assert found[0].text.count("most recent call first") == 1, "of this request only"
            assert "wait_here" in json.dumps(stacks.as_json(found))
        assert foreign.poll() is None
    finally:
        for process in (*ranks, foreign):
            process.kill()
            process.communicate()


def test_a_run_without_files(tmp_path: Path) -> None:
    assert stacks.collect(Path("/nonexistent")) == []
    assert "have not loaded their libraries yet" in stacks.explain([])
    assert stacks.why_none(tmp_path) == stacks.explain([])
    (tmp_path / PLAN).write_text('{"about": {"kind": "serve"}}')
    assert stacks.why_none(tmp_path).startswith("Only the ranks of Footplate's own trainer report")
    (tmp_path / PLAN).write_text("{}")
    (tmp_path / LLAMAFACTORY).touch()
    assert stacks.why_none(tmp_path).startswith("Only the ranks of Footplate's own trainer report")


@pytest.mark.parametrize("recorded", ["{}", '{"entries": []}', "no JSON", '{"entries": [{}]}'])
def test_collectives_are_written_whatever_torch_has_recorded(tmp_path, monkeypatch, recorded):
    """Before the first collective there are no entries. An error would end the heartbeat."""
    monkeypatch.setattr(train_stacks._distributed_c10d, "_dump_fr_trace_json", lambda **_: recorded)
    mine = train_stacks.Stacks(tmp_path, 0)
    mine.path.parent.mkdir()
    mine.write_collectives()
    assert json.loads(mine.path.with_suffix(".json").read_text())["last"] == {}


def test_a_request_after_the_clock_was_set_back_is_answered(tmp_path, monkeypatch):
    """Before, times were compared: a rank that had answered a request of the future answered no other one."""
    monkeypatch.setattr(train_stacks._distributed_c10d, "_dump_fr_trace_json", lambda **_: "{}")
    mine, request = train_stacks.Stacks(tmp_path, 0), tmp_path / STACKS / stacks.REQUEST
    answer = tmp_path / STACKS / "0.json"
    request.parent.mkdir()
    mine.path.write_text("Thread (most recent call first):\n")
    for name, when in (("first", 4_000_000_000), ("second", 1_000_000_000)):
        request.write_text(name)
        os.utime(request, (when, when))
        assert not stacks._answered(mine.path, name) or not answer.exists()
        mine.write_collectives()
        assert json.loads(answer.read_text())["request"] == name
        assert stacks._answered(mine.path, name)
    os.utime(answer, (4_000_000_000, 4_000_000_000))
    assert not stacks._answered(mine.path, "third")
