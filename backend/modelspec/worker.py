"""Module tables of model configs, built by transformers in a worker process and kept on disk.

Imports nothing of Footplate: only the worker process (`python -m backend.train.describe_model --serve`) imports torch
and transformers. It starts with the first config that is not cached, answers one request after another, and ends after
a few idle minutes or along with this process.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib.metadata
import json
import os
import selectors
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

Table = Mapping[str, Any]
Config = Mapping[str, Any]

FORMAT = 2  # as in backend.train.describe_model
COMMAND = (sys.executable, "-m", "backend.train.describe_model", "--serve")
HOME = Path(__file__).resolve().parent.parent.parent
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
MAX_IN_MEMORY = 128  # tables and error messages
TOO_LARGE = 3  # exit status of a worker that took too much memory
PACKAGES = ("transformers", "peft", "torch")  # a table is valid for these versions
# Keys of config.json that change neither the modules nor the facts of a table.
IRRELEVANT = ("_name_or_path", "_commit_hash", "transformers_version", "quantization_config", "dtype", "torch_dtype")


class WorkerError(Exception):
    """The worker did not respond; the message is the reason, as the end of a sentence."""


def cache_key(config: Config) -> str:
    """Name of a config's table on disk: a hash of the config and of the library versions."""
    kept = {name: value for name, value in config.items() if name not in IRRELEVANT}
    text = json.dumps([FORMAT, _versions(), kept], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


@lru_cache(maxsize=1)
def _versions() -> list[str]:
    found = []
    for name in PACKAGES:
        try:
            found.append(importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            found.append("")
    return found


@dataclass
class Worker:
    """One worker process. Used by one thread at a time."""

    command: Sequence[str]
    process: subprocess.Popen[bytes] | None = None
    errors: IO[bytes] | None = None
    unread: bytes = b""

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process is not None and self.process.poll() is None

    def ask(self, config: Config, start_seconds: float, seconds: float) -> dict[str, Any]:
        """The worker's response; starts the process if needed. Raises WorkerError, after which no process is left."""
        try:
            if not self.alive:
                self._start(start_seconds)
            return self._ask(config, seconds)
        except WorkerError:
            self.end()
            raise
        except OSError as error:
            self.end()
            raise WorkerError(f"the worker process failed: {error.strerror or error}") from error

    def _start(self, seconds: float) -> None:
        self.end()
        self.unread, self.errors = b"", tempfile.TemporaryFile()  # noqa: SIM115  (closed in `end`)
        paths = [str(HOME), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **ENVIRONMENT}
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=environment,
            cwd=HOME,
            start_new_session=True,  # Ctrl-C in a terminal ends the client, and the worker with it
            bufsize=0,
        )
        self._line(time.monotonic() + seconds, f"did not start within {seconds:g} seconds")

    def _ask(self, config: Config, seconds: float) -> dict[str, Any]:
        assert self.process and self.process.stdin
        number = time.monotonic_ns()
        request = json.dumps({"id": number, "config": config}, default=str).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):  # it has ended: reading its output reports how
            self.process.stdin.write(request)
        until = time.monotonic() + seconds
        while True:
            answer = self._line(until, f"took longer than {seconds:g} seconds")
            if answer.get("id") == number:
                return answer

    def _line(self, until: float, late: str) -> dict[str, Any]:
        """The next line of its stdout."""
        assert self.process and self.process.stdout
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self.unread:
                if not selector.select(max(0.0, until - time.monotonic())):
                    raise WorkerError(f"building the model {late}")
                read = os.read(self.process.stdout.fileno(), 1 << 16)
                if not read:
                    raise WorkerError(self._ending())
                self.unread += read
        line, _, self.unread = self.unread.partition(b"\n")
        try:
            found = json.loads(line)
        except ValueError as error:
            raise WorkerError(f"the worker process wrote unexpected output: {line[:60]!r}") from error
        return found if isinstance(found, dict) else {}

    def _ending(self) -> str:
        """Why the process has ended by itself."""
        assert self.process
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        status, said = self.process.returncode, ""
        if status == TOO_LARGE:
            return "building the model took too much CPU memory"
        if self.errors:
            self.errors.seek(max(0, self.errors.seek(0, os.SEEK_END) - 4096))
            lines = self.errors.read().decode(errors="replace").strip().splitlines()
            said = f": {lines[-1][:200]}" if lines and status and status > 0 else ""
        how = f"signal {-status}" if status is not None and status < 0 else f"exit status {status}"
        return f"the worker process ended with {how}{said}"

    def end(self) -> None:
        """End the process, if there is one, and wait for it."""
        process, self.process = self.process, None
        if process:
            with contextlib.suppress(OSError):
                process.kill()  # it has no state that could be lost
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream:
                    with contextlib.suppress(OSError):
                        stream.close()
        if self.errors:
            self.errors.close()
            self.errors = None


