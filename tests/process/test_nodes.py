"""Several nodes: every launcher over two hosts learns what one process learns; a killed rank comes back; a stop ends
all nodes. The hosts are network namespaces, so this needs root; the training is the real one, started as a user starts
it: the run on one host, its node script on the other."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from deepspeed.launcher import runner
from hosts import ADDRESSES, Host, two_hosts
from trainings import (
    REORDERED,
    a_folder,
    a_spec,
    environment,
    last_step,
    losses,
    points,
    result,
    same_losses,
    text,
    together,
)

from backend.launch import hostfile
from backend.launch.plan import plan
from backend.machine import Machine
from backend.runs import RUN_MARKER, processes
from backend.runs.folder import ALIVE, Run
from backend.train import checkpoints

pytestmark = pytest.mark.alone

FULL = {"method.kind": "full", "train.max_steps": 3, "train.per_device_train_batch_size": 2}
SPREAD = {"parallel.strategy": "ddp", "launch.nproc_per_node": 1, "launch.rendezvous": "static"}
SPREAD |= {
    "launch.master_addr": ADDRESSES[0],
    "launch.master_port": 29533,
    "launch.omp_num_threads": 1,
}  # they share two cores
HOSTFILE = {"launch.hostfile": ("host-0 slots=1", "host-1 slots=1")}
LAUNCHERS = {"torchrun": {}, "accelerate": {}, "deepspeed": HOSTFILE}


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as made:
        yield made


class Nodes:
    """A run on host 0, which host 1 joins by the script in the run's folder."""

    def __init__(
        self,
        root: Path,
        cache: Path,
        hosts: tuple[Host, Host],
        name: str,
        changes: Mapping[str, Any],
        join: bool = True,
    ) -> None:
        made = plan(a_spec({**FULL, **SPREAD, **changes}), Machine(cores=2, python=sys.executable))
        self.run = Run.create(root / "runs", name, made, datetime.now())
        env = environment(self.run.path, cache)
        del env[RUN_MARKER]
        start = [sys.executable, "-m", "backend.runs.supervisor", str(self.run.path)]
        assert hosts[0].start(start, env).wait(30) == 0
        self.second, self.env = hosts[1], env
        if join:
            self.join()

    def join(self) -> None:
        (script,) = self.run.path.glob("node*.sh")
        self.joined = self.second.start([str(script)], self.env)

    def wait_for(self, what: Callable[[], object], seconds: float = 120) -> None:
        until = time.monotonic() + seconds
        while not what():
            assert self.run.state in ALIVE, self.said()
            assert time.monotonic() < until, self.said()
            time.sleep(0.05)

    def ended(self) -> str:
        """How it ended, on both hosts."""
        self.wait_for_end()
        assert self.joined.wait(60) == 0, self.said()
        assert not processes.run_processes(self.run.path)
        return self.run.state

    def wait_for_end(self) -> None:
        until = time.monotonic() + 120
        while self.run.state in ALIVE:
            assert time.monotonic() < until, self.said()
            time.sleep(0.05)

    def said(self) -> str:
        return "\n".join(path.read_text() for path in (self.run.path / "log.txt", *self.run.path.glob("node*.txt")))

    def rank(self, number: int) -> int:
        """The pid of a rank."""
        found = [p.pid for p in processes.run_processes(self.run.path) if _is_rank(p.pid, number)]
        assert len(found) == 1
        return found[0]


