"""The machine that a run is for: devices, memory, cores, disk, packages; probed here, or read from YAML.

Floor 1. Imports: catalog, options (SpecError). Never imports torch: NVIDIA is asked through its driver's
library, AMD through /sys, others by their tools where these stand. A machine file lets a laptop check a run
for a cluster.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pynvml
import yaml

from backend import catalog
from backend.options import Problem, SpecError

GIB = 1024**3
STALE = 900  # seconds

TABLES = (catalog.REPORTERS, catalog.OPTIMIZERS, catalog.FP8_BACKENDS)
# Distributions whose presence or version some rule asks about.
PACKAGES = (
    "torch", "transformers", "accelerate", "peft", "trl", "datasets", "deepspeed", "gguf", "torch_npu",
    "flash_attn", "flash_attn_3", "liger-kernel",
    *(name for row in catalog.PACKED.values() for name in row.packages),
    *(row.package for table in TABLES for row in table.values() if row.package),
)  # fmt: skip

# Marketing name -> (GiB, compute capability), so that a machine file may say just "H100".
GPUS: Mapping[str, tuple[int, tuple[int, int]]] = {
    "V100": (32, (7, 0)),
    "T4": (16, (7, 5)),
    "A100": (80, (8, 0)),
    "A10": (24, (8, 6)),
    "A40": (48, (8, 6)),
    "RTX 3090": (24, (8, 6)),
    "RTX 4090": (24, (8, 9)),
    "L4": (24, (8, 9)),
    "L40S": (48, (8, 9)),
    "H100": (80, (9, 0)),
    "H200": (141, (9, 0)),
    "B200": (180, (10, 0)),
    "RTX 5090": (32, (12, 0)),
}


@dataclass(frozen=True)
class Gpu:
    """One device. `capability` is NVIDIA's compute capability, (0, 0) for others."""

    id: int
    name: str
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Machine:
    """Everything about a machine that decides whether a run can work on it.

    `device` is the family found (a key of catalog.DEVICES); `cores` are those that this process may use;
    empty `versions` mean unknown, not missing; an empty `name` means the machine that Footplate runs on.
    """

    device: str = "cpu"
    gpus: tuple[Gpu, ...] = ()
    nodes: int = 1
    ram_bytes: int = 16 * GIB
    ram_free_bytes: int = 16 * GIB
    cores: int = 8
    disk_free_bytes: int = 1024 * GIB
    python: str = "python"
    versions: Mapping[str, str] = field(default_factory=dict)
    name: str = ""
    cpu_bf16: bool = False  # the CPU multiplies bf16 in hardware (AMX or AVX512-BF16)
    compiler: bool = True  # C++ and Python's headers are there, for what is built on first use
    libaio: bool = True  # with its headers, for DeepSpeed's way to a disk
    stale_lock: str = ""  # left in torch's folder of extensions by a build that was killed


def describe(machine: Machine) -> str:
    """A short label: '2 cores, 24 GiB, no GPU', '8 x H100 80GB', '2 nodes of 8 x H100'."""
    if machine.gpus:
        first = machine.gpus[0]
        count = f"{len(machine.gpus)} x " if len(machine.gpus) > 1 else ""
        size = f"{round(first.total_bytes / GIB)}GB"
        label = count + (first.name if re.search(r"\d\s?G(i)?B", first.name) else f"{first.name} {size}")
    else:
        cores = f"{machine.cores} core{'s' if machine.cores != 1 else ''}"
        label = f"{cores}, {round(machine.ram_bytes / GIB)} GiB, no GPU"
    label = f"{machine.nodes} nodes of {label}" if machine.nodes > 1 else label
    return f"{machine.name}: {label}" if machine.name else label


