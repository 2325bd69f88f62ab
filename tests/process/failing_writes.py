"""Writes that fail with an error, as on a disk with defects: a library that is loaded before libc's functions."""

from __future__ import annotations

import errno
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

# The control file has the number of the error and a part of the paths that it concerns; without the file, all works.
CODE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>
static int fails(int fd) {
    char text[600], link[64], path[4096], *part;
    const char *control = getenv("FAILING_WRITES");
    int file = control ? syscall(SYS_openat, AT_FDCWD, control, O_RDONLY) : -1;
    if (file < 0) return 0;
    ssize_t size = syscall(SYS_read, file, text, sizeof(text) - 1);
    syscall(SYS_close, file);
    if (size < 3) return 0;
    text[size] = 0;
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    size = syscall(SYS_readlink, link, path, sizeof(path) - 1);
    if (size < 1 || !(part = strchr(text, ' '))) return 0;
    path[size] = 0;
    if (!strstr(path, part + 1)) return 0;
    errno = atoi(text);
    return 1;
}
ssize_t write(int fd, const void *data, size_t size) { return fails(fd) ? -1 : syscall(SYS_write, fd, data, size); }
ssize_t writev(int fd, const struct iovec *data, int n) { return fails(fd) ? -1 : syscall(SYS_writev, fd, data, n); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    return fails(fd) ? -1 : syscall(SYS_pwrite64, fd, data, size, at);
}
"""


@dataclass
class FailingWrites:
    """Programs that were started with this library obey `control`."""

    control: Path

    def fail(self, part: str, number: int = errno.EIO) -> None:
        """From now on, writing to files whose paths contain `part` fails."""
        new = self.control.with_suffix(".new")
        new.write_text(f"{number} {part}")
        new.replace(self.control)

    def work(self) -> None:
        self.control.unlink(missing_ok=True)


@contextmanager
def failing_writes(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[FailingWrites]:
    """Processes that are started from now on load the library."""
    compiler = shutil.which("cc") or shutil.which("c++")
    if not compiler:
        pytest.skip("there is no C compiler")
    library, control = folder / "failing_writes.so", folder / "failing-writes"
    command = [compiler, "-x", "c", "-", "-shared", "-fPIC", "-O1", "-o", str(library)]
    subprocess.run(command, input=CODE, text=True, check=True)
    shim = FailingWrites(control)
    with patch.context() as scoped:
        scoped.setenv("LD_PRELOAD", str(library))
        scoped.setenv("FAILING_WRITES", str(control))
        try:
            yield shim
        finally:
            shim.work()
