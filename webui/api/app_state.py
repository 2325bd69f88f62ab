"""What the endpoints share: the runs folder, drafts, idempotency keys, the cached machine and run summaries.

Imports: machine, runs, drafts. Everything here is a cache or is stored below the runs folder, so a restart of the
server loses nothing.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from backend.machine import Machine, machines, probe
from backend.measured import MeasuredPeaks
from backend.runs import LOCK, PLAN, STATE, ownership, replace_text
from backend.runs.folder import Run
from backend.runs.metrics import Metrics
from webui.drafts import Drafts

MACHINE_SECONDS = 5.0
MAX_KEYS = 500
MAX_METRICS_READERS = 24  # a comparison has 20 runs


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
    """The run created for each start key: a double click, or a retry after a restart, creates one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def lock(self) -> Iterator[None]:
        """One start at a time, also across several servers on the same folder."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def run_of(self, key: str) -> str:
        """The id of the key's run, '' for a new key. The caller validates `key`."""
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


class RunSummaries:
    """The list of runs, fast with a thousand of them: an ended run is read once, until it is started again."""

    ENDED = ("done", "stopped", "failed", "lost")

    def __init__(self, root: Path, read: Callable[[Run], dict[str, Any]] = Run.summary) -> None:
        self.root = root
        self._read = read
        self._cache: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {}

    def all(self) -> list[dict[str, Any]]:
        """The summary of every run, newest first."""
        try:
            names = sorted((name for name in os.listdir(self.root) if name[0] != "."), reverse=True)
        except FileNotFoundError:  # somebody deleted the folder: the next run creates it again
            names = []
        for deleted in set(self._cache) - set(names):
            self._cache.pop(deleted, None)
        return [summary for summary in map(self._summary, names) if summary]

    def _summary(self, name: str) -> dict[str, Any] | None:
        # Every start writes the lock, every end the state.
        stamp = tuple(_modified_ns(f"{self.root}/{name}/{file}") for file in (PLAN, LOCK, STATE))
        if not stamp[0]:
            return None  # not a run
        cached = self._cache.get(name)
        if cached and cached[0] == stamp:
            return cached[1]
        if why := ownership.problem(self.root / name):
            return _unusable(name, why)
        try:
            summary = self._read(Run(self.root / name))
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            # One broken run must not hide the others.
            return _unusable(name, f"The files of this run cannot be read ({type(error).__name__}: {error}).")
        if summary["state"] in self.ENDED:
            self._cache[name] = (stamp, summary)
        return summary


def _unusable(name: str, why: str) -> dict[str, Any]:
    """The summary of a run that cannot be shown, resumed or deleted here."""
    unknown = dict.fromkeys(("started", "ended", "step", "max_steps", "loss", "fraction", "eta_seconds", "created"))
    return {"id": name, "name": name, "state": "lost", **unknown, "method": "", "model": "", "sentence": why}


def _modified_ns(path: str) -> int:
    """When `path` was last written, in ns; 0 if it does not exist."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


class AppState:
    """The shared state of one app."""

    def __init__(self, root: Path, detect_machine: Callable[[Path], Machine] = probe) -> None:
        self.runs = root
        self.drafts = Drafts(root / ".drafts")
        self.keys = IdempotencyKeys(root / ".keys")
        self.summaries = RunSummaries(root)
        self.peaks = MeasuredPeaks(root)
        self.machine = CachedMachine(lambda: detect_machine(root))
        self.machines = machines()
        self._readers: OrderedDict[Path, Metrics] = OrderedDict()
        self._lock = threading.Lock()

    def metrics(self, path: Path) -> Metrics:
        """The current content of a metrics file. Cached readers of the last few runs read only what was appended."""
        with self._lock:
            reader = self._readers.pop(path, None) or Metrics(path)
            self._readers[path] = reader
            while len(self._readers) > MAX_METRICS_READERS:
                self._readers.popitem(last=False)
        reader.read()
        return reader

    def forget_metrics(self, path: Path) -> None:
        """Drop the reader of a deleted run."""
        with self._lock:
            self._readers.pop(path, None)
