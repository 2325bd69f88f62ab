"""Appends the output of a run to its log, and keeps what the disk has no room for: the log is complete afterwards.

A program that imports only the standard library, started by `output.py`. The launcher and its ranks write into a pipe,
and this program copies it into the log: the thread in which torchrun and accelerate copy the lines of the ranks ends at
the first write that fails (torch 2.13, tail_log.py). It is a process of its own, which ends with its last writer,
because ranks may outlive the supervisor.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time

RETRY_SECONDS = 0.5
END_SECONDS = 5.0  # after the end of the output; what the disk has no room for then is lost
KEPT_BYTES = 2**26
PIPE_BYTES = 65536


class Log:
    """A file to which bytes are appended, now or when the disk has room for them."""

    def __init__(self, file: int) -> None:
        self.file = file
        self.waiting = bytearray()
        self.lost = 0
        self.lock = threading.RLock()

    def add(self, data: bytes) -> None:
        """Append `data`. If more than KEPT_BYTES wait, the rest is counted and left out."""
        with self.lock:
            room = KEPT_BYTES - len(self.waiting)
            self.waiting += data[:room]
            self.lost += len(data[room:])
            self.flush()

    def flush(self) -> bool:
        """Write what waits. Returns whether all of it could be written."""
        with self.lock:
            try:
                self._write()
                if self.lost:
                    note, self.lost = f"\n{self.lost} bytes of output are missing here: the disk was full.\n", 0
                    self.waiting += note.encode()
                    self._write()
            except OSError:  # writing is tried again later
                return False
        return True

    def _write(self) -> None:
        while self.waiting:
            del self.waiting[: os.write(self.file, self.waiting[:PIPE_BYTES])]


def copy(source: int, log: Log) -> None:
    """Append everything from `source` until it ends."""
    while True:
        if select.select([source], [], [], RETRY_SECONDS if log.waiting else None)[0]:
            if not (data := os.read(source, PIPE_BYTES)):
                break
            log.add(data)
        else:
            log.flush()
    until = time.monotonic() + END_SECONDS
    while not log.flush() and time.monotonic() < until:
        time.sleep(RETRY_SECONDS)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    copy(0, Log(1))
