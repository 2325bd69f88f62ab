"""A calm log: the libraries' levels, their progress bars, and the warnings that are understood.

Beside the floors. Imports journal.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import warnings
from types import TracebackType
from typing import NoReturn

import accelerate.utils.other
import datasets
from transformers.utils import logging as transformers_logging

from backend.train.journal import TrainError

LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def calm(level: str, rank: int, deepspeed: bool) -> None:
    """Libraries speak from `level` on, on rank 0 alone; errors are always heard."""
    number = LEVELS[level] if rank == 0 else logging.ERROR
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", stream=sys.stdout)
    transformers_logging.set_verbosity(number)
    transformers_logging.disable_progress_bar()
    datasets.logging.set_verbosity(number)
    datasets.disable_progress_bars()
    for name in ("accelerate", "peft", "trl"):
        logging.getLogger(name).setLevel(number)
    if number > logging.WARNING:
        warnings.simplefilter("ignore")
    # Its DataLoader says so on every machine without an accelerator, where nothing is lost.
    warnings.filterwarnings("ignore", message=".*pin_memory.*no accelerator", category=UserWarning)
    # Libraries ask each other under the old name.
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing\\w*. is deprecated", category=FutureWarning)
    if deepspeed:
        logging.getLogger("DeepSpeed").setLevel(number)
        # It calls torch's collectives by their old names, at every step.
        warnings.filterwarnings("ignore", message=".torch.distributed.*is deprecated", category=FutureWarning)
    else:
        _leave_deepspeed_alone()


def _leave_deepspeed_alone() -> None:
    """accelerate imports all of DeepSpeed (seconds, and lines in the log) at the first save, merely to ask whether the
    model is one of its engines."""
    accelerate.utils.other.is_deepspeed_available = lambda: False


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
