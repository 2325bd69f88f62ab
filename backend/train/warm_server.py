"""`python -m backend.train.warm_server FOLDER PARENT`: imports the libraries once, and forks a process for each
request of `runs/warm_python.py`.

A forked process has the module, arguments, working directory, environment and standard streams of the request, and this
server's libraries, which read their environment variables when they were imported. So the server is started with
the environment of the run. Only for runs on CPU: a process that has asked CUDA anything cannot be forked. The socket is
in FOLDER, which only its user can read. Ends with the process PARENT, which has started it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import multiprocessing.util
import os
import runpy
import select
import shlex
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import NoReturn

from backend.runs import processes, warm_python
from backend.runs.warm_python import NAME, NUMBER_BYTES, STAND_IN

LIBRARIES = (
    "backend.train.training", "backend.train.load_model", "deepspeed", "torch.distributed.fsdp",
    "torch.distributed.run", "trl.experimental", "accelerate.commands.launch",
    # What nearly every training imports later: the rules, the trainers, and a model as most are built.
    "backend.train.rule_check", "trl.trainer.sft_trainer", "trl.trainer.dpo_trainer",
    "transformers.models.llama.modeling_llama",
)  # fmt: skip


class Server:
    """The socket, and the processes that were forked, each with the connection of the one that waits for it."""

    def __init__(self, folder: Path) -> None:
        self.python = folder / STAND_IN
        command = shlex.join([sys.executable, "-I", "-S", warm_python.__file__])
        self.python.write_text(f'#!/bin/sh\nexec {command} "$@"\n', encoding="utf-8")
        self.python.chmod(0o700)
        os.chdir(folder)  # the path of a socket has at most 107 bytes
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(f".{NAME}")
        self.listener.listen(64)
        os.rename(f".{NAME}", NAME)  # the socket appears once it takes connections
        self.poll = select.poll()
        self.poll.register(self.listener, select.POLLIN)
        self.processes: dict[int, tuple[int, socket.socket]] = {}  # pidfd -> the pid, and the connection of who waits

    def serve(self) -> None:
        """Fork a process for each connection; tell how it ended, or kill it if nobody waits for it any more."""
        while True:
            for descriptor, _ in self.poll.poll():
                if descriptor == self.listener.fileno():
                    self._fork()
                elif descriptor in self.processes:
                    self._end(descriptor)
                else:
                    self._kill(descriptor)

    def _fork(self) -> None:
        connection, _ = self.listener.accept()
        if not (pid := os.fork()):
            self._close()
            run(connection, self.python)
        process = os.pidfd_open(pid)
        self.processes[process] = pid, connection
        self.poll.register(process, select.POLLIN)
        self.poll.register(connection, 0)  # to see only that it is closed
        with contextlib.suppress(OSError):
            connection.sendall(pid.to_bytes(NUMBER_BYTES, "little"))

    def _close(self) -> None:
        """In a forked process: close what belongs to the server and to the other processes."""
        self.listener.close()
        for process, (_, other) in self.processes.items():
            os.close(process)
            other.close()

    def _end(self, process: int) -> None:
        """Tell the status of a process that has ended."""
        pid, connection = self.processes.pop(process)
        status = os.waitpid(pid, 0)[1]
        with contextlib.suppress(OSError):
            connection.sendall(status.to_bytes(NUMBER_BYTES, "little"))
        self.poll.unregister(process)
        with contextlib.suppress(KeyError):
            self.poll.unregister(connection)
        connection.close()
        os.close(process)

    def _kill(self, connection: int) -> None:
        """Kill the process for which nobody waits any more."""
        with contextlib.suppress(KeyError):  # the process has just ended
            self.poll.unregister(connection)
        for process, (_, other) in self.processes.items():
            if other.fileno() == connection:
                signal.pidfd_send_signal(process, signal.SIGKILL)


def run(connection: socket.socket, python: Path) -> NoReturn:
    """In a forked process: become what the request asks for, and run its module."""
    end_with(os.getppid())
    os.setsid()
    first, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
    with connection, connection.makefile("rb") as rest:
        request = json.loads(first + rest.readline())
    for target, source in enumerate(descriptors):
        os.dup2(source, target)
        os.close(source)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    sys.path[0], sys.argv[1:] = request["cwd"], request["arguments"]
    sys.executable = str(python)  # the ranks that a launcher starts are forked too
    code: object = 0
    try:
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    except SystemExit as error:
        code = error.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    _exit(code)


def _exit(code: object) -> NoReturn:
    """End as Python does: wait for threads and child processes, run what is registered for the end, flush."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):  # a full disk
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit((code or 0) & 0xFF)


def end_with(parent: int) -> None:
    """Kill this process when its parent ends."""
    processes.end_with_parent()
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    """Serve."""
    end_with(int(sys.argv[2]))
    server = Server(Path(sys.argv[1]))
    gc.disable()  # imports create no garbage, and a fifth of their time would be spent on looking for it
    for library in LIBRARIES:
        importlib.import_module(library)
    if LIBRARIES:
        mapping = importlib.import_module("transformers.conversion_mapping")
        mapping.get_checkpoint_conversion_mapping("llama")  # its first call compiles a thousand regular expressions
    gc.enable()
    gc.freeze()  # otherwise the first collection in each process would copy the pages of all imported modules
    server.serve()


if __name__ == "__main__":
    main()
