"""A fork server: the process of `backend/train/warm_server.py`, which imports the libraries once and forks the ranks of
each training. A start takes about a second.

A rank has the environment variables that torchrun would set. For tests of real launchers and of jobs, a program stands
in for Python.
"""

from __future__ import annotations

import os
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from training_runs import environment, log_text, write_plan

from backend import registry
from backend.config import RunSpec
from backend.config.processes import nproc_per_node
from backend.inspect import architecture, cpu_speed, examples, worker
from backend.inspect.architecture import ModuleTables
from backend.inspect.cpu_speed import CpuSpeeds
from backend.inspect.examples import ExampleReports, ShownExamples
from backend.launch.plan import plan
from backend.machine import Machine
from backend.runs import RANK_LOGS, RUN_MARKER, processes, warm_python

# Evaluations import these text metrics, rouge_score with nltk, which takes longer than a training step.
SERVER = """\
import rouge_score.rouge_scorer, sacrebleu.metrics
from backend.train.warm_server import main
main()
"""
# Only what takes seconds to import is forked. Everything else that a job does with Python is done by Python.
PYTHON_CODE = """\
#!/bin/sh
case "$1 $2 $3" in
    "-m torch.distributed.run "*|"-m deepspeed.launcher."*|"-m accelerate."*|"-m backend.train"*|\\
    "-m backend.inference"*|"-m backend.export"*|"-u -m backend.train"*)
        FOOTPLATE_WARM={server} exec {standin} "$@" ;;
    *) exec {python} "$@" ;;
esac
"""


