"""A fork server: a process that imports the libraries once and forks the ranks of each training. A start takes about
a second.

A rank runs backend.train's main, with the environment variables that torchrun would set. The server also serves a
program that stands in for Python (`backend/train/warm_server.py`), for tests of real launchers and of jobs.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from training_runs import THREADS, environment, log_text, write_plan

from backend import registry
from backend.config import RunSpec
from backend.config.processes import nproc_per_node
from backend.inspect import architecture, cpu_speed, examples, worker
from backend.inspect.architecture import ModuleTables
from backend.inspect.cpu_speed import CpuSpeeds
from backend.inspect.examples import ExampleReports
from backend.launch.plan import plan
from backend.machine import Machine
from backend.runs import RANK_LOGS, RUN_MARKER, processes, warm_python

# Arguments: the folder of the stand-in for Python and its server.
SERVER_CODE = """
import gc, importlib, json, multiprocessing.util, os, runpy, signal, socket, sys, time
gc.disable()  # imports create no garbage, and a fifth of their time would be spent on looking for it
from pathlib import Path
from backend.train import __main__ as training, warm_server
for library in warm_server.LIBRARIES:
    importlib.import_module(library)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
get_checkpoint_conversion_mapping("llama")  # the first call compiles a thousand regular expressions: a third of a start
gc.freeze(), gc.enable()  # otherwise the first collection in each rank would copy the pages of all imported modules

def serve_python(folder, parent):
    warm_server.end_with(parent)
    null, log = os.open(os.devnull, os.O_RDONLY), os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(null, 0), os.dup2(log, 1), os.dup2(log, 2)
    warm_server.Server(folder).serve()

folder, parent = Path(sys.argv[1]), os.getpid()
warm = os.fork()
if not warm:
    serve_python(folder, parent)
(folder / "pid").write_text(str(warm))

def run_rank(request, rank, port):
    log = os.open(os.path.join(request["folder"], "log.txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1), os.dup2(log, 2), os.chdir(request["folder"])
    os.environ.update(request["env"])
    if request["ranks"]:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(request["ranks"]),
            LOCAL_WORLD_SIZE=str(request["ranks"]), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys.argv[1:], code = [".", *request["arguments"]], 0
    try:
        runpy.run_path(request["script"]) if request["script"] else training.main()
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    multiprocessing.util._exit_function()  # as at interpreter exit: ends the DataLoader workers
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)

for line in sys.stdin:
    request = json.loads(line)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    alive, exit_code, deadline = set(), 0, time.monotonic() + request["seconds"]
    for rank in range(request["ranks"] or 1):
        child = os.fork()
        if not child:
            run_rank(request, rank, port)
        alive.add(child)
    while alive:
        for child in list(alive):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                alive.discard(child)
                exit_code = exit_code or os.waitstatus_to_exitcode(status)
        if exit_code or time.monotonic() > deadline:  # as torchrun does: a failed rank ends the others
            exit_code = exit_code or 124
            for child in alive:
                os.kill(child, 9)
        time.sleep(0.02)
    print(exit_code, flush=True)
os.kill(warm, signal.SIGKILL), os.waitpid(warm, 0)
"""
# Only what takes seconds to import is forked. Everything else that a job does with Python is done by Python.
PYTHON_CODE = """\
#!/bin/sh
case "$1 $2 $3" in
    "-m torch.distributed.run "*|"-m deepspeed.launcher."*|"-m accelerate."*|"-m backend.train"*|\\
    "-m backend.inference"*|"-u -m backend.train"*)
        FOOTPLATE_WARM={server} exec {standin} "$@" ;;
    *) exec {python} "$@" ;;
esac
"""


@dataclass(frozen=True)
class ForkServer:
    """Runs trainings on a CPU, one at a time. `marker` is the run marker of its processes; `cache` is the model
    cache."""

    process: subprocess.Popen[str]
    marker: Path
    cache: Path

    @property
    def python(self) -> Path:
        """A program that stands in for Python; the launchers and ranks that it starts are forked."""
        deadline = time.monotonic() + 300
        while not (self.marker / "warm" / warm_python.NAME).exists():  # the libraries are still being imported
            assert self.process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        return self.marker / "python"

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
        variables = {**env, "FOOTPLATE_CACHE": str(self.cache), "OMP_NUM_THREADS": THREADS, RUN_MARKER: str(folder)}
        request = {"folder": str(folder), "env": variables, "ranks": ranks, "arguments": arguments, "seconds": seconds}
        request |= {"script": script}
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        code = int(self.process.stdout.readline())
        for orphan in self.leftover_processes(0) if code else ():  # DataLoader workers of a rank that was killed
            with suppress(ProcessLookupError):
                os.kill(orphan.pid, signal.SIGKILL)
        return code

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
        deadline, servers = time.monotonic() + seconds, {self.process.pid}
        with suppress(OSError):  # the libraries are still being imported
            servers.add(int((self.marker / "warm/pid").read_text()))
        while leftovers := {p for p in processes.run_processes(self.marker) if p.pid not in servers}:
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return leftovers


@contextmanager
def forked_inspection(server: ForkServer, folder: Path) -> Iterator[None]:
    """The checks of this process use inspection workers that the server forks, with their results in `folder`."""
    command = (str(server.python), *worker.ARGUMENTS)
    tables, reports = ModuleTables(folder, command=command), ExampleReports(folder, command=command)
    speeds = CpuSpeeds(folder, command=command)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(worker.SETTING, "on")
        patch.setattr(architecture, "_tables", lambda _: tables)
        patch.setattr(examples, "_reports", lambda _: reports)
        patch.setattr(cpu_speed, "_speeds", lambda _: speeds)
        try:
            yield
        finally:
            tables.close()
            reports.close()
            speeds.close()


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
    warm = folder / "warm"
    warm.mkdir()
    words = {"server": warm / warm_python.NAME, "standin": warm / warm_python.STAND_IN, "python": sys.executable}
    (folder / "python").write_text(PYTHON_CODE.format_map({name: shlex.quote(str(w)) for name, w in words.items()}))
    (folder / "python").chmod(0o755)
    command = [sys.executable, "-c", SERVER_CODE, str(warm)]
    env = {**environment(folder, folder), "HF_MODULES_CACHE": str(folder / "modules")}  # for code of a model's folder
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield ForkServer(process, folder, folder)
        assert process.stdin
        process.stdin.close()
        assert process.wait(30) == 0
    assert not processes.run_processes(folder)
