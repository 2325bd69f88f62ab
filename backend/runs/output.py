"""The pipe between a run's launcher and its log, and the process that copies what arrives there (`log_writer.py`)."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

from backend.runs import LOG, files, log_writer, processes


class Output:
    """The pipe that a run's launcher writes into, and the process that copies it into the log in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pid = 0
        self._started = 0
        self._log = self._read = self._write = -1

    def open(self) -> int:
        """Start the process, and return the launcher's end of the pipe. Raises OSError."""
        self._log = files.open_regular(self.folder / LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._read, self._write = os.pipe()
        self._start()
        return self._write

    def close(self) -> None:
        """Leave the pipe to the launcher, which has inherited it."""
        if self._write >= 0:
            os.close(self._write)
        self._write = -1

    def keep(self) -> None:
        """Start the process again if something has killed it. What it has already read is no longer in the pipe."""
        if processes.started(self.pid) != self._started:
            with contextlib.suppress(OSError):
                self._start()

    def wait(self, seconds: float) -> None:
        """Wait until everything that was written is in the log."""
        deadline = time.monotonic() + seconds
        while self.pid and processes.started(self.pid) == self._started and time.monotonic() < deadline:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, os.WNOHANG)
            time.sleep(0.01)

    def _start(self) -> None:
        # No environment, so no run marker: this process must not be ended with those of the run.
        command = [sys.executable, "-I", "-S", log_writer.__file__]
        process = subprocess.Popen(command, stdin=self._read, stdout=self._log, env={}, start_new_session=True)
        self.pid, self._started = process.pid, processes.started(process.pid)
