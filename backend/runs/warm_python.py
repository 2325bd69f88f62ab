"""`python -I -S warm_python.py -m MODULE ARGUMENTS`: stands in for `python -m MODULE ARGUMENTS`, but a process that has
imported the libraries already forks itself to do the work (`backend/train/warm_server.py`).

Imports little, and only from the standard library, so that it starts in 30 ms. This process waits for the other one,
passes signals on to it, and ends in the same way. If it is killed, the other one is killed too. Other uses of Python,
and all uses if there is no server, are left to Python itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time

NAME, STAND_IN = "warm", "python"  # the server's socket, and this program as an executable file
SOCKET = "FOOTPLATE_WARM"  # environment variable: the server's socket, relative to the working directory
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
KILLED = "The process that has imported the libraries was killed."
CONNECT_SECONDS = 5.0  # the server binds its socket before it imports the libraries
NUMBER_BYTES = 4  # of a number from the server: first a pid, then the status of waitpid


def main() -> int:
    """The exit code of the module."""
    arguments = sys.argv[1:]
    module, rest = _module(arguments)
    server = connect(os.environ.get(SOCKET, "")) if module else None
    if server is None:
        os.execv(sys.executable, [sys.executable, *arguments])
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # until there is a process to forward them to
    send(server, module, rest, os.getcwd(), dict(os.environ), [0, 1, 2])
    if (pid := read_number(server)) is None:
        sys.exit(KILLED)
    if (status := _status(server, pid)) is None:
        sys.exit(KILLED)
    return _end(os.waitstatus_to_exitcode(status))


def _module(arguments: list[str]) -> tuple[str, list[str]]:
    """The module to run, and its arguments; '' for any other use of Python."""
    given = arguments[1:] if arguments[:1] == ["-u"] else arguments
    return (given[1], given[2:]) if given[:1] == ["-m"] and len(given) > 1 else ("", [])


def connect(path: str) -> socket.socket | None:
    """A connection to the server whose socket this is; None if there is none."""
    server = socket.socket(socket.AF_UNIX)
    deadline = time.monotonic() + CONNECT_SECONDS
    while path and time.monotonic() < deadline:
        try:
            server.connect(path)
        except FileNotFoundError:  # the server has no socket yet
            time.sleep(0.05)
        except OSError:  # the server has ended
            break
        else:
            return server
    server.close()
    return None


def send(
    server: socket.socket, module: str, arguments: list[str], cwd: str, env: dict[str, str], streams: list[int]
) -> None:
    """Request a process, with descriptors of its standard streams. The server responds with its pid, and with the
    status of waitpid at its end; it kills the process when the connection is closed."""
    text = json.dumps({"module": module, "arguments": arguments, "cwd": cwd, "env": env}).encode() + b"\n"
    socket.send_fds(server, [text[:1]], streams)
    server.sendall(text[1:])


def read_number(server: socket.socket) -> int | None:
    """The next number from the server; None if it has ended."""
    data = b""
    while len(data) < NUMBER_BYTES:
        if not (part := server.recv(NUMBER_BYTES - len(data))):
            return None
        data += part
    return int.from_bytes(data, "little")


def _status(server: socket.socket, pid: int) -> int | None:
    """The status of the other process when it has ended; until then, signals are passed on to it.

    Python runs a handler between two instructions, so a signal that comes just before a system call would wait for the
    end of that call. The signals' numbers are read from a socket instead.
    """
    numbers, received = socket.socketpair()
    received.setblocking(False)
    signal.set_wakeup_fd(received.fileno())
    for forwarded in FORWARDED:
        signal.signal(forwarded, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    while server not in select.select([server, numbers], [], [])[0]:
        for number in numbers.recv(64):
            with contextlib.suppress(OSError):  # the other process has just ended
                os.kill(pid, number)
    return read_number(server)


def _end(code: int) -> int:
    """The exit code. If a signal ended the other process, does not return: the same signal ends this process."""
    if code < 0:
        if -code in (signal.SIGKILL, signal.SIGSTOP):
            os.kill(os.getpid(), -code)
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        return 128 - code
    return code


if __name__ == "__main__":
    sys.exit(main())
