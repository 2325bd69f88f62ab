"""What the endpoints share: the runs folder, drafts, idempotency keys, the cached machine, the list of runs.

Everything here is a cache or is stored below the runs folder, so a restart of the server loses nothing.
"""

from __future__ import annotations

import asyncio
import fcntl
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from backend.machine import Machine, machines, probe
from backend.presets import presets
from backend.runs import replace_text
from backend.runs.listing import RunList
from backend.tasks.measured import MeasuredPeaks
from backend.tasks.measured_time import MeasuredStarts, MeasuredTimes
from webui.curves import Curves
from webui.custom_machines import CustomMachines
from webui.drafts import Drafts
from webui.uploads import Uploads

MACHINE_SECONDS = 5.0
CHECKS_AT_ONCE = 4  # checks use at most this many of the 40 threads that run the server's endpoints
MAX_KEYS = 500
MAX_CURVES_READERS = 24  # enough for a comparison of 20 runs


class CachedMachine:
    """This machine. Detection takes a moment, so callers get the last value while a thread refreshes it."""

    def __init__(self, detect: Callable[[], Machine], seconds: float = MACHINE_SECONDS) -> None:
        self._detect = detect
        self._seconds = seconds
        self._value: Machine | None = None
        self._valid_until = 0.0
        self._lock = threading.Lock()

    def get(self) -> Machine:
        """The last value. Only the very first caller waits."""
        if self._value is None:
            with self._lock:
                if self._value is None:
                    self._update()
        elif time.monotonic() > self._valid_until:
            self.refresh()
        assert self._value is not None
        return self._value

    def refresh(self) -> None:
        """Detect the machine in the background, unless that is already in progress."""
        if self._lock.acquire(blocking=False):
            threading.Thread(target=self._update_and_release, daemon=True).start()

    def _update_and_release(self) -> None:
        try:
            self._update()
        finally:
            self._lock.release()

    def _update(self) -> None:
        self._value = self._detect()
        self._valid_until = time.monotonic() + self._seconds


class IdempotencyKeys:
    """The run created for each start key: a double click, or a retry after a restart, creates only one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Allow one start at a time, even if several servers use the same folder."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def run_of(self, key: str) -> str:
        """The id of the run that was created for the key; '' for a new key. The caller validates `key`."""
        try:
            return (self.folder / key).read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    def save(self, key: str, run: str) -> None:
        """Store the key's run, and delete the oldest keys."""
        replace_text(self.folder / key, run, mode=0o600)
        keys = sorted(self.folder.glob("[!.]*"), key=lambda path: path.stat().st_mtime_ns)
        for path in keys[: max(0, len(keys) - MAX_KEYS)]:
            path.unlink(missing_ok=True)


class AppState:
    """The shared state of one app."""

    def __init__(self, root: Path, detect_machine: Callable[[Path], Machine] = probe) -> None:
        self.runs = root
        self.drafts = Drafts(root / ".drafts")
        self.keys = IdempotencyKeys(root / ".keys")
        self.runs_list = RunList(root)
        self.peaks, self.times, self.starts = MeasuredPeaks(root), MeasuredTimes(root), MeasuredStarts(root)
        self.machine = CachedMachine(lambda: detect_machine(root))
        self.machines = machines()
        self.custom_machines = CustomMachines(root / ".machines", self.machines)
        self.uploads = Uploads((root / ".uploads").absolute())
        self.presets = cache(presets)
        self.checks = asyncio.Semaphore(CHECKS_AT_ONCE)
        self._readers: OrderedDict[Path, Curves] = OrderedDict()
        self._lock = threading.Lock()

    def curves(self, path: Path, seconds: float = math.inf) -> Curves:
        """The current curves of a metrics file. The first read of a file covers only what can be read in about
        `seconds`. The readers of the last few runs are cached, and read only what was appended."""
        with self._lock:
            reader = self._readers.pop(path, None) or Curves(path)
            self._readers[path] = reader
            while len(self._readers) > MAX_CURVES_READERS:
                self._readers.popitem(last=False)
        reader.read(seconds)
        return reader

    def forget_curves(self, path: Path) -> None:
        """Drop the reader of a deleted run."""
        with self._lock:
            self._readers.pop(path, None)
