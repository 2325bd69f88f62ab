"""What the routes share: the runs folder, drafts, keys of starts, the machine as last seen, and summaries kept.

Floor 6. Imports: machine, options, run.folder, drafts. Everything here can be thrown away: truth is on the disk.
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
from backend.runs import LOCK, PLAN, STATE
from backend.runs.folder import Run
from backend.runs.metrics import Metrics
from webui.drafts import Drafts

MACHINE_SECONDS = 5.0
MOST_KEYS = 500
MOST_READERS = 16


class Seen:
    """A value that takes time to find: the last one is given at once, and renewed in the background."""

    def __init__(self, find: Callable[[], Machine], seconds: float = MACHINE_SECONDS) -> None:
        self._find = find
        self._seconds = seconds
        self._value: Machine | None = None
        self._until = 0.0
        self._lock = threading.Lock()

    def get(self) -> Machine:
        """The last value; only the very first caller waits."""
        if self._value is None:
            with self._lock:
                if self._value is None:
                    self._look()
        elif time.monotonic() > self._until:
            self.refresh()
        assert self._value is not None
        return self._value

    def refresh(self) -> None:
        """Look again in the background, unless somebody does."""
        if self._lock.acquire(blocking=False):
            threading.Thread(target=self._locked_look, daemon=True).start()

    def _locked_look(self) -> None:
        try:
            self._look()
        finally:
            self._lock.release()

    def _look(self) -> None:
        self._value = self._find()
        self._until = time.monotonic() + self._seconds


class Keys:
    """Which run was made for a start's key: a double click, or a retry after a restart, makes one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def alone(self) -> Iterator[None]:
        """One start at a time, also among several servers of one folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def run_of(self, key: str) -> str:
        """The run's id, '' for a new key. `key` is checked by the caller."""
        try:
            return (self.folder / key).read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    def keep(self, key: str, run: str) -> None:
        """Remember; the oldest make room."""
        (self.folder / key).write_text(run, encoding="utf-8")
        found = sorted(self.folder.glob("[!.]*"), key=lambda path: path.stat().st_mtime_ns)
        for path in found[: max(0, len(found) - MOST_KEYS)]:
            path.unlink(missing_ok=True)


class Summaries:
    """The list of runs, cheap with a thousand of them: what has ended is read once, until it is started again."""

    ENDED = ("done", "stopped", "failed", "lost")

    def __init__(self, root: Path, read: Callable[[Run], dict[str, Any]] = Run.summary) -> None:
        self.root = root
        self._read = read
        self._kept: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {}

    def all(self) -> list[dict[str, Any]]:
        """Every run's summary, newest first."""
        try:
            names = sorted((name for name in os.listdir(self.root) if name[0] != "."), reverse=True)
        except FileNotFoundError:  # somebody removed the folder: the next run makes it again
            names = []
        for gone in set(self._kept) - set(names):
            self._kept.pop(gone, None)
        return [summary for summary in map(self._one, names) if summary]

    def _one(self, name: str) -> dict[str, Any] | None:
        # Every start writes the lock, every end the state.
        stamp = tuple(_changed(f"{self.root}/{name}/{file}") for file in (PLAN, LOCK, STATE))
        if not stamp[0]:
            return None  # no run
        before = self._kept.get(name)
        if before and before[0] == stamp:
            return before[1]
        summary = self._read(Run(self.root / name))
        if summary["state"] in self.ENDED:
            self._kept[name] = (stamp, summary)
        return summary


def _changed(path: str) -> int:
    """When `path` was last written, in ns; 0 where it is not."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


class Desk:
    """One for each app."""

    def __init__(self, root: Path, machine: Callable[[Path], Machine] = probe) -> None:
        self.runs = root
        self.drafts = Drafts(root / ".drafts")
        self.keys = Keys(root / ".keys")
        self.summaries = Summaries(root)
        self.machine = Seen(lambda: machine(root))
        self.machines = machines()
        self._metrics: OrderedDict[Path, Metrics] = OrderedDict()
        self._lock = threading.Lock()

    def metrics(self, path: Path) -> Metrics:
        """What a run's metrics file says now. The readers of the last few runs are kept: they read only what is new."""
        with self._lock:
            reader = self._metrics.pop(path, None) or Metrics(path)
            self._metrics[path] = reader
            while len(self._metrics) > MOST_READERS:
                self._metrics.popitem(last=False)
        reader.read()
        return reader

    def forget(self, path: Path) -> None:
        """Let go of a deleted run's reader."""
        with self._lock:
            self._metrics.pop(path, None)
