"""How a training process ends: the error message that it prints, and exiting despite threads of native libraries.

Imports run_log; no heavy library, because it comes before Unsloth.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.util  # registers its own function for the end of the process, before the one below
import os
import signal
import sys
from types import TracebackType
from typing import NoReturn

from backend.train.rendezvous import ForeignObject, RunFolderMissing
from backend.train.run_log import TrainError


def outlive_sigterm() -> None:
    """Block SIGTERM if it is ignored, as in a Slurm job, which sends it to all processes before it ends them: they have
    to save first. DataLoader workers, which torch makes end at SIGTERM, inherit the block, so this process kills them
    before multiprocessing would send them SIGTERM and wait."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        atexit.register(_kill_children)


def _kill_children() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises an error when a worker is killed
    for child in multiprocessing.active_children():
        child.kill()


def print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A sys.excepthook: one sentence for what the user can fix, a traceback for anything else."""
    if issubclass(kind, (TrainError, ForeignObject, RunFolderMissing)):
        print(error, file=sys.stderr, flush=True)
    else:
        sys.__excepthook__(kind, error, trace)


def print_error_of_job(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Same as `print_error`, for a job that no launcher starts. Only its log is left, in which runs/failure.py finds
    the sentence by the name of the error's class."""
    if issubclass(kind, TrainError):
        print(f"{kind.__module__}.{kind.__name__}: {error}", file=sys.stderr, flush=True)
    else:
        print_error(kind, error, trace)


def exit_now() -> NoReturn:
    """Exit with status 0 once everything is written. Threads of native libraries can abort the process while Python
    finalizes (seen with deepspeed 0.19: "terminate called without an active exception"), and the run would count as
    failed."""
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):  # a full disk
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)
