"""Which checkpoints are safe to load: those that only this user can have written.

A checkpoint can run code when it is loaded: DeepSpeed 0.19 reads its files with torch.load(weights_only=False), and
torch 2.13 unpickles `.metadata` of a sharded checkpoint (distributed/checkpoint/filesystem.py, read_metadata). So every
file of every kind of checkpoint is checked.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from backend.runs import ownership

MAX_FILES = 100_000


def problem(folder: Path, check_modes: bool = True) -> str:
    """Why the checkpoint in `folder` must not be loaded, as a sentence; '' if only this user can have written it.

    Each file, and each folder above, must belong to a user whom `ownership` trusts. With `check_modes`, nobody else may
    be able to write it: by its own mode, or because nobody else can enter a folder above. Symbolic links are followed.
    """
    try:
        return _Checkpoint(folder, check_modes).problem()
    except OSError as error:
        return f"{error.filename or folder} cannot be read: {error.strerror}."


class _Checkpoint:
    """The files of a checkpoint, and of the folders that its symbolic links lead to."""

    def __init__(self, folder: Path, check_modes: bool) -> None:
        self.owners, self.check_modes = ownership.trusted_owners(folder), check_modes
        self.folders = [folder.resolve(strict=True)]
        self.seen: set[Path] = set()

    def problem(self) -> str:
        """The first problem."""
        while self.folders:
            folder = self.folders.pop()
            if folder in self.seen:
                continue
            self.seen.add(folder)
            if why := self._problem_of_path(folder):
                return why
            with os.scandir(folder) as entries:
                for entry in entries:
                    if why := self._problem_of_entry(Path(entry.path), entry.is_symlink()):
                        return why
        return ""

    def _problem_of_entry(self, path: Path, is_link: bool) -> str:
        if len(self.seen) > MAX_FILES:
            return f"{path.parent} has more than {MAX_FILES:,} files, which are too many for a checkpoint."
        target = path.resolve(strict=True) if is_link else path
        if target.is_dir():
            self.folders.append(target)
            return ""
        self.seen.add(target)
        above = self._problem_of_path(target.parent) if is_link else ""
        return above or self._exposure(target, target.parent)

    def _problem_of_path(self, folder: Path) -> str:
        """Why a folder of the checkpoint, or a folder above it, is not safe; '' if all are."""
        above = (self._exposure(parent, parent, is_above=True) for parent in folder.parents)
        return self._exposure(folder, folder) or next(filter(None, above), "")

    def _exposure(self, path: Path, inside: Path, is_above: bool = False) -> str:
        """Who else can change `path`, which others reach only if they can enter `inside`."""
        owners = {*self.owners, *(ownership.unmapped_uid() if is_above else ())}
        has_foreign_owner = path.stat().st_uid not in owners
        if not has_foreign_owner and (not self.check_modes or self._is_private(inside)):
            return ""
        if not (why := ownership.exposure(path, owners, is_above)):
            return ""
        copy = "copy the checkpoint to a folder that only you can write to, and resume from the copy"
        fix = (
            f"If you trust it, {copy}."
            if has_foreign_owner
            else f"If you trust it, run `chmod go-w {path}`, or {copy}."
        )
        return f"{path} {why}, and a checkpoint can run code when it is loaded. {fix}"

    def _is_private(self, folder: Path) -> bool:
        """Whether `folder`, or one above, cannot be entered by anyone but its owner, whom we trust."""
        for parent in (folder, *folder.parents):
            status = parent.stat()
            if status.st_uid in self.owners and not status.st_mode & (stat.S_IXGRP | stat.S_IXOTH):
                return True
        return False
