"""RunList: one list of all runs for every reader, which reads a run again only after its files have changed.

A row is the summary of a run, its values for the columns in search.py, and its annotations. Many clients poll the list:
those that wait at the same time share one scan of the folder, and each is sent only the rows that changed since its
last request. The rows of runs that are not alive are kept in a file of the runs folder, so that a new process need not
read thousands of folders.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.runs import (
    EVALUATED,
    FORGETTING,
    GENERAL_LOSS,
    LOCK,
    MODEL,
    PLAN,
    STATE,
    files,
    json_values,
    marks,
    notebook,
    ownership,
    processes,
    replace_text,
    sweeps,
    throughput,
    validation,
)
from backend.runs.folder import UNREADABLE, Run, damage
from backend.runs.search import SCORES

Row = dict[str, Any]
INDEX = ".index.json"  # in the runs folder: the rows of runs that are not alive
INDEX_AFTER = 50  # rows read since the index was written: rereading fewer is faster than writing it
REST = 10  # a long scan is followed by a pause of this many times its CPU time
SHORT_SECONDS = 0.02  # of CPU time: a shorter scan needs no pause. On a busy machine, small folders stay up to date
MAX_REMOVED = 10_000  # deleted runs that are remembered for clients
SETTLED = ("new", "done", "stopped", "failed", "lost")  # change only with the run's files
TEXTS = ("failure", "mark", "warning", "sweep", "varied")
FORGOTTEN = (GENERAL_LOSS, FORGETTING)
REWARDS = ("reward_accuracy", "reward_margin")
ENDED_EARLY = ("stopped", "failed", "lost")
ABOUT = ("dataset", "stage", "strategy", "learning_rate", "checkpoint")
MEASURED = ("eval_loss", "tokens_per_second", "peak_memory", *SCORES, *REWARDS, *FORGOTTEN)


def row(run: Run) -> Row:
    """A run in the list; None for what is not known. A run that cannot be read has the state damaged."""
    found = run.summary()
    details: Row = {**dict.fromkeys((*ABOUT, *MEASURED)), **dict.fromkeys(TEXTS, "")}
    try:
        details |= _details(run, found["state"])
    except UNREADABLE as error:
        found |= {"state": "damaged", "sentence": damage(error)}
    if found["state"] in ("lost", "damaged"):
        details["failure"] = found["sentence"]
    return {**found, **details, **notebook.read(run.path).as_json()}


def unreadable_row(name: str, why: str) -> Row:
    """The row of a folder in which nothing can be read; it has the same keys as the others."""
    numbers = ("started", "ended", "step", "max_steps", "loss", "fraction", "eta_seconds", "created", "earlier_seconds")
    texts: Row = dict.fromkeys(("method", "model", *TEXTS), "")
    found: Row = {"id": name, "name": name, "state": "damaged", "stalled": False, "sentence": why, "failure": why}
    known = {**dict.fromkeys((*numbers, *ABOUT, *MEASURED)), **texts, **found}
    return {**known, **notebook.Annotations().as_json()}


def _details(run: Run, state: str) -> Row:
    """The values of the columns that the summary does not have. Peak memory is the largest of all ranks."""
    about, result, points = run.about(), run.result(), run.last_points()
    failure = run.failure() if state in ("failed", "stopped") else None
    peaks = result.get("peak_bytes")
    found = marks.mark(run, state)
    part = sweeps.member(run.path)
    return {
        "dataset": about.get("dataset"),
        "stage": about.get("stage"),
        "strategy": about.get("strategy") or run.resolved().get("strategy"),
        "learning_rate": _number(about.get("learning_rate")),
        "eval_loss": validation.loss(run.path, result),
        "tokens_per_second": throughput.tokens_per_second(result, points),
        "peak_memory": max(filter(None, map(_number, peaks if isinstance(peaks, list) else ())), default=None),
        "checkpoint": max(run.checkpoints(), default=None) if state in ENDED_EARLY else None,  # for Resume
        "failure": failure["sentence"] if failure else "",
        "mark": found.name,
        "warning": found.sentence,
        "sweep": part.sweep if part else "",
        # A run that the user has named is listed by that name.
        "varied": sweeps.label(part.varied) if part and not notebook.read(run.path).name else "",
        **{name: _number(result.get(f"{name}_after")) for name in SCORES},
        **{name: _number(result.get(f"eval_{name}")) for name in REWARDS},
        **_forgotten(run),
    }


def _forgotten(run: Run) -> Row:
    """The loss of the final model on general texts, and how much higher it is than that of the base model."""
    try:
        found = json_values.read(run.path / EVALUATED)
        is_current = found.get("model") == (run.path / MODEL).stat().st_mtime_ns  # the run may have trained another one
        return {name: _number(found.get(name)) for name in FORGOTTEN} if is_current else {}
    except (OSError, ValueError, AttributeError):  # the run was not evaluated
        return {}


def _number(value: Any) -> float | None:
    """A finite number, or None."""
    return value if json_values.is_number(value) else None


@dataclass(frozen=True)
class Entry:
    """A row, the stamp of the files that it was read from, and the version of the list in which it changed."""

    stamp: int
    row: Row
    version: int


@dataclass(frozen=True)
class Changes:
    """The rows after `tag`, an earlier state of the list, newest first; `complete`: these are all rows."""

    tag: str
    rows: list[Row]
    removed: list[str]
    complete: bool


class Snapshot(Run):
    """A run for one row: each file is read once."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._texts: dict[str, str] = {}
        self._points: list[Row] | None = None

    def last_points(self) -> list[Row]:
        """Same as `Run.last_points`, but read once."""
        if self._points is None:
            self._points = super().last_points()
        return self._points

    def _text(self, name: str) -> str:
        if name not in self._texts:
            self._texts[name] = super()._text(name)
        return self._texts[name]


