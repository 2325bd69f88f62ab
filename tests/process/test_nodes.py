"""Multi-node runs: with each launcher, two hosts get the losses of one process; a killed rank is restarted; a stop ends
all nodes. The hosts are network namespaces, which needs root. The run is started on one host, and its node script on
the other, as a user would do it."""

from __future__ import annotations

import itertools
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
from network_hosts import ADDRESSES, NetworkHost, two_hosts
from training_runs import (
    REORDERING_TOLERANCE,
    environment,
    last_step,
    log_text,
    losses,
    make_run_folder,
    make_spec,
    read_metrics,
    result,
    same_losses,
    train_in_one_process,
    without_checks,
)
from waiting import wait_for

from backend.launch import hostfile
from backend.launch.plan import plan
from backend.machine import Machine
from backend.runs import RUN_MARKER, processes
from backend.runs.folder import ALIVE, Run
from backend.train import checkpoints

FULL = {"method.kind": "full", "train.max_steps": 3, "train.per_device_train_batch_size": 2}
TWO_NODES = {"parallel.strategy": "ddp", "launch.nproc_per_node": 1, "launch.rendezvous": "static"}
TWO_NODES |= {
    "launch.master_addr": ADDRESSES[0],
    "launch.master_port": 29533,
    "launch.omp_num_threads": 1,
}  # the hosts share two cores
HOSTFILE = {"launch.hostfile": ("host-0 slots=1", "host-1 slots=1")}
LAUNCHERS = {"torchrun": {}, "accelerate": {}, "deepspeed": HOSTFILE}


@pytest.fixture
def hosts() -> Iterator[tuple[NetworkHost, NetworkHost]]:
    with two_hosts() as pair:
        yield pair


class Nodes:
    """A run on host 0; host 1 joins it with the node script in the run's folder."""

    def __init__(
        self,
        root: Path,
        cache: Path,
        hosts: tuple[NetworkHost, NetworkHost],
        name: str,
        changes: Mapping[str, Any],
        join: bool = True,
    ) -> None:
        plan_ = plan(make_spec({**FULL, **TWO_NODES, **changes}), Machine(cores=2, python=sys.executable))
        self.run = Run.create(root / "runs", name, plan_, datetime.now())
        env = environment(self.run.path, cache)
        del env[RUN_MARKER]
        start = [sys.executable, "-m", "backend.runs.supervisor", str(self.run.path)]
        assert hosts[0].start(start, env).wait(30) == 0
        self.second_host, self.env = hosts[1], env
        if join:
            self.join()

    def join(self) -> None:
        (script,) = self.run.path.glob("node*.sh")
        self.joined = self.second_host.start([str(script)], self.env)

    def wait_for(self, condition: Callable[[], object], seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.run.state in ALIVE, self.logs()
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.05)

    def final_state(self) -> str:
        """Wait for both hosts and return the state of the run."""
        self.wait_for_end()
        assert self.joined.wait(60) == 0, self.logs()
        assert not processes.run_processes(self.run.path)
        return self.run.state

    def wait_for_end(self) -> None:
        wait_for(lambda: self.run.state not in ALIVE, 120, self.logs)

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in (self.run.path / "log.txt", *self.run.path.glob("node*.txt")))

    def rank(self, number: int) -> int:
        """The PID of a rank."""
        pids = [p.pid for p in processes.run_processes(self.run.path) if _is_rank(p.pid, number)]
        assert len(pids) == 1
        return pids[0]


