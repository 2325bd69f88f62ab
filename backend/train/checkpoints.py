"""Checkpoints of a run: saving, verifying and deleting them.

`checkpoints/checkpoint-N` is complete once it contains the file `complete`, which is written last: a checkpoint that
was cut off does not have it. `complete` lists the size and a hash of every file, so that a checkpoint that was damaged
later is found before a run resumes from it. It also has the start that saved it and the options that it was trained
with.
"""

from __future__ import annotations

import math
import os
import shutil
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from backend.runs import CHECKPOINTS, COMPLETE, checkpoint_files, lock_file, resume_point
from backend.runs.files import write_json
from backend.runs.resume_point import OPTIMIZER_STATES, complete, damage, has_optimizer_state, step_of  # noqa: F401 - read by others as checkpoints.damage
from backend.train.run_log import RunLog, TrainError

UNIVERSAL = ".universal"  # in the run's folder: a converted checkpoint, until all ranks have loaded it
DAMAGED = "damaged-"  # put before the name of a checkpoint that a run skipped
MORE_INODES = 8


def check(run: Path, from_scratch: bool) -> None:
    """Raise TrainError at once if the run cannot be resumed: loading a model takes long, and the Trainer creates the
    folder of the checkpoints."""
    start = lock_file.read(run).start if from_scratch else None
    if problem := resume_point.find(run, start=start).problem:
        raise TrainError(problem)


def latest(run: Path, run_log: RunLog, from_scratch: bool = False) -> Path | None:
    """The latest complete checkpoint that training can resume from. `from_scratch`: only one of this start; ranks that
    torchrun restarts belong to the same start, so they resume from what it has saved. Raises TrainError if checkpoints
    that the run has saved are missing, damaged or cannot be read, and there is no earlier one."""
    start = lock_file.read(run).start if from_scratch else None
    found = resume_point.find(run, check_content=True, start=start)
    if found.problem:
        raise TrainError(found.problem)
    if found.checkpoint:
        check_owner(run, found.checkpoint)
    for name, problem in found.skipped.items():
        run_log.info(f"{name} {problem}. Using an earlier checkpoint.")
        _set_aside(run / CHECKPOINTS / name)
    return found.checkpoint


def check_owner(run: Path, folder: Path) -> None:
    """Raise TrainError if another user could have written the checkpoint in `folder`. The modes of a checkpoint of this
    run are not checked on a file system that does not keep modes; the run's folder, created with 0700, shows this."""
    is_own = folder.parent == run / CHECKPOINTS
    modes_are_kept = not run.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    if problem := checkpoint_files.problem(folder, check_modes=modes_are_kept or not is_own):
        raise TrainError(problem)


def delete_incomplete(run: Path, from_scratch: bool = False) -> None:
    """Delete incomplete checkpoints and, with `from_scratch`, those of earlier starts. Raises TrainError if one of
    these cannot be deleted, since it would be mixed with a checkpoint of the same step."""
    start = lock_file.read(run).start if from_scratch else None
    kept = [folder for folder in complete(run) if start is None or resume_point.is_of_start(folder, start)]
    place = run / CHECKPOINTS
    for name in os.listdir(place) if place.is_dir() else ():
        folder = place / name
        if step_of(folder) < 0 or folder in kept:
            continue
        with suppress(OSError):  # reported below
            delete(folder)
        if from_scratch and os.path.lexists(folder):
            raise TrainError(
                f"{folder.resolve()} cannot be deleted, so the run cannot restart from scratch. Delete it, or make it "
                "deletable."
            )
    shutil.rmtree(run / UNIVERSAL, ignore_errors=True)


def _set_aside(folder: Path) -> None:
    """Rename a checkpoint that was skipped, so that the run can write it again. Raises TrainError."""
    target = folder.with_name(DAMAGED + folder.name)
    if not os.path.lexists(folder):
        return
    shutil.rmtree(target, ignore_errors=True)
    try:
        folder.rename(target)
    except OSError as error:
        raise TrainError(
            f"{folder.absolute()} cannot be used, and cannot be renamed ({error.strerror}). Move it away."
        ) from error


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
            f"save.resume_path: {folder} contains the weights without an optimizer state, so training cannot resume "
            "from it. Use a checkpoint that was saved with save.only_model off."
        )
    if problem := checkpoint_files.problem(folder):
        raise TrainError(f"save.resume_path: {problem}")
    if (folder / COMPLETE).is_file() and (problem := damage(folder)):
        raise TrainError(f"save.resume_path: {folder} is damaged: {problem}. Use another checkpoint.")
    return folder


def last_size(run: Path) -> tuple[int, int]:
    """Bytes and inodes of the latest complete checkpoint; 0 without one. Folders, the marker and temporary files need a
    few more inodes than the checkpoint has files."""
    with suppress(OSError, ValueError, TypeError):
        for folder in complete(run)[-1:]:
            sizes = [size for size, _ in resume_point.recorded_files(folder).values()]
            return sum(sizes), len(sizes) + MORE_INODES
    return 0, 0


def mark_complete(folder: Path, options: Mapping[str, Any] | None = None) -> None:
    """Mark the checkpoint as complete, once all ranks have written their part. `options`: those of the training."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / COMPLETE)
    files = {path.relative_to(folder).as_posix(): resume_point.fingerprint(path) for path in paths}
    start = lock_file.read(folder.parent.parent).start
    write_json(folder / COMPLETE, {"files": files, "start": start, **({"options": options} if options else {})})


def rotate(
    run: Path, keep: int, best: str | None, keep_best: int = 0, history: Sequence[Mapping[str, Any]] = (),
    before: float | None = None,
) -> None:  # fmt: skip
    """Delete the oldest complete checkpoints beyond `keep` (0: none). These are always kept: the best one; the
    `keep_best` ones with the lowest eval loss in `history` (the Trainer's log_history, which a resumed run reads from
    its checkpoint); the newest one before the step `before`, and the one after that, which is needed once `before`
    advances."""
    found = complete(run)
    earlier = [folder for folder in found if before is not None and step_of(folder) < before]
    spare = [] if before is None else [*earlier[-1:], *found[len(earlier) :][:1]]
    losses = {entry["step"]: entry["eval_loss"] for entry in history if "eval_loss" in entry}
    ranked = [folder for folder in found if math.isfinite(losses.get(step_of(folder), math.nan))]
    kept = sorted(ranked, key=lambda folder: losses[step_of(folder)])[:keep_best]  # the earlier of equal losses
    for folder in found[: max(0, len(found) - keep)] if keep else ():
        if folder not in (*kept, *spare) and (best is None or folder.resolve() != Path(best).resolve()):
            delete(folder)


def delete(folder: Path) -> None:
    """Delete a checkpoint."""
    (folder / COMPLETE).unlink(missing_ok=True)  # first, so that a partly deleted checkpoint does not look complete
    shutil.rmtree(folder, ignore_errors=True)
