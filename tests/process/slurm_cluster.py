"""A Slurm cluster of two nodes on this machine, for tests: one controller and two slurmd, without munge and systemd."""

from __future__ import annotations

import getpass
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SBIN = "/usr/sbin"  # not in the PATH of every user
# cred_expire: a job that comes back is started again after that time, by default two minutes. Much less would be too
# short for a slow machine, where starting a step takes seconds.
CONFIG = """\
ClusterName=tests
SlurmctldHost=localhost
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
AuthInfo=cred_expire=20
CredType=cred/none
MpiDefault=none
SwitchType=switch/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=30
SlurmdTimeout=120
NodeName=DEFAULT Features=a100,h100
NodeName=n[0-1] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=2 RealMemory=8000 State=UNKNOWN
PartitionName=main Nodes=n[0-1] Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=120
PartitionName=urgent Nodes=n[0-1] MaxTime=60 State=UP PriorityTier=10 PreemptMode=off
"""


@dataclass
class SlurmCluster:
    """A running cluster; `environment` lets Slurm's commands find it."""

    folder: Path
    daemons: list[subprocess.Popen[bytes]]

    @property
    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def command(self, *words: str) -> str:
        """The output of one of Slurm's commands."""
        env = {**os.environ, **self.environment}
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=180, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def unended(self) -> list[str]:
        """The ids of jobs that have not ended."""
        return self.command("squeue", "--noheader", "--format=%i").split()

    @contextmanager
    def without_controller(self) -> Iterator[None]:
        """Kill the controller; start it again at the end, with the state that it has saved."""
        self.daemons[0].kill()
        self.daemons[0].wait()
        try:
            yield
        finally:
            self.daemons[0] = _daemon(self.folder, "slurmctld", "-D")


def _daemon(folder: Path, *command: str) -> subprocess.Popen[bytes]:
    env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{os.environ['PATH']}:{SBIN}"}
    with (folder / "daemons.txt").open("ab") as log:
        return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def _free_ports(count: int) -> int:
    """The first of `count` free ports in a row."""
    for first in range(18000 + os.getpid() % 10000, 40000, count):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            return first
        except OSError:
            continue
    raise AssertionError("no free ports")


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """A cluster with idle nodes. At the end, no job and none of its processes is left."""
    (folder / "state").mkdir(parents=True)
    port = _free_ports(3)
    values: Mapping[str, object] = {"port": port, "first": port + 1, "last": port + 2}
    (folder / "slurm.conf").write_text(CONFIG.format(**values, folder=folder, user=getpass.getuser()))
    for node in ("n0", "n1"):
        (folder / f"spool-{node}").mkdir()
    cluster = SlurmCluster(folder, [_daemon(folder, "slurmctld", "-D")])
    try:
        cluster.daemons += [_daemon(folder, "slurmd", "-D", "-N", node) for node in ("n0", "n1")]
        _wait_until_idle(cluster)
        yield cluster
        assert not cluster.unended()
    finally:
        _cancel_all(cluster)
        for daemon in reversed(cluster.daemons):
            daemon.terminate()
        for daemon in cluster.daemons:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _cancel_all(cluster: SlurmCluster) -> None:
    """Jobs that a failed test has left would go on without their cluster."""
    if cluster.daemons[0].poll() is None and cluster.unended():
        cluster.command("scancel", *cluster.unended())
        deadline = time.monotonic() + 30
        while cluster.unended() and time.monotonic() < deadline:
            time.sleep(0.2)


def _wait_until_idle(cluster: SlurmCluster) -> None:
    env = {**os.environ, **cluster.environment}
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        asked = ["sinfo", "--noheader", "--partition=main", "--format=%D %T"]
        if subprocess.run(asked, env=env, capture_output=True, text=True, check=False).stdout.strip() == "2 idle":
            return
        time.sleep(0.1)
    raise AssertionError((cluster.folder / "daemons.txt").read_text()[-2000:])