def _is_rank(pid: int, number: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return words[2:4] == [b"-m", b"backend.train"] and f"RANK={number}".encode() in _environ(pid)
    except OSError:
        return False


def _environ(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


@pytest.fixture(scope="module")
def alone(root: Path, cache: Path) -> Path:
    folder = a_folder(root, "alone", {**FULL, "train.per_device_train_batch_size": 4})
    together(cache, folder)
    return folder


@pytest.mark.soak
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_hosts_learn_what_one_process_learns(
    root: Path, cache: Path, hosts: tuple[Host, Host], alone: Path, launcher: str
) -> None:
    nodes = Nodes(root, cache, hosts, launcher, {"launch.launcher": launcher, **LAUNCHERS[launcher]})
    assert nodes.ended() == "done", nodes.said()
    assert losses(nodes.run.path) == same_losses(losses(alone), REORDERED)
    assert len(result(nodes.run.path)["ranks"]) == 2


@pytest.mark.soak
@pytest.mark.parametrize(
    ("launcher", "strategy"),
    [
        ("accelerate", "fsdp2"),
        pytest.param("accelerate", "zero2", marks=pytest.mark.soak),
        ("deepspeed", "ddp"),
    ],
)
def test_one_node_learns_what_one_process_learns(
    root: Path, cache: Path, alone: Path, launcher: str, strategy: str
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = {"launch.master_port": probe.getsockname()[1]} if launcher == "deepspeed" else {}
    patch = {**FULL, "parallel.strategy": strategy, "launch.launcher": launcher, **port}
    made = plan(a_spec(patch), Machine(cores=2, python=sys.executable))
    run = Run.create(root / "runs", f"one-{launcher}-{strategy}", made, datetime.now())
    env = environment(run.path, cache)
    ended = subprocess.run([run.path / "run.sh"], env=env, capture_output=True, timeout=180, check=False)
    assert ended.returncode == 0, text(run.path)
    assert run.state == "done"
    assert losses(run.path) == same_losses(losses(alone), REORDERED)
    held, whole = result(run.path)["ranks"], result(alone)["parameters"]
    assert [rank["local_parameters"] for rank in held] == pytest.approx(
        [whole / (1 + (strategy == "fsdp2"))] * 2, rel=0.01
    )
    assert not processes.run_processes(run.path)


def test_begin_from_scratch_counts_once(tmp_path: Path) -> None:
    """Ranks that torchrun starts again are given --from-scratch again; what this start has saved stays."""
    for step, when in ((4, -60), (8, 60)):
        folder = tmp_path / "checkpoints" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "complete").touch()
        os.utime(folder / "complete", (time.time() + when,) * 2)
    (tmp_path / "lock").touch()
    checkpoints.delete_incomplete(tmp_path, from_scratch=True)
    assert [checkpoints.step_of(folder) for folder in checkpoints.complete(tmp_path)] == [8]
    (tmp_path / "lock").unlink()  # started without run.sh: nobody knows when
    checkpoints.delete_incomplete(tmp_path, from_scratch=True)
    assert not checkpoints.complete(tmp_path)


LINES = (("a slots=2", "b slots=4"), ("a slots=2", "a slots=1"), ("a slots=2", "b"), (), ("# c", "a  slots=1"))
INCLUDES = ("", "a", "b:1,3@a", "b:0@b:2", "c", "a:2", "a:", "@", "b:1,1")


@pytest.mark.parametrize("lines", LINES)
@pytest.mark.parametrize("include", INCLUDES)
def test_hostfiles_are_read_as_deepspeed_reads_them(lines: tuple[str, ...], include: str) -> None:
    try:
        wanted: Any = runner.parse_inclusion_exclusion(runner._parse_hostfile(list(lines)), include, "")
    except ValueError:
        wanted = None
    try:
        found = {name: list(slots) for name, slots in hostfile.included_slots(lines, include).items()}
    except hostfile.HostfileError as error:
        found = None
        assert str(error).endswith(".")
    assert found == (None if wanted is None else dict(wanted))


@pytest.mark.soak
def test_a_killed_rank_comes_back_and_a_stop_ends_all(root: Path, cache: Path, hosts: tuple[Host, Host]) -> None:
    saved = {"save.strategy": "steps", "save.steps": 5, "train.max_steps": 2000}
    elastic = {"launch.rendezvous": "elastic", "launch.min_nnodes": 2, "launch.max_restarts": 2}
    nodes = Nodes(root, cache, hosts, "elastic", {**saved, **elastic})
    folder = nodes.run.path
    nodes.wait_for(lambda: last_step(folder) > 6 and nodes.run.checkpoints())
    os.kill(nodes.rank(1), signal.SIGKILL)
    nodes.wait_for(lambda: "Resuming from" in text(folder))
    before = losses(folder)
    nodes.wait_for(lambda: len(points(folder)) > len(before) + 12)
    nodes.run.stop()
    assert nodes.ended() == "stopped", nodes.said()

    seen = points(folder)
    (at,) = [n for n, point in enumerate(seen) if point.get("event") == "resumed"]
    back = seen[at]["step"]
    first = {point["step"]: point["loss"] for point in seen[:at]}
    again = {point["step"]: point["loss"] for point in seen[at + 1 :]}
    assert back % 5 == 0 and back > 0 and min(again) == back + 1, "it went on from the last checkpoint"
    assert max(first) - back <= 6, "no step was lost beyond it"
    assert sorted(losses(folder)) == list(range(1, max(again) + 1))
    assert {step: again[step] for step in first if step > back} == pytest.approx(
        {step: loss for step, loss in first.items() if step > back}, abs=1e-4
    )
    assert nodes.run.checkpoints()[-1] == max(again), "the stop saved"


@pytest.mark.soak
def test_nodes_come_and_go(root: Path, cache: Path, hosts: tuple[Host, Host]) -> None:
    """One host trains alone, another joins, and dies with all it has: the first one goes on."""
    saved = {"save.strategy": "steps", "save.steps": 5, "train.max_steps": 4000}
    elastic = {"launch.rendezvous": "elastic", "launch.min_nnodes": 1, "launch.max_restarts": 5}
    nodes = Nodes(root, cache, hosts, "coming-and-going", {**saved, **elastic}, join=False)
    folder = nodes.run.path
    nodes.wait_for(lambda: last_step(folder) > 12)
    nodes.join()
    nodes.wait_for(lambda: text(folder).count("Resuming from") == 1 and nodes.rank(1))
    step = last_step(folder)
    nodes.wait_for(lambda: last_step(folder) > step + 12)
    hosts[1].die()
    nodes.wait_for(lambda: text(folder).count("Resuming from") == 2, 240)
    step = last_step(folder)
    nodes.wait_for(lambda: last_step(folder) > step + 6)
    nodes.run.stop()
    nodes.wait_for_end()
    assert nodes.run.state == "stopped", nodes.said()
    assert sorted(losses(folder)) == list(range(1, last_step(folder) + 1))
