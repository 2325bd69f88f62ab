"""Detects a rank that no longer runs: stopped, swapped out, or on a host that hangs.

Each rank has a thread that writes a counter into torch's store, or into a file if the store is one, and reads those of
the others. So parallel.ddp_timeout also holds where ranks wait for work that may take hours (rank 0 prepares data, or
saves), and the error names the rank, which the error of a collective does not.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from backend.runs import ERROR_FILE
from backend.train.run_log import TrainError
from backend.train.stacks import Stacks

LEFT = "left"
AGENT_HAS_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # "True", by torchrun: its agent has the store, not rank 0
# What gloo, torch's store and NCCL write in torch 2.13.
TIMED_OUT = re.compile(r"(?i)timed out waiting \d+ ?ms|timeout caused pair closure|wait timeout|operation timeout")
VOTE_SECONDS = 3.0  # between the time-outs of ranks that wait in the same collective


class Files:
    """Replaces torch's store for ranks that meet in a FileStore in `folder`: a small file for each key. It is
    overwritten in place, for which a full disk has room. FileStore appends: after a record that a full disk cut off,
    every later call waits forever for the rest of it. The files stay open, so that the folder can be renamed."""

    SIZE = 256  # bytes; longer than every value

    def __init__(self, folder: Path) -> None:
        self._folder, self._open = folder, dict[str, int]()

    def set(self, key: str, value: str) -> None:
        """Raises OSError if the disk fails."""
        os.pwrite(self._file(key, os.O_CREAT), value.encode().ljust(self.SIZE), 0)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values; b"" for a key that has none yet."""
        return [self._read(key) for key in keys]

    def check(self, keys: list[str]) -> bool:
        """Whether all of these keys have a value."""
        return all(map(self._read, keys))

    def _read(self, key: str) -> bytes:
        try:
            return os.pread(self._file(key), self.SIZE, 0).rstrip()
        except FileNotFoundError:
            return b""

    def _file(self, key: str, flags: int = 0) -> int:
        if key not in self._open:
            self._open[key] = os.open(self._folder / key.replace("/", "-"), os.O_RDWR | flags, 0o600)
        return self._open[key]


def _store(timeout: float) -> Any:
    """The store of the heartbeats: a separate connection to torch's store, because a rank that waits for a key blocks
    the other threads on its connection."""
    store: Any = dist.distributed_c10d._get_default_store()
    inner = store
    while isinstance(inner, dist.PrefixStore):
        inner = inner.underlying_store
    if isinstance(inner, dist.FileStore):
        return Files(Path(inner.path).parent)
    own = store.clone()
    own.set_timeout(timedelta(seconds=timeout))
    return own


class Heartbeat:
    """The heartbeats of all ranks; `timeout` is parallel.ddp_timeout in seconds. torch's process group must exist.
    The thread also writes the collectives into `stacks` when someone asks what the ranks do."""

    def __init__(self, rank: int, world: int, timeout: float, stacks: Stacks) -> None:
        self.stacks = stacks
        self.rank, self.others, self.timeout = rank, [r for r in range(world) if r != rank], timeout
        self.interval = min(5.0, max(0.1, timeout / 10))
        self.store = _store(timeout)
        self._count, self._last = 0, time.monotonic()
        self._seen: dict[int, str] = dict.fromkeys(self.others, "")
        self._silent: dict[int, float] = dict.fromkeys(self.others, 0.0)  # seconds without a change
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="heartbeat")
        self._beat()

    def start(self) -> None:
        """Start the thread. All ranks must have been constructed."""
        self._thread.start()

    def leave(self) -> None:
        """Stop; the other ranks no longer expect a heartbeat of this one."""
        if not self._ended.is_set():
            self._ended.set()
            self._thread.join(self.timeout)
            with suppress(RuntimeError, OSError):  # the process that has the store has ended, or the disk fails
                self.store.set(self._key(self.rank), LEFT)

    def check_timeout(self, error: RuntimeError) -> None:
        """Raise TrainError that names the ranks that others waited for, if `error` is a time-out of a collective."""
        if not TIMED_OUT.search(str(error)):
            return
        silent = [r for r in self.others if self._silent[r] > 3 * self.interval]
        if silent:
            raise TrainError(self._describe(silent)) from error
        try:
            waiting = {self.rank, *self._vote()}
        except (RuntimeError, OSError):  # the process that has the store has ended, or the disk fails
            return
        missing = [r for r in self.others if r not in waiting]
        if missing:
            name = ", ".join(map(self._name, missing))
            raise TrainError(
                f"Rank {name} did not take part in a collective within {self.timeout:g} s (parallel.ddp_timeout), "
                "while the others waited. Check its log for the cause; if a step takes that long, raise "
                "parallel.ddp_timeout."
            ) from error

    def _vote(self) -> list[int]:
        """The other ranks whose collective timed out too."""
        self.store.set(f"{self._key(self.rank)}/timeout", "1")
        deadline = time.monotonic() + VOTE_SECONDS
        found: list[int] = []
        while len(found) < len(self.others) and time.monotonic() < deadline:
            time.sleep(0.1)
            found = [r for r in self.others if self.store.check([f"{self._key(r)}/timeout"])]
        return found

    def _run(self) -> None:
        while not self._ended.wait(self.interval):
            began = time.monotonic()
            self.stacks.write_collectives()
            try:
                self._beat()
                self._listen()
            except OSError:  # the disk fails, also for the other ranks: they are not silent
                self._last = time.monotonic()
                continue
            except RuntimeError:
                if time.monotonic() - began < 0.9 * self.timeout or os.environ.get(AGENT_HAS_STORE) == "True":
                    return  # the process that has the store has ended, or torchrun was stopped: training can continue
                self._end([0])
            silent = [r for r in self.others if self._silent[r] > self.timeout]
            if silent and not self._ended.is_set():
                self._end(silent)

    def _beat(self) -> None:
        self._count += 1
        self.store.set(self._key(self.rank), f"{self._count} {os.getpid()} {socket.gethostname()}")

    def _listen(self) -> None:
        """Add to the silence of each rank the time that this thread has really waited: a whole run that was stopped for
        an hour may continue."""
        now = time.monotonic()
        passed, self._last = min(now - self._last, 2 * self.interval), now
        found = self.store.multi_get([self._key(r) for r in self.others])
        for rank, value in zip(self.others, map(bytes.decode, found), strict=True):
            alive = value in (LEFT, "") or value != self._seen[rank]
            self._silent[rank] = 0.0 if alive else self._silent[rank] + passed
            self._seen[rank] = value

    def _end(self, silent: list[int]) -> None:
        """End this process from the thread: the main thread waits in native code."""
        try:
            raise TrainError(self._describe(silent))
        except TrainError as error:
            if os.environ.get(ERROR_FILE):
                get_error_handler().record_exception(error)
            if not [r for r in self.others if r < self.rank and r not in silent]:
                print(error, file=sys.stderr, flush=True)
        os._exit(1)

    def _describe(self, silent: list[int]) -> str:
        return (
            f"Rank {', '.join(map(self._name, silent))} has not responded for {self.timeout:g} s "
            "(parallel.ddp_timeout): its process is stopped or hangs, or its host is not reachable. Resume continues "
            "from the last complete checkpoint."
        )

    def _name(self, rank: int) -> str:
        _, process, host = [*self._seen[rank].split(), "", "", ""][:3]
        return f"{rank} (PID {process} on {host})" if process else str(rank)

    @staticmethod
    def _key(rank: int) -> str:
        return f"footplate/heartbeat/{rank}"
