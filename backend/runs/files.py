"""Opening the files of a run: regular files only.

Opening a named pipe waits until another process opens it too, a device can do anything, and a symbolic link may lead to
the file of another user: none of these is read or written.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Container
from pathlib import Path
from typing import Any, BinaryIO

SAFE = os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
NOT_REGULAR = "Not a regular file"


class IrregularFile(OSError):
    """A pipe, a socket, a device, a folder or a link in the place of a file."""


class PrivateFileError(Exception):
    """Why a file with a secret cannot be used, as a sentence."""


def held(folder: Path) -> Path:
    """Make the run's folder the working directory of this process, and return a path to it. The path stays valid when
    the folder is renamed or its mount is moved; once the folder was deleted, nothing can be created under the path."""
    os.chdir(folder)
    path = Path("/proc/self/cwd")
    return path if path.is_dir() else Path.cwd()  # without /proc, a renamed folder is not found again


def open_regular(path: Path | str, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """The descriptor of a regular file. Raises OSError, and IrregularFile for anything else."""
    try:
        file = os.open(path, flags | SAFE, mode)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ELOOP):  # a pipe without a reader or a socket; a link
            raise IrregularFile(error.errno, NOT_REGULAR, str(path)) from error
        if error.errno == errno.EISDIR:
            raise IrregularFile(error.errno, error.strerror, str(path)) from error
        raise
    kind = os.fstat(file).st_mode
    if stat.S_ISREG(kind):
        return file
    os.close(file)
    raise IrregularFile(errno.EINVAL, os.strerror(errno.EISDIR) if stat.S_ISDIR(kind) else NOT_REGULAR, str(path))


def open_to_read(path: Path) -> BinaryIO:
    """A file object of a regular file. Raises OSError."""
    return open(open_regular(path), "rb")


def open_to_append(path: Path, buffering: int = -1) -> BinaryIO:
    """A file object that appends to a regular file, which is created if it is missing. Raises OSError."""
    return open(open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab", buffering)


def read_bytes(path: Path) -> bytes:
    """The content of a regular file. Raises OSError."""
    with open_to_read(path) as file:
        return file.read()


def read_text(path: Path, errors: str = "strict") -> str:
    """The text of a regular file in UTF-8. Raises OSError, UnicodeDecodeError."""
    return read_bytes(path).decode("utf-8", errors).replace("\r\n", "\n")


def read_private_line(path: Path, name: str) -> str:
    """The first line of a user's own file that nobody else can read or change, such as a password. A link is followed:
    Kubernetes mounts secrets as links. Raises PrivateFileError; `name` is the option or the variable with the path."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), encoding="utf-8") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise PrivateFileError(f"{name} {path} is not a regular file.")
            if status.st_mode & 0o077:
                raise PrivateFileError(f"Other users can read or change {path}: run `chmod 600 {path}`.")
            return file.readline(4096).rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise PrivateFileError(f"{name} {path} cannot be read: {error}.") from None


def check_names(folder: Path, names: Container[str]) -> None:
    """Raise OSError for the first of these `names` in `folder` that is not a regular file."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name in names and not entry.is_file(follow_symlinks=False):
                is_folder = entry.is_dir(follow_symlinks=False)
                raise IrregularFile(errno.EINVAL, os.strerror(errno.EISDIR) if is_folder else NOT_REGULAR, entry.path)


def write_json(path: Path, value: Any) -> None:
    """Replace `path` atomically by `value` as strict JSON."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(value, allow_nan=False, ensure_ascii=False), encoding="utf-8")
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
