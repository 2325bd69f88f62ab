"""torch's lock around the build of an extension stays after the process that built it was killed.

utils/cpp_extension.py, `_jit_compile`: the lock is a file that exists during the build (utils/file_baton.py). Without
the patch every later run on this machine waits for that file forever, silently.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

LIBRARY, SEEN_IN = "torch", "2.13.0"
POLL_SECONDS = 0.1


class BuildLock:
    """Replaces torch's FileBaton. The owner also holds a flock on the file, which the kernel releases when the owner
    ends, however it ends; a process that waits then becomes the owner and continues the build. Programs without the
    patch hold no flock, but keep the file open. `waiting` is the lock that this process waits for now, or ''."""

    waiting = ""

    def __init__(
        self, lock_file_path: str, wait_seconds: float = POLL_SECONDS, warn_after_seconds: object = None
    ) -> None:
        self.path, self.poll_seconds = Path(lock_file_path), wait_seconds
        self.fd, self._seen_unowned = -1, False

    def try_acquire(self) -> bool:
        """Wait until this process owns the lock (True), or until another one has finished the build (False)."""
        waited = False
        try:
            while (acquired := self._acquire(create=not waited)) is None:
                waited, BuildLock.waiting = True, str(self.path)
                time.sleep(self.poll_seconds)
        finally:
            BuildLock.waiting = ""
        return acquired

    def _acquire(self, create: bool) -> bool | None:
        """Whether this process owns the lock; None while another one does."""
        fd = -1
        if create:
            with suppress(FileExistsError):
                fd = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR)
        created = fd >= 0
        try:
            fd = fd if created else os.open(self.path, os.O_RDWR)
        except FileNotFoundError:
            return False
        with suppress(OSError):  # another process has the flock, or has removed the file meanwhile
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), self.path.stat()) and (created or self._is_unowned()):
                self.fd = fd
                return True
        os.close(fd)
        return None

    def _is_unowned(self) -> bool:
        """Whether no process had the file open twice in a row: torch closes it right before it deletes it."""
        before, self._seen_unowned = self._seen_unowned, not _open_elsewhere(self.path)
        return before and self._seen_unowned

    def wait(self) -> None:
        """Nothing: try_acquire has waited."""

    def release(self) -> None:
        """Remove the file before the flock is released, so that no process takes over a lock that is gone."""
        self.path.unlink(missing_ok=True)
        os.close(self.fd)
        self.fd = -1


def _open_elsewhere(path: Path) -> bool:
    """Whether another process of this machine has the file open."""
    file = path.stat()
    for process in Path("/proc").glob("[0-9]*"):
        if process.name == str(os.getpid()):
            continue
        with suppress(OSError):  # the process belongs to another user, or has ended
            for descriptor in os.listdir(process / "fd"):
                with suppress(OSError):
                    if os.path.samestat((process / "fd" / descriptor).stat(), file):
                        return True
    return False


def apply() -> None:
    """Use the lock for every extension that this process builds."""
    from torch.utils import cpp_extension  # noqa: PLC0415 - it imports setuptools, and few runs build anything

    cpp_extension.FileBaton = BuildLock
