"""A look at the folder for what is kept on a disk. Floor 2. Imports spec."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from backend.config import RunSpec

IN_MEMORY, DISTANT = ("tmpfs", "ramfs"), ("nfs", "nfs4", "cifs", "fuse.sshfs", "lustre", "ceph", "gpfs", "beegfs")


def look_at_disk(spec: RunSpec, base: Path) -> dict[str, Any]:
    """The fields of a Glance that speak of the NVMe folder: what is wrong with it, and why it is no fast disk."""
    parallel = spec.parallel
    if "nvme" not in (parallel.offload_optimizer, parallel.offload_param):
        return {}
    if not parallel.nvme_path:
        return {"nvme": "No folder is named."}
    folder = base / Path(parallel.nvme_path).expanduser()
    if not folder.is_dir():
        return {"nvme": f"There is no folder {folder}."}
    if not os.access(folder, os.W_OK | os.X_OK):
        return {"nvme": f"{folder} may not be written to."}
    return {"nvme_slow": _slow(folder)}


def _slow(folder: Path, mounts: Path = Path("/proc/self/mounts"), system: Path = Path("/sys/dev/block")) -> str:
    """Why the folder is no fast disk of this machine, in a sentence; '' if it is one, or nobody can tell."""
    with suppress(OSError, ValueError, IndexError):
        lines = [line.split() for line in mounts.read_text(encoding="utf-8").splitlines()]
        inside = [line for line in lines if folder.resolve().is_relative_to(line[1])]
        kind = max(inside, key=lambda line: len(line[1]))[2]
        if kind in IN_MEMORY:
            return f"{folder} lies in memory ({kind}), which is what should be saved."
        if kind in DISTANT:
            return f"{folder} lies on a distant disk ({kind})."
        number = folder.stat().st_dev
        place = (system / f"{os.major(number)}:{os.minor(number)}").resolve()
        for device in (place, place.parent):  # a partition's disk is the folder above
            if (device / "queue/rotational").is_file():
                turning = (device / "queue/rotational").read_text().strip() == "1"
                return f"{folder} lies on a turning disk." if turning else ""
    return ""
