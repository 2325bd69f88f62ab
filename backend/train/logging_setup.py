"""The libraries' log levels and progress bars, and filters for warnings that do not concern the user."""

from __future__ import annotations

import logging
import sys
import warnings

import datasets
from transformers.utils import logging as transformers_logging

from backend.train.patches import accelerate_deepspeed_import

LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure_logging(level: str, rank: int, deepspeed: bool) -> None:
    """Libraries log from `level` on, on rank 0 only; other ranks log errors."""
    number = LEVELS[level] if rank == 0 else logging.ERROR
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%T", stream=sys.stdout)
    transformers_logging.set_verbosity(number)
    transformers_logging.disable_progress_bar()
    datasets.logging.set_verbosity(number)
    datasets.disable_progress_bars()
    for name in ("accelerate", "peft", "trl"):
        logging.getLogger(name).setLevel(number)
    if number > logging.WARNING:
        warnings.simplefilter("ignore")
    # torch's DataLoader warns on every machine without an accelerator, where pinning memory has no use.
    warnings.filterwarnings("ignore", message=".*pin_memory.*no accelerator", category=UserWarning)
    # peft and TRL still use the old name in transformers.
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing\\w*. is deprecated", category=FutureWarning)
    # peft looks for stacked experts among modules, but they are parameters; their adapters have the requested rank.
    warnings.filterwarnings("ignore", message=".*(rank|alpha)_pattern keys did not match", category=RuntimeWarning)
    if deepspeed:
        logging.getLogger("DeepSpeed").setLevel(number)
        # transformers' Trainer counts the micro-batches itself and lets accelerate expect one per step.
        logging.getLogger("accelerate.accelerator").addFilter(_is_about_something_else)
        # DeepSpeed and its integration in transformers call torch's collectives by their old names, at every step.
        warnings.filterwarnings("ignore", message=".?torch.distributed.*is deprecated", category=FutureWarning)
    else:
        accelerate_deepspeed_import.apply()


def _is_about_something_else(record: logging.LogRecord) -> bool:
    """Whether a record is not the warning that DeepSpeed accumulates more than one micro-batch."""
    return "Gradient accumulation steps mismatch: GradientAccumulationPlugin has 1," not in record.getMessage()
