"""A worker process for what only the libraries know, and a cache of its results in memory and on disk.

Imports nothing of Footplate, and none of those libraries: the worker process imports them (`backend.train.worker`). It
starts with the first request that is not cached, answers one request after another, and ends after a few idle minutes
or along with this process. While it works on a long request it reports its progress.
"""

from __future__ import annotations

import atexit
import contextlib
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, Any, ClassVar

Result = Mapping[str, Any]
Show = Callable[[str], None]  # gets the progress as a text, while a caller waits

ARGUMENTS = ("-m", "backend.train.worker")  # arguments of Python
HOME = Path(__file__).resolve().parent.parent.parent
NO_GPUS = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}  # as in the registry
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **NO_GPUS}
SETTING = "FOOTPLATE_INSPECTION_WORKER"
MAX_IN_MEMORY = 128  # results and error messages
SHOW_SECONDS = 0.25  # between two calls of `show` while a caller waits
ABANDONED_SECONDS = 5.0  # after which a request that nobody asks for is dropped; the page asks every 2 seconds
TOO_LARGE = 3  # exit status of a worker that took too much memory
MAX_BYTES = 4 * 2**30  # of a worker: a template, an example or a config.json must not exhaust the host's memory


def may_start(environment: Mapping[str, str]) -> bool:
    """Whether a worker process may be started: not where FOOTPLATE_INSPECTION_WORKER is off."""
    return environment.get(SETTING, os.environ.get(SETTING)) != "off"


def no_show(text: str) -> None:
    """Show nothing."""


class WorkerError(Exception):
    """The worker did not respond; the message is the reason, as the end of a sentence."""


@lru_cache(maxsize=8)
def installed_versions(*packages: str) -> list[str]:
    """The installed version of each package; '' for a missing one."""
    found = []
    for name in packages:
        try:
            found.append(importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            found.append("")
    return found


@dataclass
class Worker:
    """One worker process. Used by one thread at a time."""

    command: Sequence[str]
    task: str  # as the subject of messages, such as "building the model"
    process: subprocess.Popen[bytes] | None = None
    errors: IO[bytes] | None = None
    unread: bytes = b""

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process is not None and self.process.poll() is None

    def ask(
        self, request: Result, start_seconds: float, seconds: float, proceed: Callable[[Result], bool]
    ) -> dict[str, Any] | None:
        """The worker's response; starts the process if needed. `proceed` gets each progress report and decides whether
        to continue; None if it did not: the next request ends this one. Raises WorkerError, after which no process is
        left."""
        try:
            if not self.alive:
                self._start(start_seconds)
            return self._ask(request, seconds, proceed)
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
        _limit_memory(self.process.pid)
        self._line(time.monotonic() + seconds, f"did not start within {seconds:g} seconds")

    def _ask(self, request: Result, seconds: float, proceed: Callable[[Result], bool]) -> dict[str, Any] | None:
        assert self.process and self.process.stdin
        number = time.monotonic_ns()
        line = json.dumps({**request, "id": number}, default=str).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):  # it has ended: reading its output reports how
            self.process.stdin.write(line)
        late = f"took longer than {seconds:g} seconds"
        until = time.monotonic() + seconds
        while True:
            answer = self._line(until, late)
            if answer.get("id") != number:
                continue
            if "progress" not in answer:
                return answer
            if not proceed(answer["progress"]):
                return None
            until, late = time.monotonic() + seconds, f"made no progress for {seconds:g} seconds"

    def _line(self, until: float, late: str) -> dict[str, Any]:
        """The next line of its stdout."""
        assert self.process and self.process.stdout
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self.unread:
                if not selector.select(max(0.0, until - time.monotonic())):
                    raise WorkerError(f"{self.task} {late}")
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
        """Why the process ended, although nobody ended it."""
        assert self.process
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        status, said = self.process.returncode, ""
        if status == TOO_LARGE:
            return f"{self.task} took too much CPU memory (more than {MAX_BYTES // 2**30} GiB)"
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


def _limit_memory(pid: int) -> None:
    """Let the kernel refuse more than MAX_BYTES to the process: the thread of the process that watches its memory does
    not run during a long call of C code. RLIMIT_AS would count the libraries and address space that is only
    reserved."""
    try:
        import resource  # noqa: PLC0415 - not on Windows
    except ImportError:
        return
    if hasattr(resource, "prlimit"):  # Linux
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
            resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))


@dataclass
class _Pending:
    """A request without a result yet: when somebody last asked for it, and the worker's last progress report."""

    request: Result
    asked: float
    progress: Result = field(default_factory=dict)

    @property
    def abandoned(self) -> bool:
        return time.monotonic() - self.asked > ABANDONED_SECONDS