@dataclass(frozen=True)
class ForkServer:
    """Runs trainings on a CPU, one at a time. `marker` is the folder of the server and the run marker of its processes;
    `cache` is the model cache, `env` the environment of trainings."""

    process: subprocess.Popen[bytes]
    marker: Path
    cache: Path
    env: Mapping[str, str]

    @property
    def python(self) -> Path:
        """A program that stands in for Python; the launchers and ranks that it starts are forked."""
        deadline = time.monotonic() + 300
        while not (self.marker / warm_python.NAME).exists():  # the server is starting
            assert self.process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        return self.marker / "launchers" / warm_python.STAND_IN

    def run(
        self,
        folder: Path,
        ranks: int = 0,
        *arguments: str,
        env: Mapping[str, str] = {},
        seconds: float = 400,
        script: str = "",
    ) -> int:
        """Train `folder` with `ranks` ranks (0: one process without a process group) and return the exit code; 124
        means a timeout.

        As under a launcher, the first rank that fails ends the others, and no process is left. `script`: a Python file
        to run instead of the trainer.
        """
        # Launchers are new processes at each start, after which the ranks name their store; this server stays the same.
        shutil.rmtree(folder / RANK_LOGS, ignore_errors=True)
        variables = {**self.env, **env, "FOOTPLATE_CACHE": str(self.cache), RUN_MARKER: str(folder)}
        command = ["run_script", script, ".", *arguments] if script else ["backend.train", ".", *arguments]
        group = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        group |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        with ExitStack() as connections:  # a rank whose connection is closed is killed
            alive = set()
            for rank in range(ranks or 1):
                of_rank = {**group, "RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks else {}
                alive.add(connections.enter_context(self._fork(folder, command, {**variables, **of_rank})))
            deadline, code = time.monotonic() + seconds, 0
            while alive and not code:
                ended = select.select(list(alive), [], [], max(0, deadline - time.monotonic()))[0]
                code = 0 if ended else 124
                for rank_ended in ended:
                    alive.remove(rank_ended)
                    status = warm_python.read_number(rank_ended)
                    assert status is not None, "the fork server has ended"
                    code = code or os.waitstatus_to_exitcode(status)
        while code and (orphans := self.leftover_processes(0)):  # ranks, and DataLoader workers of a rank
            for orphan in orphans:
                with suppress(ProcessLookupError):
                    os.kill(orphan.pid, signal.SIGKILL)
        return code

    def _fork(self, folder: Path, command: list[str], variables: dict[str, str]) -> socket.socket:
        """The connection to a new process of a module, whose output is in log.txt."""
        server = warm_python.connect(str(self.marker / warm_python.NAME))
        assert server
        with (folder / "log.txt").open("ab") as log, open(os.devnull) as null:
            streams = [null.fileno(), log.fileno(), log.fileno()]
            warm_python.send(server, command[0], command[1:], str(folder), variables, streams)
        assert warm_python.read_number(server) is not None, "the fork server has ended"
        return server

    def train(self, folder: Path, spec: RunSpec, ranks: int = 0, env: Mapping[str, str] = {}) -> Path:
        """Plan `spec` into the new `folder`, train it, and assert that it succeeds."""
        write_run(folder, spec)
        assert self.run(folder, ranks, env=env) == 0, log_text(folder)
        return folder

    def resume(self, folder: Path, step: int, ranks: int = 0, env: Mapping[str, str] = {}) -> None:
        """Delete the checkpoints after `step` and resume from the checkpoint of `step`."""
        for later in (folder / "checkpoints").iterdir():
            if int(later.name.rpartition("-")[2]) > step:
                shutil.rmtree(later)
        assert self.run(folder, ranks, env=env) == 0, log_text(folder)
        assert f"Resuming from checkpoint-{step}." in log_text(folder)

    def leftover_processes(self, seconds: float = 20) -> set[processes.Process]:
        """Processes of earlier trainings that still exist after `seconds`."""
        deadline = time.monotonic() + seconds
        while leftovers := {p for p in processes.run_processes(self.marker) if p.pid != self.process.pid}:
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return leftovers


@contextmanager
def forked_inspection(server: ForkServer, folder: Path) -> Iterator[None]:
    """The checks of this process use inspection workers that the server forks, with their results in `folder`."""
    command = (str(server.python), *worker.ARGUMENTS)
    tables, reports = ModuleTables(folder, command=command), ExampleReports(folder, command=command)
    shown, speeds = ShownExamples(folder, seconds=60, command=command), CpuSpeeds(folder, command=command)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(worker.SETTING, "on")
        patch.setattr(architecture, "_tables", lambda _: tables)
        patch.setattr(examples, "_reports", lambda _: reports)
        patch.setattr(examples, "_shown", lambda _: shown)
        patch.setattr(cpu_speed, "_speeds", lambda _: speeds)
        try:
            yield
        finally:
            for cache in (tables, reports, shown, speeds):
                cache.close()


def free_port() -> int:
    """A TCP port of this machine that nothing uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_run(folder: Path, spec: RunSpec) -> None:
    """Plan `spec` and write the files of the plan into the new `folder`."""
    write_plan(plan(spec, Machine()), folder)


def rank_count(spec: RunSpec) -> int:
    """The number of ranks that a launcher would start on this machine; 0: one process without a process group."""
    multi_process = spec.parallel.strategy in registry.MULTI_PROCESS and spec.launch.launcher != "python"
    return nproc_per_node(spec) if multi_process else 0


@contextmanager
def start_fork_server(folder: Path) -> Iterator[ForkServer]:
    """A fork server with its model cache in `folder`; asserts at the end that none of its processes is left."""
    words = {"server": folder / warm_python.NAME, "standin": folder / warm_python.STAND_IN, "python": sys.executable}
    launchers = folder / "launchers" / warm_python.STAND_IN
    launchers.parent.mkdir()
    launchers.write_text(PYTHON_CODE.format_map({name: shlex.quote(str(word)) for name, word in words.items()}))
    launchers.chmod(0o755)
    env = {**environment(folder, folder), "HF_MODULES_CACHE": str(folder / "modules")}  # for code of a model's folder
    env["PYTHONPATH"] += f"{os.pathsep}{Path(__file__).parent}"  # of run_script
    command = [sys.executable, "-c", SERVER, str(folder), str(os.getpid())]
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield ForkServer(process, folder, folder, env)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
    assert not processes.run_processes(folder)
