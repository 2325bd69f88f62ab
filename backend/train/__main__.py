"""`torchrun -m backend.train . [--from-scratch]` in a run's folder: one training process."""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    gc.disable()  # imports create no garbage, and a fifth of their time would be spent on looking for it

from torch.distributed.elastic.multiprocessing.errors import record

from backend.runs import SKIP_CHECKS, files
from backend.train import device, exit, stacks, unsloth, unused_packages, verify


@record  # type: ignore[untyped-decorator]
def main() -> None:
    """Train what spec.yaml says."""
    parser = argparse.ArgumentParser(prog="python -m backend.train", description=__doc__)
    parser.add_argument("folder", type=Path, help="the run's folder, with spec.yaml")
    parser.add_argument(
        "--from-scratch", action="store_true", help="start at step 0 instead of resuming from the last checkpoint"
    )
    given = parser.parse_args()
    sys.excepthook = exit.print_error
    exit.outlive_sigterm()
    group, place, folder = device.ProcessGroup(), given.folder.resolve(), files.held(given.folder)
    group.sign()
    stacks.Stacks(folder, group.rank).write_on_request()
    spec, run = verify.read_plan(place)
    if os.environ.get("LOCAL_RANK", "0") == "0" and not os.environ.get(SKIP_CHECKS):  # in one process per node
        importlib.import_module("backend.train.rule_check").check_rules(spec, place)
    unsloth.import_unsloth(spec)
    unused_packages.hide(spec, place)
    training = importlib.import_module("backend.train.training")  # only now: Unsloth comes before other libraries
    gc.freeze()
    gc.enable()
    training.train(spec, run, folder, given.from_scratch, group)


if __name__ == "__main__":
    main()
    exit.exit_now()