@dataclass
class WorkerCache:
    """Results of a worker process: in memory, on disk below `cache_folder`, or from the worker. Thread-safe.

    A subclass says what is requested (`request`), what the result depends on (`key`) and names the `task` in messages.
    `seconds`: time limit until the response or the next progress report; `start_seconds`: for importing the libraries;
    `idle_seconds`: the worker ends after this time without a request. A request that nobody asks for any more, because
    the spec has changed, is dropped when there is another one.
    """

    cache_folder: Path
    seconds: float = 60.0
    start_seconds: float = 180.0
    idle_seconds: float = 300.0
    command: Sequence[str] = field(default_factory=lambda: (sys.executable, *ARGUMENTS))
    _known: OrderedDict[str, Result | str] = field(default_factory=OrderedDict)
    _pending: dict[str, _Pending] = field(default_factory=dict)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None
    _worker: Worker = field(init=False)
    _closed: bool = False

    name: ClassVar[str]  # name of the folder below cache_folder
    task: ClassVar[str]  # as the subject of "... takes longer than 30 seconds"
    format: ClassVar[int]  # of the results; the worker writes it into each of them

    def __post_init__(self) -> None:
        self._worker = Worker(self.command, self.task)
        _OPEN.add(self)

    __hash__ = object.__hash__

    @property
    def folder(self) -> Path:
        """Where the results are kept."""
        return self.cache_folder / self.name

    def find(self, key: str, request: Result, start: bool = True) -> Result | str | None:
        """The result, or the reason why there is none, or None while the worker is busy with it. Returns immediately;
        without `start` nothing is requested from the worker."""
        if (found := self._look_up(key)) is not None:
            return found
        if start:
            self._request(key, request)
        return None

    def wait_for(self, key: str, request: Result, timeout: float, show: Callable[[Result], None]) -> Result | str:
        """Same as `find`, but waits for the worker, at most `timeout` seconds, after which the worker continues.
        Meanwhile `show` gets the last progress report, {} before the first one."""
        until = time.monotonic() + timeout
        while (found := self.find(key, request)) is None:
            left = until - time.monotonic()
            if left <= 0:
                return f"{self.task} takes longer than {timeout:g} seconds"
            show(self.progress(key))
            with self._changed:
                self._changed.wait_for(lambda: key in self._known, min(left, SHOW_SECONDS))
        return found

    def progress(self, key: str) -> Result:
        """The worker's last progress report on a pending request; {} without one."""
        with self._changed:
            pending = self._pending.get(key)
            return pending.progress if pending else {}

    def close(self) -> None:
        """End the worker. Pending requests are dropped; a later request starts it again."""
        with self._changed:
            self._closed = True
            self._pending.clear()
            self._changed.notify_all()
            thread = self._thread
        until = time.monotonic() + 10
        while thread and thread.is_alive() and time.monotonic() < until:
            if process := self._worker.process:  # None while it is being started
                with contextlib.suppress(OSError):
                    process.kill()  # the thread that waits for the response reaps the process
            thread.join(0.1)
        with self._changed:
            self._closed = False

    @property
    def pid(self) -> int | None:
        """The worker's process id, while it runs."""
        process = self._worker.process
        return process.pid if process and self._worker.alive else None

    def _look_up(self, key: str) -> Result | str | None:
        with self._changed:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
            if key in self._pending:
                return None
        try:
            result = json.loads((self.folder / f"{key}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):  # missing or incomplete: requested again
            return None
        if not isinstance(result, dict) or result.get("format") != self.format:
            return None
        self._keep(key, result)
        return result

    def _keep(self, key: str, found: Result | str) -> None:
        with self._changed:
            self._known[key] = found
            self._pending.pop(key, None)
            while len(self._known) > MAX_IN_MEMORY:
                self._known.popitem(last=False)
            self._changed.notify_all()

    def _request(self, key: str, request: Result) -> None:
        with self._changed:
            if key in self._known or self._closed:
                return
            self._pending.setdefault(key, _Pending(request, 0.0)).asked = time.monotonic()
            self._changed.notify_all()
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._answer, name=self.name, daemon=True)
                self._thread.start()

    def _answer(self) -> None:
        """Send requests to the worker, one after another, and end it when there are none."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._closed, self.idle_seconds)
                if self._closed or not self._pending:
                    self._worker.end()
                    self._thread = None  # under the lock: a later request starts a new thread
                    return
                key = max(self._pending, key=lambda key: self._pending[key].asked)
                for other in [other for other, pending in self._pending.items() if other != key and pending.abandoned]:
                    del self._pending[other]
                request = self._pending[key].request
            found = self._ask(key, request)
            if found is None:
                with self._changed:
                    self._pending.pop(key, None)
                continue
            if not isinstance(found, str):
                self._store(key, found)
            if not self._closed:
                self._keep(key, found)

    def _ask(self, key: str, request: Result) -> Result | str | None:
        """The result, or the reason why there is none, or None if the request was dropped."""
        try:
            answer = self._worker.ask(request, self.start_seconds, self.seconds, partial(self._proceed, key))
        except WorkerError as error:
            return str(error)
        if answer is None:
            return None
        result = answer.get("result")
        return result if isinstance(result, dict) else str(answer.get("error") or "the worker returned no result")

    def _proceed(self, key: str, progress: Result) -> bool:
        """Keep a progress report; False if nobody asks for this request any more and there is another one."""
        with self._changed:
            pending = self._pending.get(key)
            if pending is None:
                return False
            pending.progress = progress
            return len(self._pending) == 1 or not pending.abandoned

    def _store(self, key: str, result: Result) -> None:
        """Write the result atomically. Without a writable cache it is kept in memory only."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            self.folder.chmod(0o700)  # the results name paths, and quote examples
            place = self.folder / f".{key}.{os.getpid()}.writing"
            place.write_text(json.dumps(result, separators=(",", ":")), encoding="utf-8")
            place.replace(self.folder / f"{key}.json")


_OPEN: weakref.WeakSet[WorkerCache] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for cache in list(_OPEN):
        cache.close()
