"""The checkpoint that a run resumes from: one answer for the page, the command line and the trainer.

A checkpoint that cannot be read, or that is missing although events.jsonl has it as saved, is not the same as no
checkpoint: a run that started at step 0 instead would hide the points that were logged before.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backend.runs import CHECKPOINTS, COMPLETE, events, files, json_values

# Where the engines save the optimizer state: Trainer, DeepSpeed (one file per rank), FSDP (one file, or one folder).
OPTIMIZER_STATES = ("optimizer.pt", "global_step*", "optimizer.bin", "optimizer_0")
# Files up to WHOLE_BYTES are hashed completely, larger ones in BLOCKS blocks, the first and the last among them. This
# finds truncated files and files that a power failure left with blocks of zeros, and costs nothing next to writing
# gigabytes; SHA-256 of all bytes would take as long as writing them to a fast disk.
WHOLE_BYTES, BLOCKS, BLOCK_BYTES = 2**20, 64, 2**14
# In stateful_callbacks of trainer_state.json: the place of each data-parallel rank in streamed datasets.
STREAM_PLACES = "stream"
HOW_TO_START = '"Restart from scratch" on the page, footplate resume --from-scratch in a shell'


@dataclass(frozen=True)
class ResumePoint:
    """`checkpoint`: None for step 0. `skipped`: newer checkpoints that cannot be used, newest first, and why, such as
    "is missing". `problem`: why the run cannot be resumed and how to fix it, as sentences; '' if it can.
    `weights_only`: there are checkpoints, but without optimizer state."""

    checkpoint: Path | None = None
    skipped: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""
    weights_only: bool = False

    @property
    def sentence(self) -> str:
        """What Resume does, for users."""
        if self.problem:
            return f"The run cannot be resumed: {self.problem}"
        if self.checkpoint is None:
            kind = "no checkpoint with optimizer state" if self.weights_only else "no checkpoint"
            return f"There is {kind}, so the run would start again at step 0."
        why = "; ".join(f"{name} {problem}" for name, problem in self.skipped.items())
        return f"Resume continues from checkpoint {step_of(self.checkpoint)}{f': {why}' if why else ''}."


def find(run: Path, check_content: bool = False, start: str | None = None) -> ResumePoint:
    """The newest checkpoint with optimizer state that can be read. `check_content` also compares hashes, which reads up
    to a megabyte of each file. `start`: only checkpoints of the start with this id, as after a restart from scratch."""
    place, shown = run / CHECKPOINTS, run.resolve() / CHECKPOINTS
    try:
        names = os.listdir(place)
    except FileNotFoundError:
        names = []
    except OSError as error:
        fix = f"Restore access to it, or start at step 0: {HOW_TO_START}."
        return ResumePoint(problem=f"{shown} cannot be read ({error.strerror}). {fix}")
    steps = sorted(step for name in names if (step := step_of(Path(name))) >= 0)
    saved = last_saved(run) if start is None else 0
    skipped = {}
    if saved > max(steps, default=0):
        skipped[f"checkpoint-{saved}"] = "is missing, although the run has saved it"
    weights_only = False
    for step in reversed(steps):
        folder = place / f"checkpoint-{step}"
        if start is not None and not is_of_start(folder, start):
            continue
        problem = _problem(folder, check_content, was_saved=step == saved)
        if problem is None:
            continue
        if problem:
            skipped[folder.name] = problem
        elif saved_optimizer_state(folder):
            return ResumePoint(folder, skipped)
        else:
            weights_only = True
    for name, problem in skipped.items():
        text = f"{shown / name} {problem}. The run has no earlier checkpoint to resume from. Restore it, or start at"
        return ResumePoint(None, skipped, f"{text} step 0: {HOW_TO_START}.")
    return ResumePoint(weights_only=weights_only)


def _problem(folder: Path, check_content: bool, was_saved: bool) -> str | None:
    """Why the checkpoint cannot be used; '' if it can; None if it is incomplete because saving it was interrupted."""
    try:
        os.stat(folder / COMPLETE)
        os.listdir(folder)
    except FileNotFoundError:
        return f"is damaged: its file {COMPLETE} is missing" if was_saved else None
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    found = damage(folder, check_content)
    return f"is damaged: {found}" if found else ""


def last_saved(run: Path) -> int:
    """The step of the last checkpoint that the run has recorded as saved since it last began at step 0; 0 for none."""
    return max((event["step"] for event in events.read(run) if event["kind"] == events.SAVED), default=0)


def step_of(folder: Path) -> int:
    """The step of checkpoint-N; -1 for any other name."""
    match = re.fullmatch(r"checkpoint-(\d+)", folder.name)
    return int(match[1]) if match else -1


def position(checkpoint: Path) -> tuple[int, float]:
    """The step of a checkpoint, and its position in the epochs of the run that saved it; (0, 0.0) if it does not say,
    as with a streamed dataset."""
    state = json_values.read_object((checkpoint / "trainer_state.json").resolve())
    step, epoch = state.get("global_step"), state.get("epoch")
    is_stream = STREAM_PLACES in (state.get("stateful_callbacks") or ())
    if is_stream or not json_values.is_number(step) or not json_values.is_number(epoch):
        return 0, 0.0
    return int(step), float(epoch)


def complete(run: Path) -> list[Path]:
    """The run's complete checkpoints, oldest first; without those that cannot be read."""
    try:
        found = [run / CHECKPOINTS / name for name in os.listdir(run / CHECKPOINTS)]
    except OSError:
        return []
    return sorted((path for path in found if step_of(path) >= 0 and os.path.isfile(path / COMPLETE)), key=step_of)