@dataclass
class ModuleTables:
    """The module tables of configs: in memory, on disk below `cache_folder`, or from the worker.

    `seconds`: time limit for one config; `start_seconds`: for importing torch and transformers; `idle_seconds`: the
    worker ends after so long without a request. Thread-safe.
    """

    cache_folder: Path
    seconds: float = 60.0
    start_seconds: float = 180.0
    idle_seconds: float = 300.0
    command: Sequence[str] = COMMAND
    _known: OrderedDict[str, Table | str] = field(default_factory=OrderedDict)
    _waiting: OrderedDict[str, Config] = field(default_factory=OrderedDict)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None
    _worker: Worker = field(default_factory=lambda: Worker(COMMAND))
    _closed: bool = False

    def __post_init__(self) -> None:
        self._worker = Worker(self.command)
        _OPEN.add(self)

    __hash__ = object.__hash__

    @property
    def folder(self) -> Path:
        """Where the tables are kept."""
        return self.cache_folder / "modeltables"

    def get(self, config: Config, start: bool = True) -> Table | str | None:
        """The table, or the reason why there is none, or None while it is being built. Returns at once; without `start`
        nothing is requested from the worker."""
        key = cache_key(config)
        if (found := self._look_up(key)) is not None:
            return found
        if start:
            self._request(key, config)
        return None

    def wait(self, config: Config, timeout: float = 30.0) -> Table | str:
        """As `get`, but waits for the worker, at most `timeout` seconds; the worker then continues."""
        key = cache_key(config)
        if (found := self._look_up(key)) is not None:
            return found
        self._request(key, config)
        with self._changed:
            self._changed.wait_for(lambda: key in self._known, timeout)
            return self._known.get(key, f"building the model takes longer than {timeout:g} seconds")

    def close(self) -> None:
        """End the worker. Pending requests are dropped; a later request starts it again."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
            thread, process = self._thread, self._worker.process
        if process:
            with contextlib.suppress(OSError):
                process.kill()  # the thread that waits for the response reaps the process
        if thread:
            thread.join(10)
        with self._changed:
            self._closed = False

    @property
    def pid(self) -> int | None:
        """The worker's process id, while it runs."""
        process = self._worker.process
        return process.pid if process and self._worker.alive else None

    def _look_up(self, key: str) -> Table | str | None:
        with self._changed:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
            if key in self._waiting:
                return None
        try:
            table = json.loads((self.folder / f"{key}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):  # missing or incomplete: built again
            return None
        if not isinstance(table, dict) or table.get("format") != FORMAT:
            return None
        self._keep(key, table)
        return table

    def _keep(self, key: str, found: Table | str) -> None:
        with self._changed:
            self._known[key] = found
            self._waiting.pop(key, None)
            while len(self._known) > MAX_IN_MEMORY:
                self._known.popitem(last=False)
            self._changed.notify_all()

    def _request(self, key: str, config: Config) -> None:
        with self._changed:
            if key in self._known or key in self._waiting or self._closed:
                return
            self._waiting[key] = config
            self._changed.notify_all()
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._answer, name="module tables", daemon=True)
                self._thread.start()

    def _answer(self) -> None:
        """Send requests to the worker, one after another, and end it when there are none."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed, self.idle_seconds)
                if self._closed or not self._waiting:
                    self._worker.end()
                    self._thread = None  # under the lock: a later request starts a new thread
                    return
                key, config = next(iter(self._waiting.items()))
            found = self._ask(config)
            if not isinstance(found, str):
                self._store(key, found)
            if not self._closed:
                self._keep(key, found)

    def _ask(self, config: Config) -> Table | str:
        try:
            answer = self._worker.ask(config, self.start_seconds, self.seconds)
        except WorkerError as error:
            return str(error)
        table = answer.get("table")
        return table if isinstance(table, dict) else str(answer.get("error") or "the worker returned no table")

    def _store(self, key: str, table: Table) -> None:
        """Write the table atomically. Without a writable cache it is kept in memory only."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            place = self.folder / f".{key}.{os.getpid()}.writing"
            place.write_text(json.dumps(table, separators=(",", ":")), encoding="utf-8")
            place.replace(self.folder / f"{key}.json")


_OPEN: weakref.WeakSet[ModuleTables] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for tables in list(_OPEN):
        tables.close()