def _is_rank(pid: int, number: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return command[2:4] == [b"-m", b"backend.train"] and f"RANK={number}".encode() in _environ(pid)
    except OSError:
        return False


def _environ(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


@pytest.fixture(scope="module")
def alone(root: Path, cache: Path) -> Path:
    folder = make_run_folder(root, "alone", {**FULL, "train.per_device_train_batch_size": 4})
    train_in_one_process(cache, folder)
    return folder


@pytest.mark.soak
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_hosts_match_the_losses_of_one_process(
    root: Path, cache: Path, hosts: tuple[NetworkHost, NetworkHost], alone: Path, launcher: str
) -> None:
    nodes = Nodes(root, cache, hosts, launcher, {"launch.launcher": launcher, **LAUNCHERS[launcher]})
    assert nodes.final_state() == "done", nodes.logs()
    assert losses(nodes.run.path) == same_losses(losses(alone), REORDERING_TOLERANCE)
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
def test_one_node_matches_the_losses_of_one_process(
    root: Path, cache: Path, alone: Path, launcher: str, strategy: str
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = {"launch.master_port": probe.getsockname()[1]} if launcher == "deepspeed" else {}
    patch = {**FULL, "parallel.strategy": strategy, "launch.launcher": launcher, **port}
    plan_ = plan(make_spec(patch), Machine(cores=2, python=sys.executable))
    run = Run.create(root / "runs", f"one-{launcher}-{strategy}", plan_, datetime.now())
    env = environment(run.path, cache)
    completed = subprocess.run([run.path / "run.sh"], env=env, capture_output=True, timeout=180, check=False)
    assert completed.returncode == 0, log_text(run.path)
    assert run.state == "done"
    assert losses(run.path) == same_losses(losses(alone), REORDERING_TOLERANCE)
    ranks, parameters = result(run.path)["ranks"], result(alone)["parameters"]
    assert [rank["local_parameters"] for rank in ranks] == pytest.approx(
        [parameters / (1 + (strategy == "fsdp2"))] * 2, rel=0.01
    )
    assert not processes.run_processes(run.path)


def test_from_scratch_deletes_only_checkpoints_before_the_start(tmp_path: Path) -> None:
    """Ranks that torchrun restarts get --from-scratch again; checkpoints saved since the run started are kept, whatever
    their times are."""
    for step, start, when in ((4, "a", 60), (8, "b", -60)):
        folder = tmp_path / "checkpoints" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (tmp_path / "lock").write_text(f"supervisor\n{start}\n")
        checkpoints.mark_complete(folder)
        os.utime(folder / "complete", (time.time() + when,) * 2)
    checkpoints.delete_incomplete(tmp_path, from_scratch=True)
    assert [checkpoints.step_of(folder) for folder in checkpoints.complete(tmp_path)] == [8]
    (tmp_path / "lock").unlink()  # started without run.sh: the start is unknown
    checkpoints.delete_incomplete(tmp_path, from_scratch=True)
    assert not checkpoints.complete(tmp_path)


HOSTFILES = (("a slots=2", "b slots=4"), ("a slots=2", "a slots=1"), ("a slots=2", "b"), (), ("# c", "a  slots=1"))
INCLUDES = ("", "a", "b:1,3@a", "b:0@b:2", "c", "a:2", "a:", "@", "b:1,1")


@pytest.mark.parametrize("lines", HOSTFILES)
@pytest.mark.parametrize("include", INCLUDES)
def test_hostfile_parsing_matches_deepspeed(lines: tuple[str, ...], include: str) -> None:
    try:
        expected: Any = runner.parse_inclusion_exclusion(runner._parse_hostfile(list(lines)), include, "")
    except ValueError:
        expected = None
    try:
        slots_by_host = {name: list(slots) for name, slots in hostfile.included_slots(lines, include).items()}
    except hostfile.HostfileError as error:
        slots_by_host = None
        assert str(error).endswith(".")
    assert slots_by_host == (None if expected is None else dict(expected))


@pytest.mark.soak
def test_killed_rank_is_restarted_and_stop_ends_all_nodes(
    root: Path, cache: Path, hosts: tuple[NetworkHost, NetworkHost]
) -> None:
    saving = {"save.strategy": "steps", "save.steps": 5, "train.max_steps": 2000}
    elastic = {"launch.rendezvous": "elastic", "launch.min_nnodes": 2, "launch.max_restarts": 2}
    nodes = Nodes(root, cache, hosts, "elastic", {**saving, **elastic})
    folder = nodes.run.path
    nodes.wait_for(lambda: last_step(folder) > 6 and nodes.run.checkpoints())
    os.kill(nodes.rank(1), signal.SIGKILL)
    nodes.wait_for(lambda: "Resuming from" in log_text(folder))
    before = losses(folder)
    nodes.wait_for(lambda: len(read_metrics(folder)) > len(before) + 12)
    nodes.run.stop()
    assert nodes.final_state() == "stopped", nodes.logs()

    metrics = read_metrics(folder)
    (resumed_at,) = [n for n, point in enumerate(metrics) if point.get("event") == "resumed"]
    resumed_step = metrics[resumed_at]["step"]
    first = {point["step"]: point["loss"] for point in metrics[:resumed_at]}
    second = {point["step"]: point["loss"] for point in metrics[resumed_at + 1 :]}
    assert resumed_step % 5 == 0 and resumed_step > 0 and min(second) == resumed_step + 1, (
        "resumed from the last checkpoint"
    )
    assert max(first) - resumed_step <= 6, "at most the steps since the last checkpoint were lost"
    assert sorted(losses(folder)) == list(range(1, max(second) + 1))
    assert {step: second[step] for step in first if step > resumed_step} == pytest.approx(
        {step: loss for step, loss in first.items() if step > resumed_step}, abs=1e-4
    )
    assert nodes.run.checkpoints()[-1] == max(second), "the stop saved a checkpoint"


@pytest.mark.soak
def test_nodes_join_and_leave(root: Path, cache: Path, hosts: tuple[NetworkHost, NetworkHost]) -> None:
    """One host trains alone, a second one joins and is killed, and the first one continues."""
    saving = {"save.strategy": "steps", "save.steps": 5, "train.max_steps": 4000}
    elastic = {"launch.rendezvous": "elastic", "launch.min_nnodes": 1, "launch.max_restarts": 5}
    nodes = Nodes(root, cache, hosts, "join-and-leave", {**saving, **elastic}, join=False)
    folder = nodes.run.path
    nodes.wait_for(lambda: last_step(folder) > 12)
    nodes.join()
    nodes.wait_for(lambda: log_text(folder).count("Resuming from") == 1 and nodes.rank(1))
    step = last_step(folder)
    nodes.wait_for(lambda: last_step(folder) > step + 12)
    hosts[1].kill()
    nodes.wait_for(lambda: log_text(folder).count("Resuming from") == 2, 240)
    step = last_step(folder)
    nodes.wait_for(lambda: last_step(folder) > step + 6)
    nodes.run.stop()
    nodes.wait_for_end()
    assert nodes.run.state == "stopped", nodes.logs()
    assert sorted(losses(folder)) == list(range(1, last_step(folder) + 1))


@pytest.mark.soak
@pytest.mark.parametrize(
    ("launcher", "rendezvous"),
    [
        *itertools.product(["torchrun", "accelerate", "deepspeed"], ["standalone", "static"]),
        ("torchrun", "elastic"),
    ],
)
def test_a_master_port_that_is_in_use_is_named(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, launcher: str, rendezvous: str
) -> None:
    """Another program listens on it and never answers. The run must not wait for it. On one node no port is used."""
    changes = {**FULL, "parallel.strategy": "ddp", "launch.launcher": launcher, "launch.rendezvous": rendezvous}
    changes |= {"launch.nproc_per_node": 2 if rendezvous == "standalone" else 1, "launch.master_addr": "127.0.0.1"}
    if launcher == "deepspeed" and rendezvous == "static":
        changes |= HOSTFILE
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        spec = make_spec({**changes, "launch.master_port": other.getsockname()[1]})
        run = Run.create(
            tmp_path, "port", without_checks(plan(spec, Machine(cores=2, python=sys.executable))), datetime.now()
        )
        for name, value in environment(run.path, cache).items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv(RUN_MARKER)
        run.start()
        try:
            wait_for(lambda: run.state not in ALIVE, 90, lambda: log_text(run.path))
        finally:
            processes.terminate(run.path, sigterm_seconds=0)
    if rendezvous == "standalone":
        assert run.state == "done", log_text(run.path)
        return
    assert run.state == "failed" and "The master port is in use" in run.summary()["sentence"], log_text(run.path)
