"""How a training process ends: the error message that it prints, and exiting despite threads of native libraries.

Imports run_log; no heavy library, because it comes before Unsloth.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from types import TracebackType
from typing import NoReturn

from backend.train.run_log import TrainError


def print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A sys.excepthook: one sentence for what the user can fix, a traceback for anything else."""
    if issubclass(kind, TrainError):
        print(error, file=sys.stderr, flush=True)
    else:
        sys.__excepthook__(kind, error, trace)


def exit_now() -> NoReturn:
    """Exit with status 0 once everything is written. Threads of native libraries can abort the process while Python
    finalizes (seen with deepspeed 0.19: "terminate called without an active exception"), and the run would count as
    failed."""
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):  # a full disk
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)
