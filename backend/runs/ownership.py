"""Which runs folders and run folders are safe to use: those that only this user can change, without symbolic links in
place of the files that are read.

On Resume, the commands of plan.json run as the user who presses the button, and the page accepts the sessions that are
recorded in the runs folder. What another user can write there could be a trap.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
import tempfile
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path

from backend.runs import CHECKPOINTS, MODEL, PLAN, RANK_LOGS

MAY_BE_LINKS = (CHECKPOINTS, MODEL, RANK_LOGS)  # moved to another disk by the user; never served or run
MAX_ENTRIES = 10_000
OTHER_FOLDER = "another folder with --runs."


def problem(folder: Path) -> str:
    """Why the run in `folder` must not be used, as a sentence; '' if it may be."""
    try:
        status, plan = os.lstat(folder), os.lstat(folder / PLAN)
        if not stat.S_ISDIR(status.st_mode) or not stat.S_ISREG(plan.st_mode):
            return f"{folder.name} is a symbolic link, or its {PLAN} is not a regular file."
        own = own_uid(folder.parent)
        if status.st_uid != own or plan.st_uid != own:
            return f"The run {folder.name} belongs to another user, who decides what it would execute."
        with os.scandir(folder) as entries:
            for _, entry in zip(range(MAX_ENTRIES), entries, strict=False):
                if entry.is_symlink() and entry.name not in MAY_BE_LINKS:
                    return f"{entry.name} in the run folder {folder.name} is a symbolic link: remove it."
    except OSError as error:
        return f"The run {folder.name} cannot be read: {error.strerror}.{access_help(folder, error)}"
    return ""


def access_help(folder: Path, error: OSError) -> str:
    """How to get access to a folder that denies it, as a sentence after a space; '' for other errors."""
    return f" Run `chmod u+rwx {folder}` to get access." if isinstance(error, PermissionError) else ""


def folder_problem(folder: Path) -> str:
    """Why other users could change the runs folder `folder`, as a sentence with the fix; '' if they cannot. What runs
    keep next to each other (the key of the page's sessions, drafts) counts, and so do the folders above: who can write
    there can replace the folder. Raises OSError if it cannot be read."""
    folder, owners = folder.resolve(), trusted_owners(folder)
    with os.scandir(folder) as entries:
        hidden = [folder / entry.name for entry in entries if entry.name.startswith(".")]
    for path in (folder, *hidden):
        if why := exposure(path, owners):
            if path != folder:
                fix = f"Delete {path.name}, or set"
            else:
                fix = f"Run `chmod go-w {path}`, or set" if path.stat().st_uid == own_uid(folder) else "Set"
            return f"{path} {why}, who could log in to the page or replace runs. {fix} {OTHER_FOLDER}"
    for above in folder.parents:
        if why := exposure(above, {*owners, *unmapped_uid()}, is_above=True):
            return f"{above} {why}, who could replace the runs folder {folder} in it. Set {OTHER_FOLDER}"
    return ""


def exposure(path: Path, owners: Collection[int], is_above: bool = False) -> str:
    """Who else can change `path`, as a verb and an object; '' if only `owners` can. In a folder above (`is_above`), the
    sticky bit protects what is in it, and a group is trusted: projects of a team are often in such a folder."""
    status = os.lstat(path)
    if status.st_uid not in owners:
        return f"belongs to {user_name(status.st_uid)}"
    if stat.S_ISLNK(status.st_mode):  # the mode of a link has no meaning
        return ""
    mode = f"(mode {stat.S_IMODE(status.st_mode):04o})"
    if status.st_mode & stat.S_IWOTH and not (is_above and status.st_mode & stat.S_ISVTX):
        return f"can be changed by all users {mode}"
    if status.st_mode & stat.S_IWGRP and not is_above and not _is_private_group(status.st_gid):
        return f"can be changed by the group {_group_name(status.st_gid)} {mode}"
    return ""


def trusted_owners(folder: Path) -> frozenset[int]:
    """The users whose files in `folder` are safe: this user, root, and the owner of this program, who decides what it
    does anyway (as in a container that runs as root in a mounted checkout)."""
    return frozenset({0, os.getuid(), own_uid(folder), os.stat(__file__).st_uid})


def user_name(uid: int) -> str:
    """The user as an error names it: "the user bob (UID 1001)"."""
    try:
        return f"the user {pwd.getpwuid(uid).pw_name} (UID {uid})"
    except KeyError:
        return f"the user with UID {uid}"


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _is_private_group(gid: int) -> bool:
    """Whether the group has the name of this user and no other member, as on systems with umask 002."""
    try:
        group, name = grp.getgrgid(gid), pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return False
    return group.gr_name == name and set(group.gr_mem) <= {name}


def unmapped_uid() -> set[int]:
    """The UID that a container without root shows for all users outside of it, such as the owner of /; none if that is
    an ordinary user."""
    try:
        uid = int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))
        ranges = [line.split() for line in Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()]
    except (OSError, ValueError):
        return set()
    return set() if any(int(first) <= uid < int(first) + int(count) for first, _, count in ranges) else {uid}


@lru_cache(maxsize=64)
def own_uid(root: Path) -> int:
    """The owner of files that this process creates in `root`: some network file systems and containers map users."""
    try:
        with tempfile.TemporaryFile(dir=root) as probe:
            return os.fstat(probe.fileno()).st_uid
    except OSError:
        return os.getuid()
