"""Checkpoints of a run: which are complete, which one to resume from, and which are deleted.

Imports runs, run_log. `checkpoints/checkpoint-N` is complete once it contains the file `complete`, which is written
last: a checkpoint that was cut off does not have it. `complete` lists the size and a hash of every file, so that a
checkpoint that was damaged later is found before a run resumes from it.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from backend.runs import CHECKPOINTS, COMPLETE, LOCK
from backend.train.run_log import RunLog, TrainError, write_json

# Where the engines save the optimizer state: Trainer, DeepSpeed (one file per rank), FSDP (one file, or one folder).
OPTIMIZER_STATES = ("optimizer.pt", "global_step*", "optimizer.bin", "optimizer_0")
UNIVERSAL = ".universal"  # in the run's folder: a converted checkpoint, until all ranks have loaded it
DAMAGED = "damaged-"  # put before the name of a checkpoint that a run skipped
# Files up to WHOLE_BYTES are hashed completely, larger ones in BLOCKS blocks, the first and the last among them. This
# finds truncated files and files that a power failure left with blocks of zeros, and costs nothing next to writing
# gigabytes; SHA-256 of all bytes would take as long as writing them to a fast disk.
WHOLE_BYTES, BLOCKS, BLOCK_BYTES = 2**20, 64, 2**14


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
            delete(folder)
    shutil.rmtree(run / UNIVERSAL, ignore_errors=True)


def _of_this_start(run: Path, folder: Path) -> bool:
    lock = run / LOCK  # its modification time is when the run was last started
    return lock.exists() and (folder / COMPLETE).stat().st_mtime_ns >= lock.stat().st_mtime_ns


def latest(run: Path, run_log: RunLog) -> Path | None:
    """The latest complete checkpoint that training can resume from. Damaged ones are renamed, so that the run can write
    them again. Raises TrainError if all are damaged."""
    damaged: dict[Path, str] = {}
    for folder in filter(_saved_optimizer_state, reversed(complete(run))):
        if problem := damage(folder):
            damaged[folder] = problem
            continue
        for other, problem in damaged.items():
            run_log.info(f"{other.name} is damaged: {problem}. Using an earlier checkpoint.")
            _set_aside(other)
        return folder
    for folder, problem in damaged.items():  # the newest first
        raise TrainError(
            f"{folder} is damaged: {problem}. The run has no earlier checkpoint to resume from. Restore the file, or "
            'start at step 0: "Restart from scratch" on the page, footplate resume --from-scratch in a shell.'
        )
    return None


def damage(folder: Path) -> str:
    """How the checkpoint's files differ from what was saved; '' if they do not, or if their sizes were not recorded."""
    if (folder / COMPLETE).stat().st_size and not _recorded_files(folder):
        return f"its file {COMPLETE} cannot be read"
    for name, (size, digest) in _recorded_files(folder).items():
        try:
            found_size, found_digest = _fingerprint(folder / name)
        except FileNotFoundError:
            return f"its file {name} is missing"
        except OSError as error:
            return f"its file {name} cannot be read ({error.strerror})"
        if found_size != size:
            return f"its file {name} has {found_size:,} bytes, but {size:,} were saved"
        if found_digest != digest:
            return f"the content of its file {name} is not what was saved"
    return ""


def _recorded_files(folder: Path) -> dict[str, tuple[int, str]]:
    """File name -> size and hash when the checkpoint was saved."""
    try:
        return dict(json.loads((folder / COMPLETE).read_text(encoding="utf-8"))["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _saved_optimizer_state(folder: Path) -> bool:
    """Whether the checkpoint had optimizer state when it was saved."""
    names = {name.partition("/")[0] for name in _recorded_files(folder)}
    return has_optimizer_state(folder) or any(fnmatch.filter(names, state) for state in OPTIMIZER_STATES)


def _fingerprint(path: Path) -> tuple[int, str]:
    """Size and hash of a file; of a large one, the hash of blocks that are spread evenly over it."""
    with path.open("rb") as file:
        size, digest = file.seek(0, 2), hashlib.sha256()
        if size <= WHOLE_BYTES:
            file.seek(0)
            digest.update(file.read())
            return size, digest.hexdigest()
        for number in range(BLOCKS):
            file.seek((size - BLOCK_BYTES) * number // (BLOCKS - 1))
            digest.update(file.read(BLOCK_BYTES))
    return size, digest.hexdigest()


def _set_aside(folder: Path) -> None:
    target = folder.with_name(DAMAGED + folder.name)
    shutil.rmtree(target, ignore_errors=True)
    folder.rename(target)


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
    if (folder / COMPLETE).is_file() and (problem := damage(folder)):
        raise TrainError(f"save.resume_path: {folder} is damaged: {problem}. Use another checkpoint.")
    return folder


def last_size(run: Path) -> int:
    """Bytes of the latest complete checkpoint; 0 without one."""
    return sum(size for folder in complete(run)[-1:] for size, _ in _recorded_files(folder).values())


def mark_complete(folder: Path) -> None:
    """Mark the checkpoint as complete: all ranks have written their part."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / COMPLETE)
    files = {path.relative_to(folder).as_posix(): _fingerprint(path) for path in paths}
    write_json(folder / COMPLETE, {"files": files})


def rotate(
    run: Path, keep: int, best: str | None, keep_best: int = 0, history: Sequence[Mapping[str, Any]] = ()
) -> None:
    """Delete the oldest complete checkpoints beyond `keep` (0: none), but never the best one, nor the `keep_best` ones
    with the lowest eval loss in `history`, the log_history of the Trainer, which a resumed run reads from its
    checkpoint."""
    found = complete(run)
    losses = {entry["step"]: entry["eval_loss"] for entry in history if "eval_loss" in entry}
    ranked = [folder for folder in found if math.isfinite(losses.get(step_of(folder), math.nan))]
    kept = sorted(ranked, key=lambda folder: losses[step_of(folder)])[:keep_best]  # of equal losses, the earlier
    for folder in found[: max(0, len(found) - keep)] if keep else ():
        if folder not in kept and (best is None or folder.resolve() != Path(best).resolve()):
            delete(folder)


def delete(folder: Path) -> None:
    """Delete a checkpoint."""
    (folder / COMPLETE).unlink(missing_ok=True)  # first, so that a partly deleted checkpoint does not look complete
    shutil.rmtree(folder, ignore_errors=True)
