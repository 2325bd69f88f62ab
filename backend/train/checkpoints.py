"""Checkpoints: which are complete, which one to go on from, and which are deleted.

Beside the floors. Imports run, journal. `checkpoints/checkpoint-N` is complete once it holds the file `complete`,
written last: whatever was cut off by a kill does not have it.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from backend.runs import CHECKPOINTS, COMPLETE, LOCK
from backend.train.run_log import TrainError

# Where each engine keeps the optimizer's state: DeepSpeed a file a rank, FSDP one file, or a folder of all parts.
OPTIMIZERS = ("optimizer.pt", "global_step*", "optimizer.bin", "optimizer_0")
CONVERTED = ".universal"  # in a run: of a checkpoint, until all ranks have loaded it


def step_of(folder: Path) -> int:
    """The step of checkpoint-N; -1 for another name."""
    found = re.fullmatch(r"checkpoint-(\d+)", folder.name)
    return int(found[1]) if found else -1


def complete(run: Path) -> list[Path]:
    """The run's complete checkpoints, oldest first."""
    found = [p for p in (run / CHECKPOINTS).glob("checkpoint-*") if step_of(p) >= 0 and (p / COMPLETE).is_file()]
    return sorted(found, key=step_of)


def sweep(run: Path, from_scratch: bool = False) -> None:
    """Delete incomplete checkpoints, and with `from_scratch` also those of earlier starts. Ranks that torchrun restarts
    belong to the same start, so they resume from what it has saved."""
    kept = [folder for folder in complete(run) if not from_scratch or _of_this_start(run, folder)]
    for folder in (run / CHECKPOINTS).glob("checkpoint-*"):
        if folder not in kept:
            _delete(folder)
    shutil.rmtree(run / CONVERTED, ignore_errors=True)


def _of_this_start(run: Path, folder: Path) -> bool:
    started = run / LOCK  # its change time is when the run was last started
    return started.exists() and (folder / COMPLETE).stat().st_mtime_ns >= started.stat().st_mtime_ns


def last(run: Path) -> Path | None:
    """The last complete checkpoint that training can go on from."""
    return next((folder for folder in reversed(complete(run)) if resumable(folder)), None)


def resumable(folder: Path) -> bool:
    """Whether it holds the optimizer's state, and not weights alone."""
    return any(any(folder.glob(name)) for name in OPTIMIZERS)


def named(path: str) -> Path:
    """The checkpoint that a person named. Raises TrainError."""
    folder = Path(path).expanduser().resolve()
    if not (folder / "trainer_state.json").is_file():
        raise TrainError(
            f"save.resume_path: {path or '(empty)'} is no checkpoint: name a checkpoint-N folder of a run."
        )
    if folder.parent.name == CHECKPOINTS and not (folder / COMPLETE).is_file():
        raise TrainError(f"save.resume_path: {folder} was cut off while it was written: take an earlier one.")
    if not resumable(folder):
        raise TrainError(f"save.resume_path: {folder} holds weights only, so training cannot go on from it.")
    return folder


def mark(folder: Path) -> None:
    """Say that the checkpoint is complete: all ranks have written their part."""
    (folder / COMPLETE).touch()


def rotate(run: Path, keep: int, best: str | None) -> None:
    """Delete the oldest complete checkpoints beyond `keep` (0: none), never the best one."""
    found = complete(run)
    for folder in found[: max(0, len(found) - keep)] if keep else ():
        if best is None or folder.resolve() != Path(best).resolve():
            _delete(folder)


def _delete(folder: Path) -> None:
    (folder / COMPLETE).unlink(missing_ok=True)  # first: half a deletion must not look complete
    shutil.rmtree(folder, ignore_errors=True)
