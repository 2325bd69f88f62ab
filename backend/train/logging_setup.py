"""A calm log: the libraries' levels, their progress bars, and the warnings that are understood.

Beside the floors. Imports nothing of Footplate.
"""

from __future__ import annotations

import logging
import sys
import warnings

import accelerate.utils.other
import datasets
from transformers.utils import logging as transformers_logging

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
    # peft looks for stacked experts among modules, where they are not; their adapter has the rank that was asked for.
    warnings.filterwarnings("ignore", message=".*(rank|alpha)_pattern keys did not match", category=RuntimeWarning)
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