class RunList:
    """The rows of all runs in a folder. Thread-safe."""

    def __init__(self, root: Path, read: Callable[[Run], Row] = row) -> None:
        self.root = root
        self._read = read
        self._entries: Mapping[str, Entry] = {}  # newest first; replaced, never changed
        self._removed: dict[str, int] = {}  # id -> the version in which it was removed
        self._version = self._oldest = 0  # since `_oldest`, all removed runs are known
        self._instance = secrets.token_hex(4)  # tags of another process are unknown
        self._lock = threading.Lock()
        self._started, self._rest_until = -math.inf, -math.inf
        self._unsaved: int | None = None  # rows read since the index was written; None: not loaded yet

    def all(self) -> list[Row]:
        """Every row, newest first."""
        self._refresh()
        return [entry.row for entry in self._entries.values()]

    def since(self, tag: str) -> Changes:
        """What changed since the state of the list that `tag` names; everything if it is unknown."""
        self._refresh()
        with self._lock:
            entries, version = self._entries, self._version
            instance, _, number = tag.partition(".")
            known = int(number) if instance == self._instance and number.isdecimal() else -1
            complete = known < self._oldest
            removed = [] if complete else [id for id, gone in self._removed.items() if gone > known]
        rows = [entry.row for entry in entries.values() if complete or entry.version > known]
        return Changes(f"{self._instance}.{version}", rows, removed, complete)

    def expire(self) -> None:
        """Scan at the next request even if it comes during a pause: this process has changed a run."""
        with self._lock:  # a scan that is in progress would set the pause again
            self._rest_until = -math.inf

    # -- scanning ------------------------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        """Scan the folder, unless another scan starts during this call, or the pause after a long scan is not over."""
        called = time.monotonic()
        with self._lock:
            if self._started >= called or called < self._rest_until:
                return
            self._started, used = time.monotonic(), time.thread_time()
            self._scan()
            seconds = time.thread_time() - used
            self._rest_until = time.monotonic() + REST * seconds if seconds > SHORT_SECONDS else -math.inf

    def _scan(self) -> None:
        before = self._entries
        if self._unsaved is None:
            before = {name: Entry(stamp, kept, 1) for name, (stamp, kept) in _load_index(self.root).items()}
            self._version, self._oldest, self._unsaved = 1, 1, 0
        try:
            names = sorted((name for name in os.listdir(self.root) if name[0] != "."), reverse=True)
        except OSError:  # the folder was deleted: the next run creates it again
            names = []
        entries = {name: entry for name in names if (entry := self._entry(name, before.get(name)))}
        removed = before.keys() - entries.keys()
        if removed or any(entry.version > self._version for entry in entries.values()):
            self._version += 1
        self._removed = {name: gone for name, gone in self._removed.items() if name not in entries}
        self._removed |= dict.fromkeys(removed, self._version)
        if len(self._removed) > MAX_REMOVED:
            self._removed, self._oldest = {}, self._version
        self._entries = entries
        if self._unsaved >= INDEX_AFTER:
            self._unsaved = 0
            _save_index(self.root, entries)

    def _entry(self, name: str, known: Entry | None) -> Entry | None:
        """The entry of a run: the known one if nothing has changed; None for a folder that is not a run."""
        path = f"{self.root}/{name}"
        stamp = _stamp(path)
        if stamp is None:
            return None
        if known and known.stamp == stamp:
            state = known.row["state"]
            if state in SETTLED or (state == "queued" and processes.is_locked(Path(path))):
                return known
        found = self._row(name)
        if found["state"] in SETTLED:
            self._unsaved = (self._unsaved or 0) + 1
        if known and known.row == found:
            return known if known.stamp == stamp else Entry(stamp, found, known.version)
        return Entry(stamp, found, self._version + 1)

    def _row(self, name: str) -> Row:
        why = ownership.problem(self.root / name)
        if not why:
            try:
                return self._read(Snapshot(self.root / name))
            except UNREADABLE as error:  # one broken run must not hide the others
                why = damage(error)
        return unreadable_row(name, why)