def probe(folder: Path) -> Machine:
    """This machine; free disk is that of `folder` or its nearest existing parent. Takes a few ms."""
    family, gpus = _accelerators()
    total, free = _ram()
    return Machine(
        device=family,
        gpus=gpus,
        ram_bytes=total,
        ram_free_bytes=free,
        cores=_cores(),
        disk_free_bytes=disk_free(folder),
        python=sys.executable,
        versions=_versions(),
        cpu_bf16=_cpu_bf16(),
        compiler=_compiler(),
        libaio=Path("/usr/include/libaio.h").is_file(),
        stale_lock=_stale_lock(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache/torch_extensions"),
    )


def disk_free(folder: Path) -> int:
    """Bytes that may still be written under `folder`, which need not exist yet; 0 where nobody can tell."""
    folder = folder.absolute()
    for place in (folder, *folder.parents):
        with suppress(OSError):
            return shutil.disk_usage(place).free
    return 0


def _accelerators() -> tuple[str, tuple[Gpu, ...]]:
    for family, find in (("cuda", _nvidia), ("cuda", _amd), ("npu", _npu), ("xpu", _xpu), ("mps", _apple)):
        gpus = find()
        if gpus:
            return family, gpus
    return "cpu", ()


def _nvidia() -> tuple[Gpu, ...]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()  # no driver, or one that does not answer
    try:
        return tuple(_nvidia_gpu(i) for i in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()


def _nvidia_gpu(index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    name = pynvml.nvmlDeviceGetName(handle)
    name = name.decode() if isinstance(name, bytes) else str(name)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(index, name.removeprefix("NVIDIA "), int(memory.total), int(memory.free), (int(major), int(minor)))


def _amd(root: Path = Path("/sys/class/drm")) -> tuple[Gpu, ...]:
    """AMD GPUs of at least 4 GiB: smaller ones are part of a processor. torch calls them cuda."""
    found: list[Gpu] = []
    for card in sorted(root.glob("card[0-9]*/device/mem_info_vram_total")):
        with suppress(OSError, ValueError):
            total = int(card.read_text())
            used = int((card.parent / "mem_info_vram_used").read_text())
            product = card.parent / "product_name"
            name = (product.read_text().strip() if product.is_file() else "") or "AMD GPU"
            if total >= 4 * GIB:
                found.append(Gpu(len(found), name, total, total - used))
    return tuple(found)


def _tool(*argv: str) -> str:
    """What a vendor's tool prints; '' where it does not stand or does not answer."""
    if shutil.which(argv[0]) is None:
        return ""
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _npu() -> tuple[Gpu, ...]:
    return parse_npu(_tool("npu-smi", "info"))


def parse_npu(text: str) -> tuple[Gpu, ...]:
    """Ascend devices from `npu-smi info`: two lines each; used / total MB end the second, HBM is the larger."""
    found: list[Gpu] = []
    name = ""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        head = re.match(r"\d+\s+(\S*\d\S*)", cells[0])
        pairs = [(int(u), int(t)) for u, t in re.findall(r"(\d+)\s*/\s*(\d+)", cells[-1])]
        if head and len(cells) == 3 and cells[1] in ("OK", "Warning", "Alarm"):
            name = head.group(1)
        elif name and len(cells) == 3 and pairs and max(t for _, t in pairs) > 0:
            used, total = max(pairs, key=lambda pair: pair[1])
            found.append(Gpu(len(found), f"Ascend {name}", total * 2**20, (total - used) * 2**20))
            name = ""
    return tuple(found)


def _xpu() -> tuple[Gpu, ...]:
    return parse_xpu(_tool("xpu-smi", "discovery", "-j"))


def parse_xpu(text: str) -> tuple[Gpu, ...]:
    """Intel devices from `xpu-smi discovery -j`."""
    try:
        rows = json.loads(text)["device_list"] if text else []
        return tuple(_xpu_gpu(i, row) for i, row in enumerate(rows))
    except (ValueError, KeyError, TypeError):
        return ()


def _xpu_gpu(index: int, row: Mapping[str, Any]) -> Gpu:
    total = int(float(row.get("memory_physical_size_byte") or 0))
    free = int(float(row.get("memory_free_size_byte") or total))
    return Gpu(int(row.get("device_id", index)), str(row.get("device_name", "Intel GPU")), total, free)


def _apple() -> tuple[Gpu, ...]:
    """Apple's GPU shares the machine's memory."""
    if platform.system() != "Darwin" or platform.machine() != "arm64":
        return ()
    memory = psutil.virtual_memory()
    name = _tool("sysctl", "-n", "machdep.cpu.brand_string").strip() or "Apple GPU"
    return (Gpu(0, name, memory.total, memory.available),)


def _ram(root: Path = Path("/sys/fs/cgroup")) -> tuple[int, int]:
    """Bytes in all and bytes available, within the container's limit if there is one."""
    memory = psutil.virtual_memory()
    total, free = memory.total, memory.available
    with suppress(OSError, ValueError):
        limit = int((root / "memory.max").read_text())
        used = int((root / "memory.current").read_text())
        total, free = min(total, limit), max(0, min(free, limit - used))
    return total, free


def _cores(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Physical cores within this process's affinity and the container's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = min(allowed, psutil.cpu_count(logical=False) or allowed)
    with suppress(OSError, ValueError):
        quota, period = (root / "cpu.max").read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def _cpu_bf16(info: Path = Path("/proc/cpuinfo")) -> bool:
    with suppress(OSError):
        flags = re.search(r"(?m)^(?:flags|Features)\s*:(.*)$", info.read_text(encoding="utf-8", errors="replace"))
        return flags is not None and bool({"amx_bf16", "avx512_bf16", "bf16"} & set(flags[1].split()))
    return False


def _compiler() -> bool:
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return shutil.which(os.environ.get("CXX") or "c++") is not None and header.is_file()


def _stale_lock(extensions: str | Path) -> str:
    """The lock of a build that nobody can be at any more; builds take a minute or two."""
    for lock in sorted(Path(extensions).glob("**/lock")):
        with suppress(OSError):
            if time.time() - lock.stat().st_mtime > STALE:
                return str(lock)
    return ""


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


# --- Machines described in YAML ---

KEYS = ("name", "device", "nodes", "gpus", "ram_gib", "cores", "disk_gib", "python", "versions", "cpu_bf16")
GPU_KEYS = ("name", "count", "memory_gib", "free_gib", "capability")


def read(path: str | Path) -> Machine:
    """A machine from a YAML file. Raises SpecError naming the file and what is wrong in it.

    `gpus` is a list of {name, count, memory_gib, capability}; the last two may be left out for names in GPUS.
    """
    try:
        return parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError([Problem("", f"{path}: cannot be read: {error}")]) from None
    except SpecError as error:
        raise SpecError([Problem(p.field, f"{p.message} ({path})") for p in error.problems]) from None


def parse(text: str) -> Machine:
    """A machine from YAML text, as `described`. Raises SpecError."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise _wrong("", f"is no YAML: {' '.join(str(error).split())}") from None
    return described(value)


def described(value: Any) -> Machine:
    """A machine from a table of KEYS. Raises SpecError."""
    if not isinstance(value, dict):
        raise _wrong("", f"is no machine: a machine has some of {', '.join(KEYS)}")
    for key in value:
        if key not in KEYS:
            raise _wrong(str(key), f"is nothing that a machine has; known are {', '.join(KEYS)}")
    gpus = _gpus(value.get("gpus") or [])
    device = str(value.get("device") or ("cuda" if gpus else "cpu"))
    if device not in catalog.DEVICES:
        raise _wrong("device", f"must be one of {', '.join(catalog.DEVICES)}")
    if device != "cpu" and not gpus:
        raise _wrong("gpus", f"is empty, but device is {device}: list the devices, or write device: cpu")
    if device == "cpu" and gpus:
        raise _wrong("device", "is cpu, but gpus are listed: leave one of the two out")
    ram = _bytes(value, "ram_gib", 64)
    versions = value.get("versions") or {}
    if not isinstance(versions, dict):
        raise _wrong("versions", "must be a table: package name, version")
    return Machine(
        device=device,
        gpus=gpus,
        nodes=_count(value, "nodes", 1),
        ram_bytes=ram,
        ram_free_bytes=ram,
        cores=_count(value, "cores", 16),
        disk_free_bytes=_bytes(value, "disk_gib", 1024),
        python=str(value.get("python") or "python"),
        versions={str(k): str(v) for k, v in versions.items()},
        name=str(value.get("name") or "described machine"),
        cpu_bf16=value.get("cpu_bf16") is True,
    )


def _wrong(name: str, message: str) -> SpecError:
    return SpecError([Problem(name, message)])


def _count(table: Mapping[str, Any], key: str, default: int) -> int:
    value = table.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _wrong(key, "must be a whole number of at least 1")
    return value


def _bytes(table: Mapping[str, Any], key: str, default: float) -> int:
    value = table.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise _wrong(key, "must be a number of GiB above 0")
    return int(value * GIB)


def _gpus(rows: Any) -> tuple[Gpu, ...]:
    if not isinstance(rows, list):
        raise _wrong("gpus", "must be a list, one row a kind: - {name: H100, count: 8}")
    found: list[Gpu] = []
    for row in rows:
        if not isinstance(row, dict) or not set(row) <= set(GPU_KEYS):
            raise _wrong("gpus", f"a row is a table of {', '.join(GPU_KEYS)}; this is not: {row!r}")
        name = str(row.get("name") or "GPU")
        known = next((GPUS[k] for k in sorted(GPUS, key=len, reverse=True) if k in name), None)
        if known is None and "memory_gib" not in row:
            raise _wrong("gpus", f"says no memory_gib for {name!r}; it may be left out for {', '.join(GPUS)}")
        size, capability = known or (0, (0, 0))
        total = _bytes(row, "memory_gib", size)
        free = _bytes(row, "free_gib", total / GIB)
        capability = _capability(row["capability"]) if "capability" in row else capability
        found += [Gpu(len(found) + i, name, total, free, capability) for i in range(_count(row, "count", 1))]
    return tuple(found)


def _capability(value: Any) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)\.(\d)", str(value))
    if not match:
        raise _wrong("gpus", f"capability must be written as 9.0 or 8.6, not {value!r}")
    return int(match[1]), int(match[2])
