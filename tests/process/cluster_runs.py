"""Runs that tests start as jobs of a cluster on this machine."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from training_runs import last_step, read_metrics
from waiting import wait_for

from backend.runs import Plan, follower
from backend.runs.folder import ALIVE, Run, StopTimeouts

FULL = {"method.kind": "full", "train.max_steps": 60, "train.per_device_train_batch_size": 2}
LONG = {**FULL, "train.max_steps": 100_000}
SAVING = {**LONG, "save.strategy": "steps", "save.steps": 2}
ON_TWO_NODES = {
    "parallel.strategy": "ddp",
    "launch.nnodes": 2,
    "launch.nproc_per_node": 1,
    "launch.omp_num_threads": 1,  # both nodes are this machine
    "save.strategy": "no",  # what is saved was saved because of a stop
}


@contextmanager
def followed(cluster: Any) -> Iterator[None]:
    """Runs of this process use the cluster, and are told of its jobs often."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.environment.items():
            patch.setenv(name, value)
        patch.setenv(follower.POLL, "0.3")
        yield


class ClusterRun:
    """A run that was started as a job. `mark`: the environment variable of its processes."""

    def __init__(self, root: Path, plan: Plan, mark: str, timeouts: StopTimeouts | None = None) -> None:
        self.run = Run.create(root / "runs", "job", plan, datetime.now())
        self.mark = f"{mark}={self.run.path}".encode()
        self.run.start(timeouts=timeouts)

    @property
    def job(self) -> dict[str, Any]:
        return follower.read(self.run.path)

    def wait(self, *states: str, seconds: float = 300) -> str:
        return self.wait_for(lambda: self.run.state in states, seconds) and self.run.state

    def wait_for(self, condition: Callable[[], bool], seconds: float = 300) -> bool:
        wait_for(condition, seconds, lambda: self.text)
        return True

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: last_step(self.run.path) >= step or self.run.state not in ALIVE)
        assert last_step(self.run.path) >= step, self.text

    def processes(self) -> dict[int, str]:
        """Process id -> command of the processes of its jobs on this machine, which is all nodes."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if any(line.startswith(self.mark) for line in (process / "environ").read_bytes().split(b"\0")):
                    found[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ").strip()
            except OSError:
                continue
        return found

    def ranks(self) -> list[int]:
        """Process ids of the ranks."""
        return [
            pid
            for pid, words in self.processes().items()
            if re.search(r"-m backend\.train \.$", words) and "torch.distributed" not in words
        ]

    @property
    def text(self) -> str:
        log = self.run.path / "log.txt"
        return f"{self.run.summary()} {self.job}\n{log.read_text()[-3000:] if log.exists() else ''}"

    def end(self) -> None:
        """Stop it if it is alive; afterwards nothing is left of it."""
        if self.run.state in ALIVE:
            self.run.stop(save=False)
        self.wait("done", "stopped", "failed", "lost")
        self.wait_for(lambda: not self.processes())


def resumed(run: ClusterRun) -> list[int]:
    """The steps from which it was resumed."""
    return [point["step"] for point in read_metrics(run.run.path) if point.get("event") == "resumed"]
