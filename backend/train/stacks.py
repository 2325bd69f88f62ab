"""Tells what this rank is doing when someone asks (`runs/stacks.py`, `footplate stacks`)."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

from torch._C import _distributed_c10d

from backend.runs import STACKS, files, processes
from backend.runs.stacks import REQUEST

BUFFER_SIZE = "TORCH_FR_BUFFER_SIZE"  # entries of torch's Flight Recorder, which records collectives; 0: off


class Stacks:
    """The files of one rank in the run's `folder`; `rank` is the global one."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.request, self.path = folder / STACKS / REQUEST, folder / STACKS / f"{rank}.txt"
        self._answered: str | None = None

    def write_on_request(self) -> None:
        """From now on SIGUSR2 writes the stacks of all threads. Call this before the process group exists, which then
        records collectives."""
        os.environ.setdefault(BUFFER_SIZE, "2000")
        with contextlib.suppress(OSError):  # a full disk must not prevent training
            self.path.parent.mkdir(exist_ok=True)
            started = processes.started(os.getpid())
            header = f"PID {os.getpid()}, started at {started}, on {socket.gethostname()}\n"
            temporary = self.path.with_suffix(".new")
            temporary.write_text(header, encoding="utf-8")
            file = os.open(temporary, os.O_WRONLY | os.O_APPEND)  # kept open: faulthandler writes to the descriptor
            faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)
            self.path.with_suffix(".json").unlink(missing_ok=True)  # written before torchrun restarted the process
            temporary.replace(self.path)  # the file tells readers that the signal is safe, so it comes last

    def write_collectives(self) -> None:
        """Write which collectives this rank entered last, if they were requested since the last call. The first call
        always writes, which tells readers to wait for answers."""
        with contextlib.suppress(OSError):
            request = files.read_text(self.request, errors="replace") if self.request.exists() else ""
            if request == self._answered:
                return
            temporary, target = self.path.with_suffix(".json.new"), self.path.with_suffix(".json")
            last: dict[str, tuple[int, str, float]] = {}
            try:
                last = _last_collectives()
            except Exception as error:  # torch's private interface must not end the heartbeat thread, which is here
                print(f"torch's record of collectives could not be read: {error!r}", file=sys.stderr, flush=True)
            answer = {"request": request, "time": time.time(), "last": last}
            temporary.write_text(json.dumps(answer), encoding="utf-8")
            temporary.replace(target)
            self._answered = request


def _last_collectives() -> dict[str, tuple[int, str, float]]:
    """Process group -> number, name and time (Unix seconds) of the collective that this rank entered last, from what
    torch's Flight Recorder has of NCCL and of gloo. Before the first collective it has no "entries"."""
    found: dict[str, tuple[int, str, float]] = {}
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump = getattr(_distributed_c10d, name, None)
        for entry in json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", ()) if dump else ():
            group, number = " ".join(entry["process_group"]), int(entry["collective_seq_id"])
            if number >= found.get(group, (0,))[0]:
                collective = str(entry["profiling_name"]).rpartition(":")[2]
                found[group] = (number, collective, entry["time_created_ns"] / 1e9)
    return found
