"""Data files that users send from their browser, in one folder.

A file arrives in parts, and has its name only when it is complete. What has arrived is kept, so that an upload
continues after a lost connection, a reload of the page or a restart of the server.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import time
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from stat import S_ISREG

from backend.data.compression import data_suffix, is_compressed
from backend.data.reading import SUFFIXES, SUPPORTED
from backend.runs import replace_text
from backend.runs.json_values import as_unicode

MAX_BYTES = 20 * 10**9
RESERVE = 10**9  # bytes of the disk that an upload leaves free
MAX_NAME = 200  # bytes; a file system allows 255
KEPT_SECONDS = 7 * 86_400  # how long the parts of an interrupted upload are kept
PARTS = ".parts"
RECORD = ".json"  # suffix after the id of a complete upload


class UploadError(ValueError):
    """A file that is not accepted; the message is a sentence."""


@dataclass(frozen=True)
class Upload:
    """A file as the browser describes it: its name, its size in bytes, and when it was changed (in ms). Choosing the
    same file again continues the same upload."""

    name: str
    size: int
    modified: int

    @property
    def id(self) -> str:
        """The name of the file with the parts."""
        text = f"{self.name}\n{self.size}\n{self.modified}".encode("utf-8", "surrogatepass")
        return hashlib.sha256(text).hexdigest()[:32]


class Uploads:
    """The data files in a folder, which is created with the first one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def files(self) -> list[tuple[Path, os.stat_result]]:
        """The complete files, newest first."""
        found = []
        for path in self.folder.glob("[!.]*"):
            with suppress(FileNotFoundError):  # deleted meanwhile
                found.append((path, path.lstat()))
        regular = [(path, stat) for path, stat in found if S_ISREG(stat.st_mode)]
        return sorted(regular, key=lambda each: (-each[1].st_mtime_ns, each[0].name))

    def receive(self, upload: Upload, offset: int, part: bytes) -> tuple[int, Path | None]:
        """Store the bytes after the first `offset` ones. Returns how many bytes have arrived in all, and the file if it
        is complete. A part that does not continue the stored bytes is ignored: the sender continues from the returned
        number. Raises UploadError."""
        name = file_name(upload.name)
        _check_size(name, upload.size)
        if offset + len(part) > upload.size:
            raise UploadError(f"{name} changed during the upload. Upload it again.")
        with self._lock() as parts:
            if finished := self._finished(parts, upload):
                return upload.size, finished
            path = parts / upload.id
            arrived = path.stat().st_size if path.exists() else 0
            if arrived < upload.size:
                self._check_space(name, upload.size - arrived)
            if offset == arrived and part:
                _append(path, arrived, part)
                arrived += len(part)
            return arrived, self._finish(parts, upload, name) if arrived == upload.size else None

    def remove(self, name: str) -> None:
        """Delete a file. A missing file counts as deleted."""
        for path, _ in self.files():
            if path.name == name:
                path.unlink(missing_ok=True)

    @contextmanager
    def _lock(self) -> Iterator[Path]:
        """The folder of the parts, locked for one request at a time, even across several servers with the same
        folder."""
        parts = self.folder / PARTS
        for folder in (self.folder, parts):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(parts / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _delete_old(parts)
            yield parts
        finally:
            os.close(lock)

    def _check_space(self, name: str, missing: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if free - RESERVE < missing:
            raise UploadError(
                f"There is not enough space for {name}: it needs {_gb(missing)}, and the disk of {self.folder} has "
                f"{_gb(max(0, free - RESERVE))} for uploads. Delete uploaded files or old runs, or copy the file to "
                "another disk and enter its path."
            )

    def _finish(self, parts: Path, upload: Upload, name: str) -> Path:
        """Give a complete file its name, with a number if another file has it, and remember that it is complete."""
        names = (name if number == 1 else _numbered(name, number) for number in count(1))
        target = next(path for path in map(self.folder.joinpath, names) if not os.path.lexists(path))
        stat = (parts / upload.id).stat()
        record = [target.name, stat.st_ino, stat.st_mtime_ns]
        replace_text(parts / f"{upload.id}{RECORD}", json.dumps(record), mode=0o600)
        (parts / upload.id).rename(target)
        return target

    def _finished(self, parts: Path, upload: Upload) -> Path | None:
        """The file of an upload that is complete already: its last response was lost, or the file is sent once more."""
        try:
            name, inode, modified = json.loads((parts / f"{upload.id}{RECORD}").read_text(encoding="utf-8"))
            path = self.folder / name
            stat = path.lstat()
        except (OSError, ValueError):
            return None
        is_same = (stat.st_ino, stat.st_mtime_ns, stat.st_size) == (inode, modified, upload.size)
        return path if is_same else None


def file_name(text: str) -> str:
    """The name under which a file is stored. Raises UploadError if it is not the name of a data file."""
    last = re.split(r"[/\\]", unicodedata.normalize("NFC", as_unicode(text)))[-1]
    name = re.sub(r"[\x00-\x1f\x7f]", "_", last).strip().lstrip(". ")
    if data_suffix(Path(name)) not in SUFFIXES:
        advice = " To load a configuration, use Import." if Path(name).suffix in (".yaml", ".yml") else ""
        raise UploadError(f"{text!r:.100} is not a data file. Supported are {SUPPORTED}.{advice}")
    if len(name.encode()) > MAX_NAME:
        raise UploadError(f"The name {name[:40]!r}... has more than {MAX_NAME} bytes. Rename the file.")
    return name


def _check_size(name: str, size: int) -> None:
    if size == 0:
        raise UploadError(f"{name} is empty.")
    if size > MAX_BYTES:
        raise UploadError(
            f"{name} has {_gb(size)}, and uploads are limited to {_gb(MAX_BYTES)}. Copy the file to the server, "
            "for example with rsync, and enter its path."
        )


def _append(path: Path, offset: int, part: bytes) -> None:
    """Write at `offset`, and wait until the disk has it. After an error, the file has at most the beginning of the
    part."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600), "wb") as file:
        file.seek(offset)
        file.write(part)
        file.flush()
        os.fsync(file.fileno())


def _delete_old(parts: Path) -> None:
    for path in parts.glob("[!.]*"):
        if time.time() - path.stat().st_mtime > KEPT_SECONDS:
            path.unlink(missing_ok=True)


def _numbered(name: str, number: int) -> str:
    """train-2.jsonl.gz for train.jsonl.gz."""
    path = Path(name)
    suffix = "".join(path.suffixes[-2:] if is_compressed(path) else path.suffixes[-1:])
    return f"{name.removesuffix(suffix)}-{number}{suffix}"


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
