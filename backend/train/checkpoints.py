"""Checkpoints of a run: which are complete, which one to resume from, and which are deleted.

Imports runs, run_log. `checkpoints/checkpoint-N` is complete once it contains the file `complete`, which is written
last: a checkpoint that was cut off does not have it.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from backend.runs import CHECKPOINTS, COMPLETE, LOCK
from backend.train.run_log import TrainError

# Where the engines save the optimizer state: Trainer, DeepSpeed (one file per rank), FSDP (one file, or one folder).
OPTIMIZER_STATES = ("optimizer.pt", "global_step*", "optimizer.bin", "optimizer_0")
UNIVERSAL = ".universal"  # in the run's folder: a converted checkpoint, until all ranks have loaded it


def step_of(folder: Path) -> int:
    """The step of checkpoint-N; -1 for any other name."""
    match = re.fullmatch(r"checkpoint-(\d+)", folder.name)
    return int(match[1]) if match else -1


def complete(run: Path) -> list[Path]:
    """The run's complete checkpoints, oldest first."""
    found = [p for p in (run / CHECKPOINTS).glob("checkpoint-*") if step_of(p) >= 0 and (p / COMPLETE).is_file()]
    return sorted(found, key=step_of)


def delete_incomplete(run: Path, from_scratch: bool = False) -> None:
    """Delete incomplete checkpoints and, with `from_scratch`, those of earlier starts. Ranks that torchrun restarts
    belong to the same start, so they resume from what it has saved."""
    kept = [folder for folder in complete(run) if not from_scratch or _of_this_start(run, folder)]
    for folder in (run / CHECKPOINTS).glob("checkpoint-*"):
        if folder not in kept:
            _delete(folder)
    shutil.rmtree(run / UNIVERSAL, ignore_errors=True)


def _of_this_start(run: Path, folder: Path) -> bool:
    lock = run / LOCK  # its modification time is when the run was last started
    return lock.exists() and (folder / COMPLETE).stat().st_mtime_ns >= lock.stat().st_mtime_ns


def latest(run: Path) -> Path | None:
    """The latest complete checkpoint that training can resume from."""
    return next((folder for folder in reversed(complete(run)) if has_optimizer_state(folder)), None)


def has_optimizer_state(folder: Path) -> bool:
    """Whether training can resume from it; a checkpoint of save.only_model has the weights only."""
    return any(any(folder.glob(name)) for name in OPTIMIZER_STATES)


def at_path(path: str) -> Path:
    """The checkpoint that save.resume_path names. Raises TrainError."""
    folder = Path(path).expanduser().resolve()
    if not (folder / "trainer_state.json").is_file():
        raise TrainError(
            f"save.resume_path: {path or '(empty)'} is not a checkpoint. Set it to a checkpoint-N folder of a run."
        )
    if folder.parent.name == CHECKPOINTS and not (folder / COMPLETE).is_file():
        raise TrainError(f"save.resume_path: {folder} is incomplete: writing it was interrupted. Use an earlier one.")
    if not has_optimizer_state(folder):
        raise TrainError(
            f"save.resume_path: {folder} contains weights only (save.only_model), so training cannot resume from it."
        )
    return folder


def mark_complete(folder: Path) -> None:
    """Mark the checkpoint as complete: all ranks have written their part."""
    (folder / COMPLETE).touch()


def rotate(run: Path, keep: int, best: str | None) -> None:
    """Delete the oldest complete checkpoints beyond `keep` (0: none), but never the best one."""
    found = complete(run)
    for folder in found[: max(0, len(found) - keep)] if keep else ():
        if best is None or folder.resolve() != Path(best).resolve():
            _delete(folder)


def _delete(folder: Path) -> None:
    (folder / COMPLETE).unlink(missing_ok=True)  # first, so that a partly deleted checkpoint does not look complete
    shutil.rmtree(folder, ignore_errors=True)
