"""Processes that the kernel has killed because memory ran out, as far as they can belong to a run.

Imports only the standard library. The kernel counts them for each cgroup, such as that of a container, a Slurm job or a
service; killed processes of other cgroups do not belong to this run.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

SYSTEM = Path("/")


def kills(system: Path = SYSTEM) -> int:
    """How many processes of this cgroup were killed since it was created. If the kernel does not count them for each
    cgroup: how many of the whole machine, since boot."""
    for file in (*_files(system), system / "proc/vmstat"):
        with contextlib.suppress(OSError, ValueError):
            for line in file.read_text(encoding="ascii").splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


def _files(system: Path) -> list[Path]:
    """Where the kernel counts them: version 2 of cgroups, or the memory controller of version 1 (cgroups(7))."""
    found = []
    with contextlib.suppress(OSError):
        for line in (system / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0":
                found.append(system / f"sys/fs/cgroup{path}/memory.events")
            elif "memory" in controllers.split(","):
                found.append(system / f"sys/fs/cgroup/memory{path}/memory.oom_control")
    return found
