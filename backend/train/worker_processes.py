"""Processes that compute a function of batches. They end with the process that started them; a killed process is an
error, instead of blocking forever."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import count
from multiprocessing.connection import Connection, wait
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]
from typing import Any

from backend.train.run_log import TrainError

AHEAD = 4


class _Worker:
    """A process that computes `function` of batches. It has its own pipe, whose end tells that the process was
    killed."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, other_end = context.Pipe()
        self.process = context.Process(target=_serve, args=(function, other_end, self.pipe), daemon=True)
        self.process.start()
        other_end.close()

    def send(self, batch: Any) -> None:
        """Start to compute the batch."""
        with contextlib.suppress(OSError):  # the process was killed, as `receive` will find
            self.pipe.send(batch)

    def receive(self) -> Any:
        """The result, or the exception of `function`. Raises TrainError if the process was killed."""
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode or 0
            how = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"
            raise TrainError(
                f"A tokenization process {how}. If the machine ran out of CPU memory (RAM), reduce "
                "data.dataset_num_proc, or stop other programs."
            ) from None

    def end(self) -> None:
        """End the process, whatever it does."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _serve(function: Callable[[Any], Any], pipe: Connection, parents_end: Connection) -> None:
    """What a worker process does until the training process closes its end of the pipe, or ends."""
    parents_end.close()
    with contextlib.suppress(EOFError, OSError):
        while True:
            batch = pipe.recv()
            try:
                result = function(batch)
            except Exception as error:
                result = ExceptionWithTraceback(error, error.__traceback__)
            pipe.send(result)


def in_processes(function: Callable[[Any], Any], batches: Iterable[Any], count: int) -> Generator[Any, None, None]:
    """`function` of each batch, in order, computed by `count` processes; by this process if it is 1.
    multiprocessing.Pool would wait forever for the batch of a process that was killed, and ProcessPoolExecutor for the
    rest of a result."""
    if count == 1:
        yield from map(function, batches)
        return
    pool = _Pool(function, batches, count)
    try:
        yield from pool.results()
    finally:
        for worker in pool.workers:
            worker.end()


class _Pool:
    """Workers, which are at most AHEAD batches each ahead of the result that is taken."""

    def __init__(self, function: Callable[[Any], Any], batches: Iterable[Any], count: int) -> None:
        self.function, self.count = function, count
        self.todo = enumerate(batches)
        self.workers: list[_Worker] = []
        self.idle: list[_Worker] = []
        self.working: dict[Any, tuple[_Worker, int]] = {}  # a worker's pipe -> the worker, the number of its batch
        self.done: dict[int, Any] = {}  # results that were not taken yet

    def results(self) -> Iterator[Any]:
        """The results, in order."""
        self._send()
        for number in count():
            while number not in self.done and self.working:
                for pipe in wait(list(self.working)):
                    worker, finished = self.working.pop(pipe)
                    self.done[finished] = worker.receive()
                    self.idle.append(worker)
                self._send()
            if number not in self.done:
                return
            result = self.done.pop(number)
            if isinstance(result, Exception):
                raise result
            self._send()
            yield result

    def _send(self) -> None:
        """Give each idle worker a batch."""
        while self._may_send() and (task := next(self.todo, None)):
            if not self.idle:
                self.workers.append(_Worker(self.function))
                self.idle.append(self.workers[-1])
            worker = self.idle.pop()
            self.working[worker.pipe] = (worker, task[0])
            worker.send(task[1])

    def _may_send(self) -> bool:
        has_worker = bool(self.idle) or len(self.workers) < self.count
        return has_worker and len(self.done) + len(self.working) < AHEAD * self.count
