"""Builds the operators that DeepSpeed compiles on first use, as the trainings of the tests need them.

`make test` runs this in the background (`tests/conftest.py`) while tests run that need none of them.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from training_runs import EXTENSIONS, environment

BUILT = ("deepspeed_shm_comm", "cpu_adam")  # in this order: ZeRO needs the first one, ZeRO-Offload both


def main() -> None:
    """Build what is missing."""
    if all((EXTENSIONS / name / f"{name}.so").exists() for name in BUILT):
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(environment(Path(folder), Path(folder)))  # before DeepSpeed reads it
        from backend.train import deepspeed_ops, run_log  # noqa: PLC0415

        run: Any = SimpleNamespace(device="cpu", optimizer_offload="cpu", param_offload="none")
        deepspeed_ops.build(run, run_log.RunLog(Path(folder)))


if __name__ == "__main__":
    main()