def _stamp(path: str) -> int | None:
    """A value that changes with the files of a run that is not alive; None if this is not a run. The folder's own time
    changes with every file that is replaced, added or deleted; other files are written in place, or by hand."""
    try:
        plan = os.stat(f"{path}/{PLAN}")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        return 0  # a run that cannot be read
    found = [plan.st_ctime_ns, plan.st_size]
    for file in ("", LOCK, STATE):
        try:
            status = os.stat(f"{path}/{file}")
            found += (status.st_ino, status.st_ctime_ns, status.st_size)
        except OSError:
            found.append(0)
    return hash(tuple(found))  # a hash of integers is the same in every process


# -- the index ---------------------------------------------------------------------------------------------------------


def _load_index(root: Path) -> dict[str, tuple[int, Row]]:
    """Name -> stamp and row, as `_save_index` wrote them; empty if another user or another version wrote the file."""
    with contextlib.suppress(*UNREADABLE), files.open_to_read(root / INDEX) as file:
        if os.fstat(file.fileno()).st_uid == ownership.own_uid(root):
            kept = json.load(file)
            if kept["code"] == _code():
                keys = kept["keys"]
                return {
                    str(name): (int(s), dict(zip(keys, row, strict=True))) for name, (s, *row) in kept["runs"].items()
                }
    return {}


def _save_index(root: Path, entries: Mapping[str, Entry]) -> None:
    """Write the index; if the disk is full or the folder is read-only, the next process only takes longer."""
    settled = {name: entry for name, entry in entries.items() if entry.row["state"] in SETTLED}
    keys = next((list(entry.row) for entry in settled.values()), [])
    kept = {name: [entry.stamp, *map(entry.row.get, keys)] for name, entry in settled.items()}
    with contextlib.suppress(OSError):
        replace_text(root / INDEX, json.dumps({"code": _code(), "keys": keys, "runs": kept}), mode=0o600)


def _code() -> str:
    """A value that changes with the code that computes rows."""
    modules = sorted(Path(__file__).parent.glob("*.py"))
    statuses = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in modules]
    return hashlib.blake2s(repr(statuses).encode(), digest_size=8).hexdigest()
