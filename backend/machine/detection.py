"""This machine: NVIDIA is asked through its driver's library, AMD through /sys, others by their tools where these
stand; never imports torch.

Floor 1. Imports: kinds, packages.
"""

from __future__ import annotations

import importlib.util
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
from pathlib import Path
from typing import Any

import psutil
import pynvml

from backend import registry
from backend.machine import packages
from backend.machine.types import GIB, Gpu, Machine

OUTDATED = 900  # seconds


def probe(folder: Path) -> Machine:
    """This machine; free disk is that of `folder` or its nearest existing parent. Takes a few ms."""
    family, gpus = _accelerators()
    total, free = _ram()
    versions = packages.versions()
    return Machine(
        device=family,
        gpus=gpus,
        ram_bytes=total,
        ram_free_bytes=free,
        cores=_cores(),
        disk_free_bytes=disk_free(folder),
        python=sys.executable,
        versions=versions,
        driver=_driver(),
        unsloth_wants=packages.unmet("unsloth", versions),
        cpu_bf16=_cpu_bf16(),
        compiler=_compiler(),
        triton=_triton(Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton/cache")),
        libaio=Path("/usr/include/libaio.h").is_file(),
        shm_bytes=_shm(),
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
        gpus = visible(find(), os.environ.get(registry.DEVICES[family].visible_devices_env))
        if gpus:
            return family, gpus
    return "cpu", ()


def visible(gpus: tuple[Gpu, ...], told: str | None) -> tuple[Gpu, ...]:
    """Those that this shell, or a scheduler, was given, in that order: a run takes no others. As CUDA reads it, the
    list ends at the first that is not there. What names parts of devices is left to the driver."""
    if told is None or "MIG" in told:
        return gpus
    found: list[Gpu] = []
    for word in told.split(","):
        name = word.strip().partition(".")[0]  # a tile of Intel's
        gpu = next((gpu for gpu in gpus if name and (name == str(gpu.id) or gpu.uuid.startswith(name))), None)
        if gpu is None:
            break
        found += [] if gpu in found else [gpu]
    return tuple(found)


def _driver() -> str:
    """The version of NVIDIA's driver."""
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        try:
            return str(pynvml.nvmlSystemGetDriverVersion())
        finally:
            pynvml.nvmlShutdown()
    return ""


def _nvidia() -> tuple[Gpu, ...]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()  # no driver, or one that does not answer
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return tuple(_nvidia_gpu(index, handles) for index in range(len(handles)))
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()


def _nvidia_gpu(index: int, handles: list[Any]) -> Gpu:
    handle = handles[index]
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    name = pynvml.nvmlDeviceGetName(handle)
    name = (name.decode() if isinstance(name, bytes) else str(name)).removeprefix("NVIDIA ")
    major, minor = map(int, pynvml.nvmlDeviceGetCudaComputeCapability(handle))
    links, users, uuid = _links(index, handles), _users(handle), str(pynvml.nvmlDeviceGetUUID(handle))
    return Gpu(index, name, int(memory.total), int(memory.free), (major, minor), links, users, uuid)


def _links(index: int, handles: list[Any]) -> tuple[int, ...] | None:
    """The devices that NVLink reaches, through a switch too; None where the driver does not tell."""
    wanted, fine = pynvml.NVML_P2P_CAPS_INDEX_NVLINK, pynvml.NVML_P2P_STATUS_OK
    try:
        others = [n for n in range(len(handles)) if n != index]
        return tuple(n for n in others if pynvml.nvmlDeviceGetP2PStatus(handles[index], handles[n], wanted) == fine)
    except pynvml.NVMLError:
        return None


def _users(handle: Any) -> tuple[str, ...]:
    """The processes that compute on a device. In a container those outside it have no name."""
    with suppress(pynvml.NVMLError):
        return tuple(_named(process.pid) for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
    return ()


def _named(pid: int) -> str:
    with suppress(psutil.Error):
        return f"{psutil.Process(pid).name()} ({pid})"
    return f"process {pid}"


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


def _shm(place: str = "/dev/shm") -> int | None:
    """Bytes that processes may still share through memory; a container often has 64 MiB."""
    with suppress(OSError):
        return shutil.disk_usage(place).free
    return None


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
    return shutil.which(os.environ.get("CXX") or "c++") is not None and _headers()


def _headers() -> bool:
    return (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file()


def _triton(cache: Path) -> bool:
    """Whether Triton can build its launcher, or need not: it looks for compilers in this order, and keeps what it
    built. Where it is not installed nobody asks it."""
    if importlib.util.find_spec("triton") is None:
        return True
    names = (os.environ["CC"],) if os.environ.get("CC") else ("gcc", "clang")
    return (any(map(shutil.which, names)) and _headers()) or any(cache.glob("*/*_utils.*so"))


def _stale_lock(extensions: str | Path) -> str:
    """The lock of a build that nobody can be at any more; builds take a minute or two."""
    for lock in sorted(Path(extensions).glob("**/lock")):
        with suppress(OSError):
            if time.time() - lock.stat().st_mtime > OUTDATED:
                return str(lock)
    return ""
