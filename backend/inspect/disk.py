"""Inspection of the folder for NVMe offload."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from backend.config import RunSpec

MEMORY_FILESYSTEMS = ("tmpfs", "ramfs")
NETWORK_FILESYSTEMS = ("nfs", "nfs4", "cifs", "fuse.sshfs", "lustre", "ceph", "gpfs", "beegfs")


def inspect_nvme_folder(spec: RunSpec, base: Path) -> dict[str, Any]:
    """The InputFacts about parallel.nvme_path: what is wrong with it, and why it is slow."""
    parallel = spec.parallel
    if "nvme" not in (parallel.offload_optimizer, parallel.offload_param):
        return {}
    if not parallel.nvme_path:
        return {"nvme_problem": "parallel.nvme_path is empty: set a folder on a local NVMe disk."}
    folder = base / Path(parallel.nvme_path).expanduser()
    if not folder.is_dir():
        return {"nvme_problem": f"The folder {folder} for NVMe offload does not exist."}
    if not os.access(folder, os.W_OK | os.X_OK):
        return {"nvme_problem": f"The folder {folder} for NVMe offload is not writable."}
    return {"nvme_slow_reason": slow_reason(folder)}


def slow_reason(folder: Path) -> str:
    """Why the folder is not on a fast local disk, a sentence; '' if it is, or if that is unknown."""
    with suppress(OSError, ValueError, IndexError):
        lines = [line.split() for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()]
        candidates = [line for line in lines if folder.resolve().is_relative_to(line[1])]
        filesystem = max(candidates, key=lambda line: len(line[1]))[2]
        if filesystem in MEMORY_FILESYSTEMS:
            return f"{folder} is on {filesystem}, which is CPU memory, so offloading to it frees no memory."
        if filesystem in NETWORK_FILESYSTEMS:
            return f"{folder} is on a network file system ({filesystem})."
        number = folder.stat().st_dev
        block_device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
        for device in (block_device, block_device.parent):  # a partition's disk is its parent folder
            if (device / "queue/rotational").is_file():
                rotational = (device / "queue/rotational").read_text().strip() == "1"
                return f"{folder} is on a hard disk, not on an SSD." if rotational else ""
    return ""
