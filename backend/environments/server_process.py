"""A server that runs in a process of its own, and its last message when it ends."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

END_SECONDS = 10.0  # after which a server that does not end is killed


class ServerError(Exception):
    """The server did not start; the message is the server's own."""


def describe_end(code: int) -> str:
    """How a process with this exit code has ended, as a verb and its object."""
    if code >= 0:
        return f"ended with exit code {code}"
    memory = ", perhaps because the machine ran out of memory" if code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{memory}"


class ServerProcess:
    """The process of a server, whose messages are in `_log`; `address`: http://127.0.0.1:PORT."""

    address: str
    _process: subprocess.Popen[str]
    _log: Path

    def ending(self) -> str:
        """How the process has ended, as a verb and its object; '' while it runs."""
        return "" if (code := self._process.poll()) is None else describe_end(code)

    def last_line(self) -> str:
        """The last line of the log."""
        lines = [line.strip() for line in self._text().splitlines() if line.strip()]
        return lines[-1] if lines else "It wrote no message."

    def close(self) -> None:
        """End the process."""
        raise NotImplementedError

    def _text(self) -> str:
        return self._log.read_text(errors="replace")
