"""DeepSpeed's operators that are compiled on first use: built before the process group starts.

Otherwise DeepSpeed builds them in the middle of its own start, where the ranks of other nodes wait in a collective that
has a timeout.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from backend.resolve import ResolvedRun
from backend.runs.throughput import duration
from backend.train.patches import torch_build_lock
from backend.train.run_log import RunLog

PHASE = "building kernels"
SHOWN_AFTER_SECONDS, LOGGED_AFTER_SECONDS = 1.0, 5.0  # loading a built operator takes less


def needed(run: ResolvedRun) -> list[str]:
    """The names of the operator builders that the run surely needs; others are built when DeepSpeed uses them. Source:
    deepspeed 0.19 comm/torch.py, ops/adam/cpu_adam.py and runtime/swap_tensor."""
    found = ["ShareMemCommBuilder"] if run.device == "cpu" else []
    found += ["CPUAdamBuilder"] if run.optimizer_offload != "none" else []
    return found + (["AsyncIOBuilder"] if "nvme" in (run.optimizer_offload, run.param_offload) else [])


def build(run: ResolvedRun, run_log: RunLog) -> None:
    """Build and load the operators of the run. The first process on a machine builds, the others wait."""
    torch_build_lock.apply()
    tools = str(Path(sys.executable).parent)  # ninja, by which torch builds, may be in the virtual environment alone
    os.environ["PATH"] = f"{os.environ.get('PATH', os.defpath)}{os.pathsep}{tools}"
    accelerator: Any = importlib.import_module("deepspeed.accelerator").get_accelerator()  # seconds
    for name in needed(run):
        builder = accelerator.create_op_builder(name)
        if builder is not None and builder.is_compatible(verbose=False):
            with _progress(builder.NAME, run_log):
                builder.load(verbose=False)


@contextmanager
def _progress(name: str, run_log: RunLog) -> Iterator[None]:
    """Show the elapsed time while the operator is built."""
    began, ended = time.monotonic(), threading.Event()

    def show() -> None:
        announced = False
        while not ended.wait(SHOWN_AFTER_SECONDS):
            elapsed = time.monotonic() - began
            lock = torch_build_lock.BuildLock.waiting
            text = f"Building DeepSpeed kernels: {name}"
            if not announced and elapsed >= LOGGED_AFTER_SECONDS:
                builder = f", by another rank or run, which holds {lock}" if lock else ""
                run_log.info(f"{text}, on its first use on this machine{builder}.")
                announced = True
            run_log.progress(PHASE, f"{text}, {duration(elapsed)}.")

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
