"""Measurements of earlier runs, which say how far the next estimate may be off.

Cheap enough for every check: only the newest runs of a folder are read, names are listed every few seconds, and a run
is read again only after it was started or has ended.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Generic, TypeVar

from backend.runs import ESTIMATE, LOCK, RESULT, STATE, files, ownership
from backend.runs.folder import Run

M = TypeVar("M")
MAX_RUNS = 400  # of the folder, the newest first
MAX_CANDIDATES = 20  # comparable runs that are searched for a result: stopped runs have none
LISTED_SECONDS = 5.0
COMPARED = "compared"  # begins the keys of estimate.json that say what a run can be compared by


class EarlierRuns(Generic[M]):
    """What the runs in a folder measured: `measure` returns None for a run that measured nothing, and `key` of its
    estimate.json has what it can be compared by."""

    def __init__(self, root: Path, key: str, measure: Callable[[Run], M | None]) -> None:
        self.root, self.key, self.measure = root, key, measure
        self._names: list[str] = []
        self._listed = 0.0
        self._compared: dict[str, tuple[str, ...]] = {}
        self._measured: dict[str, tuple[tuple[int, ...], M | None]] = {}
        self._lock = threading.Lock()

    def newest(self, compared: tuple[str, ...], without: str = "") -> M | None:
        """The newest measurement of a run with the same `compared`, except of the run `without`."""
        return next(iter(self.several(compared, 1, without)), None)

    def several(self, compared: tuple[str, ...], count: int, without: str = "") -> list[M]:
        """Same as `newest`, for up to `count` runs, the newest first."""
        with self._lock:
            names = [name for name in self._newest() if name != without]
            comparable = itertools.islice((name for name in names if self._settings(name) == compared), MAX_CANDIDATES)
            found = (self._measurement(name) for name in comparable)
            return list(itertools.islice((each for each in found if each is not None), count))

    def _newest(self) -> list[str]:
        if not self._names or time.monotonic() - self._listed > LISTED_SECONDS:
            try:
                names = [name for name in os.listdir(self.root) if name[0] != "."]
            except OSError:
                names = []
            self._names = sorted(names, reverse=True)[:MAX_RUNS]
            self._listed = time.monotonic()
            for kept in (self._compared, self._measured):
                for name in set(kept) - set(self._names):
                    kept.pop(name, None)
        return self._names

    def _settings(self, name: str) -> tuple[str, ...]:
        """What the run can be compared by; () without an estimate. Written once, when a run is created."""
        if name not in self._compared:
            path = self.root / name / ESTIMATE
            self._compared[name] = _comparable(path, _modified_ns(path)).get(self.key, ())
        return self._compared[name]

    def _measurement(self, name: str) -> M | None:
        folder = self.root / name
        stamp = tuple(_modified_ns(folder / file) for file in (LOCK, STATE, RESULT))
        if name not in self._measured or self._measured[name][0] != stamp:
            usable = not ownership.problem(folder)
            self._measured[name] = stamp, self.measure(Run(folder)) if usable else None
        return self._measured[name][1]


@lru_cache(maxsize=2 * MAX_RUNS)
def _comparable(path: Path, changed_ns: int) -> Mapping[str, tuple[str, ...]]:
    """What an estimate.json has for all kinds of measurements, which is read once."""
    del changed_ns  # a key of the cache
    try:
        estimate = json.loads(files.read_text(path))
        return {key: tuple(map(str, value)) for key, value in estimate.items() if key.startswith(COMPARED)}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _modified_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
