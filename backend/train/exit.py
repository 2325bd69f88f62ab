"""How a process ends: its last words, and leaving in spite of the engines' threads.

Beside the floors. Imports journal.
"""

from __future__ import annotations

import atexit
import os
import sys
from types import TracebackType
from typing import NoReturn

from backend.train.run_log import TrainError


def last_words(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """For sys.excepthook: what a person can mend is one sentence; anything else is a traceback."""
    if issubclass(kind, TrainError):
        print(error, file=sys.stderr, flush=True)
    else:
        sys.__excepthook__(kind, error, trace)


def leave() -> NoReturn:
    """End the process now that all is written: threads of the engines' native parts can abort it while Python winds
    down (seen with deepspeed 0.19: "terminate called without an active exception"), and the run would count as failed.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
