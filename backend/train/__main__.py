"""`torchrun -m backend.train . [--from-scratch]`, with a run's folder as working directory: a training's process.

Beside the floors. Imports options, presets, run, device, ending, journal, unsloth; training, which has all the rest.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record

from backend.config.options import SpecError, effective
from backend.config.presets import read
from backend.runs import SPEC
from backend.train import device, exit, unsloth
from backend.train.run_log import TrainError


@record  # type: ignore[untyped-decorator]
def main() -> None:
    """Train what spec.yaml says."""
    parser = argparse.ArgumentParser(prog="python -m backend.train", description=__doc__)
    parser.add_argument("folder", type=Path, help="the run's folder, with spec.yaml")
    parser.add_argument(
        "--from-scratch", action="store_true", help="start at step 0 instead of resuming from the last checkpoint"
    )
    given = parser.parse_args()
    sys.excepthook = exit.last_words
    team, folder = device.ProcessGroup(), given.folder.resolve()
    team.sign()
    try:
        spec = effective(read(folder / SPEC))
    except SpecError as error:
        raise TrainError(f"{error}.") from error
    unsloth.begin(spec)
    training = importlib.import_module("backend.train.training")  # only now: Unsloth comes before other libraries
    training.train(spec, folder, given.from_scratch, team)


if __name__ == "__main__":
    main()
    exit.leave()