# -- one checkpoint ----------------------------------------------------------------------------------------------------


def read_mark(folder: Path) -> dict[str, Any]:
    """What is in the file that marks the checkpoint as complete; empty if it says nothing. Raises OSError,
    ValueError."""
    text = files.read_text(folder / COMPLETE)
    found = json.loads(text or "{}")
    if not isinstance(found, dict):
        raise ValueError
    return found


def is_of_start(folder: Path, start: str) -> bool:
    """Whether the start with this id has saved the checkpoint. Times would not tell after the clock was set back."""
    try:
        return bool(start) and read_mark(folder).get("start") == start
    except (OSError, ValueError):
        return False


def damage(folder: Path, check_content: bool = True) -> str:
    """How the checkpoint's files differ from what was saved; '' if they do not, or if their sizes were not recorded."""
    try:
        recorded = recorded_files(folder)
    except (OSError, ValueError, TypeError):
        return f"its file {COMPLETE} cannot be read"
    for name, (size, digest) in recorded.items():
        try:
            found_size, found_digest = fingerprint(folder / name) if check_content else (_size(folder / name), digest)
        except FileNotFoundError:
            return f"its file {name} is missing"
        except OSError as error:
            return f"its file {name} cannot be read ({error.strerror})"
        if found_size != size:
            return f"its file {name} has {found_size:,} bytes, but {size:,} were saved"
        if found_digest != digest:
            return f"the content of its file {name} is not what was saved"
    return ""


def recorded_files(folder: Path) -> dict[str, tuple[int, str]]:
    """File name -> size and hash when the checkpoint was saved; empty if they were not recorded. Raises OSError,
    ValueError, TypeError."""
    return {str(name): (int(size), str(digest)) for name, (size, digest) in read_mark(folder).get("files", {}).items()}


def saved_optimizer_state(folder: Path) -> bool:
    """Whether the checkpoint had optimizer state when it was saved."""
    try:
        names = {name.partition("/")[0] for name in recorded_files(folder)}
    except (OSError, ValueError, TypeError):
        names = set()
    return has_optimizer_state(folder) or any(fnmatch.filter(names, state) for state in OPTIMIZER_STATES)


def has_optimizer_state(folder: Path) -> bool:
    """Whether training can resume from it; a checkpoint of save.only_model has the weights only."""
    return any(any(folder.glob(name)) for name in OPTIMIZER_STATES)


def _size(path: Path) -> int:
    """Bytes of a file that can be opened."""
    file = files.open_regular(path)
    try:
        return os.fstat(file).st_size
    finally:
        os.close(file)


def fingerprint(path: Path) -> tuple[int, str]:
    """Size and hash of a file; for a large file, the hash of blocks that are spread evenly over it."""
    with files.open_to_read(path) as file:
        size, digest = file.seek(0, 2), hashlib.sha256()
        if size <= WHOLE_BYTES:
            file.seek(0)
            digest.update(file.read())
            return size, digest.hexdigest()
        for number in range(BLOCKS):
            file.seek((size - BLOCK_BYTES) * number // (BLOCKS - 1))
            digest.update(file.read(BLOCK_BYTES))
    return size, digest.hexdigest()
