"""A host that imports the libraries once and forks the ranks of one training after another, about a second each.

What a rank runs is backend.train's own main, told of its rank by the environment as torchrun tells it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from trainings import THREADS, environment, lay, text

from backend import registry
from backend.config import RunSpec
from backend.config.processes import nproc_per_node
from backend.launch.plan import plan
from backend.machine import Machine
from backend.runs import RUN_MARKER, processes

HOST = """
import gc, importlib, json, multiprocessing.util, os, runpy, socket, sys, time
from backend.train import __main__ as training, training as _
import deepspeed, torch.distributed.fsdp, trl.experimental
gc.collect(), gc.freeze()  # or every rank's first collection would walk, and copy, all that was imported

def rank(order, number, port):
    log = os.open(os.path.join(order["folder"], "log.txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1), os.dup2(log, 2), os.chdir(order["folder"])
    os.environ.update(order["env"])
    if order["ranks"]:
        os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(order["ranks"]),
            LOCAL_WORLD_SIZE=str(order["ranks"]), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys.argv[1:], code = [".", *order["arguments"]], 0
    try:
        runpy.run_path(order["script"]) if order["script"] else training.main()
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    multiprocessing.util._exit_function()  # as Python when it ends: it takes the readers of rows along
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)

for line in sys.stdin:
    order = json.loads(line)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    alive, worst, until = set(), 0, time.monotonic() + order["seconds"]
    for number in range(order["ranks"] or 1):
        child = os.fork()
        if not child:
            rank(order, number, port)
        alive.add(child)
    while alive:
        for child in list(alive):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                alive.discard(child)
                worst = worst or os.waitstatus_to_exitcode(status)
        if worst or time.monotonic() > until:  # as torchrun: one that fails ends the others
            worst = worst or 124
            for child in alive:
                os.kill(child, 9)
        time.sleep(0.02)
    print(worst, flush=True)
"""


@dataclass(frozen=True)
class Host:
    """Starts trainings on a CPU, one at a time. All its processes carry `mark`; `cache` holds the models."""

    process: subprocess.Popen[str]
    mark: Path
    cache: Path

    def run(
        self,
        folder: Path,
        ranks: int = 0,
        *arguments: str,
        env: Mapping[str, str] = {},
        seconds: float = 400,
        script: str = "",
    ) -> int:
        """The exit code of the training in `folder`, by `ranks` ranks; 0 ranks: one plain process. 124: too long.

        As under a launcher, the first rank that fails ends the others. Nothing of it is left. `script`: a file of
        Python to run in its stead.
        """
        own = {**env, "FOOTPLATE_CACHE": str(self.cache), "OMP_NUM_THREADS": THREADS, RUN_MARKER: str(folder)}
        order = {"folder": str(folder), "env": own, "ranks": ranks, "arguments": arguments, "seconds": seconds}
        order |= {"script": script}
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        code = int(self.process.stdout.readline())
        for orphan in self.left(0) if code else ():  # of a rank that was killed: the readers of its rows
            with suppress(ProcessLookupError):
                os.kill(orphan.pid, signal.SIGKILL)
        return code

    def train(self, folder: Path, spec: RunSpec, ranks: int = 0, env: Mapping[str, str] = {}) -> Path:
        """Plan `spec` into the new `folder`, train it, and insist that it ended well."""
        write(folder, spec)
        assert self.run(folder, ranks, env=env) == 0, text(folder)
        return folder

    def go_on(self, folder: Path, step: int, ranks: int = 0, env: Mapping[str, str] = {}) -> None:
        """Train once more from the checkpoint of `step`; later ones are taken away."""
        for later in (folder / "checkpoints").iterdir():
            if int(later.name.rpartition("-")[2]) > step:
                shutil.rmtree(later)
        assert self.run(folder, ranks, env=env) == 0, text(folder)
        assert f"Resuming from checkpoint-{step}." in text(folder)

    def left(self, seconds: float = 2) -> set[processes.Process]:
        """What trainings have left, and is still there after `seconds`."""
        until = time.monotonic() + seconds
        while found := {p for p in processes.run_processes(self.mark) if p.pid != self.process.pid}:
            if time.monotonic() > until:
                break
            time.sleep(0.05)
        return found


def write(folder: Path, spec: RunSpec) -> None:
    """The files of a plan."""
    lay(plan(spec, Machine()), folder)


def ranks(spec: RunSpec) -> int:
    """How many a launcher would start on this machine; 0: the training is one plain process."""
    many = spec.parallel.strategy in registry.MULTI_PROCESS and spec.launch.launcher != "python"
    return nproc_per_node(spec) if many else 0


@contextmanager
def a_host(mark: Path) -> Iterator[Host]:
    """A host with its models in the folder `mark`; at the end nothing of it is left."""
    command = [sys.executable, "-c", HOST]
    with subprocess.Popen(
        command, env=environment(mark, mark), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Host(process, mark, mark)
        assert process.stdin
        process.stdin.close()
        assert process.wait(30) == 0
    assert not processes.run_processes(mark)
