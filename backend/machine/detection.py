"""Detection of this machine: NVIDIA GPUs through NVML, AMD through /sys, others through their vendors' tools.

Never imports torch.
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
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pynvml

from backend import registry
from backend.machine import packages
from backend.machine.types import GIB, Gpu, Machine


def probe(folder: Path) -> Machine:
    """This machine; free disk space is that of `folder` or its nearest existing parent. Takes a few milliseconds."""
    family, gpus, lost = _accelerators()
    total, free = _ram()
    versions = packages.versions()
    return Machine(
        device=family,
        gpus=gpus,
        lost_gpus=lost,
        ram_bytes=total,
        ram_free_bytes=free,
        cores=_cores(),
        disk_free_bytes=disk_free(folder),
        python=sys.executable,
        versions=versions,
        driver_version=_driver_version(),
        unsloth_unmet_requirements=packages.unmet("unsloth", versions),
        cpu_bf16=_cpu_bf16(),
        has_cpp_compiler=_has_cpp_compiler(),
        triton_can_compile=_triton_can_compile(
            Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton/cache")
        ),
        has_libaio=Path("/usr/include/libaio.h").is_file(),
        shm_free_bytes=_shm(),
    )


def disk_free(folder: Path) -> int:
    """Free bytes of the disk of `folder`, which need not exist yet; 0 if unknown."""
    folder = folder.absolute()
    for place in (folder, *folder.parents):
        with suppress(OSError):
            return shutil.disk_usage(place).free
    return 0


def _accelerators() -> tuple[str, tuple[Gpu, ...], Mapping[int, str]]:
    """The device type, its visible devices, and the NVIDIA GPUs that do not respond, with NVML's error."""
    nvidia, lost = _nvidia()
    if gpus := visible_gpus(nvidia, os.environ.get(registry.DEVICES["cuda"].visible_devices_env), lost):
        return "cuda", gpus, lost
    if gpus := visible_amd_gpus(_amd(), os.environ):
        return "cuda", gpus, lost
    for family, find in (("npu", _npu), ("xpu", _xpu), ("mps", _apple)):
        if gpus := visible_gpus(find(), os.environ.get(registry.DEVICES[family].visible_devices_env)):
            return family, gpus, lost
    return "cpu", (), lost


def visible_gpus(gpus: tuple[Gpu, ...], setting: str | None, lost: Collection[int] = ()) -> tuple[Gpu, ...]:
    """The GPUs that a variable such as CUDA_VISIBLE_DEVICES selects, in its order, without those that are lost. As in
    CUDA, the list ends at the first unknown device. A process can use only one part of a GPU that is divided (MIG)."""
    found: list[Gpu] = []
    for word in (setting or "").split(","):
        name = word.strip().partition(".")[0]  # 0.1 is a tile of an Intel GPU
        if name in map(str, lost):
            continue
        matches = (gpu for gpu in gpus if name == str(gpu.id) or gpu.uuid.lower().startswith(name.lower()))
        gpu = next(matches, None) if name else None
        if gpu is None:
            break
        found += [] if gpu in found else [gpu]
    if setting is None or ("MIG" in setting and not found):  # older drivers have other names for parts
        found = list(gpus)
    return tuple(gpu for gpu in found if not gpu.is_part) or tuple(found[:1])


def visible_amd_gpus(gpus: tuple[Gpu, ...], environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The AMD GPUs that a process with these variables sees. ROCm's runtime numbers those of ROCR_VISIBLE_DEVICES from
    0, and HIP selects from these. torch 2.13 cuda/__init__.py prefers HIP_VISIBLE_DEVICES to CUDA_VISIBLE_DEVICES."""
    runtime = environment.get("ROCR_VISIBLE_DEVICES")
    if runtime is not None:
        gpus = tuple(replace(gpu, id=number) for number, gpu in enumerate(visible_gpus(gpus, runtime)))
    device = registry.DEVICES["cuda"]
    names = (registry.HIP_VISIBLE_DEVICES, device.visible_devices_env)
    return visible_gpus(gpus, next((environment[name] for name in names if name in environment), None))


def _driver_version() -> str:
    """The version of the NVIDIA driver."""
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        try:
            return str(pynvml.nvmlSystemGetDriverVersion())
        finally:
            pynvml.nvmlShutdown()
    return ""


def _nvidia() -> tuple[tuple[Gpu, ...], Mapping[int, str]]:
    """The GPUs, and those that do not respond, such as one that has fallen off the bus (Xid 79), with NVML's error.
    CUDA leaves these out, and then its numbers of the others may differ from NVML's."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return (), {}  # no driver, or no response from it
    found: list[Gpu] = []
    handles: dict[int, Any] = {}
    unusable: dict[int, Exception] = {}
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                found += _nvidia_gpus(index, handle)
                handles[index] = handle
            except pynvml.NVMLError as failed:
                unusable[index] = failed
        found = [gpu if gpu.is_part else replace(gpu, nvlink_peers=_nvlink_peers(gpu.id, handles)) for gpu in found]
    except pynvml.NVMLError:
        return (), {}
    finally:
        pynvml.nvmlShutdown()
    # A container may not use a GPU without permission.
    lost = {i: str(why) for i, why in unusable.items() if not isinstance(why, pynvml.NVMLError_NoPermission)}
    return tuple(replace(gpu, only_by_uuid=gpu.is_part or bool(unusable)) for gpu in found), lost


def _nvidia_gpus(index: int, handle: Any) -> list[Gpu]:
    """A GPU, or its parts if it is divided: the memory of the whole GPU is not theirs, and in a container NVML does not
    tell it."""
    major, minor = map(int, pynvml.nvmlDeviceGetCudaComputeCapability(handle))
    parts = _parts(handle)
    found = []
    for one in [handle] if parts is None else parts:
        name, uuid = pynvml.nvmlDeviceGetName(one), str(pynvml.nvmlDeviceGetUUID(one))
        name = (name.decode() if isinstance(name, bytes) else str(name)).removeprefix("NVIDIA ")
        found.append(Gpu(index, name, *_gpu_memory(one), (major, minor), (), _processes(one), uuid))
    return found


def _parts(handle: Any) -> list[Any] | None:
    """The MIG devices of a GPU; None if it is not divided."""
    with suppress(pynvml.NVMLError):  # most GPUs cannot be divided
        if pynvml.nvmlDeviceGetMigMode(handle)[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
            return None
        found = []
        for number in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            with suppress(pynvml.NVMLError):  # there is none with this number, or the container may not use it
                found.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number))
        return found
    return None


def _gpu_memory(handle: Any) -> tuple[int, int]:
    """Total and free bytes of a GPU. One that shares the memory of the CPU, such as the GB10 of DGX Spark, has none of
    its own, and NVML supports no question about it."""
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError_NotSupported:
        return _ram()
    return int(memory.total), int(memory.free)


def _nvlink_peers(index: int, handles: Mapping[int, Any]) -> tuple[int, ...] | None:
    """The devices that NVLink connects to this one, also through NVSwitch; None if the driver does not say."""
    nvlink, ok = pynvml.NVML_P2P_CAPS_INDEX_NVLINK, pynvml.NVML_P2P_STATUS_OK
    try:
        others = [n for n in handles if n != index]
        return tuple(n for n in others if pynvml.nvmlDeviceGetP2PStatus(handles[index], handles[n], nvlink) == ok)
    except pynvml.NVMLError:
        return None


def _processes(handle: Any) -> tuple[str, ...]:
    """The compute processes on a device. In a container, processes outside of it have no name."""
    with suppress(pynvml.NVMLError):
        return tuple(_named(process.pid) for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
    return ()


def _named(pid: int) -> str:
    with suppress(psutil.Error):
        return f"{psutil.Process(pid).name()} ({pid})"
    return f"process {pid}"


def _amd(root: Path = Path("/sys/class/drm")) -> tuple[Gpu, ...]:
    """AMD GPUs with at least 4 GiB; smaller ones are integrated. PyTorch's device type for them is cuda."""
    found: list[Gpu] = []
    cards = root.glob("card[0-9]*/device/mem_info_vram_total")
    for card in sorted(cards, key=lambda file: int(file.parts[-3].removeprefix("card").partition("-")[0])):
        with suppress(OSError, ValueError):
            total = int(card.read_text())
            used = int((card.parent / "mem_info_vram_used").read_text())
            product = card.parent / "product_name"
            name = (product.read_text().strip() if product.is_file() else "") or "AMD GPU"
            if total >= 4 * GIB:
                found.append(Gpu(len(found), name, total, total - used, uuid=_amd_uuid(card.parent)))
    return tuple(found)


def _amd_uuid(device: Path) -> str:
    """The name of a GPU in ROCR_VISIBLE_DEVICES that does not depend on the order; '' if it has none."""
    with suppress(OSError, ValueError):
        if number := int((device / "unique_id").read_text(), 16):
            return f"GPU-{number:016x}"
    return ""


def _tool(*argv: str) -> str:
    """The output of a vendor's tool; '' if it is not installed or fails."""
    if shutil.which(argv[0]) is None:
        return ""
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _npu() -> tuple[Gpu, ...]:
    return parse_npu(_tool("npu-smi", "info"))


def parse_npu(text: str) -> tuple[Gpu, ...]:
    """Ascend devices from `npu-smi info`: two lines each; the second ends with used / total MB, HBM is the larger."""
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
    """The Apple GPU, which shares the CPU memory."""
    if platform.system() != "Darwin" or platform.machine() != "arm64":
        return ()
    memory = psutil.virtual_memory()
    name = _tool("sysctl", "-n", "machdep.cpu.brand_string").strip() or "Apple GPU"
    return (Gpu(0, name, memory.total, memory.available),)


OWN_GROUPS = Path("/proc/self/cgroup")
# Files of a memory limit and of what is used, in versions 2 and 1 of control groups, and the prefix in the file
# memory.stat next to them.
MEMORY_FILES = (
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
CPU_FILES = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))


def _groups(root: Path, own: Path, controller: str) -> Iterator[Path]:
    """The folders of the control groups that limit this process: those of a container, and those of a job in a cluster
    or of a user, with the groups above. `own` lists them; what is outside of a container is not visible in it."""
    yield from (root, root / controller)
    with suppress(OSError, ValueError):
        for line in own.read_text(encoding="utf-8").splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0" or controller in controllers.split(","):
                place = root if number == "0" else root / controller
                group = place / path.strip("/")
                yield from (folder for folder in (group, *group.parents) if place in folder.parents)


def _ram(root: Path = Path("/sys/fs/cgroup"), own: Path = OWN_GROUPS) -> tuple[int, int]:
    """Total and available bytes of CPU memory, within the limits of control groups."""
    memory = psutil.virtual_memory()
    total, free = memory.total, memory.available
    for group, (limit_file, used_file, prefix) in product(_groups(root, own, "memory"), MEMORY_FILES):
        with suppress(OSError, ValueError):
            limit = int((group / limit_file).read_text())
            used = int((group / used_file).read_text()) - _file_cache(group / used_file, prefix)
            total, free = min(total, limit), max(0, min(free, limit - used))
    return total, free


def _file_cache(used_file: Path, prefix: str) -> int:
    """What a container uses to cache files: the kernel frees it when processes need memory, as on the host, where it
    counts as available."""
    with suppress(OSError, ValueError):
        pairs = (line.split() for line in used_file.with_name("memory.stat").read_text().splitlines())
        return sum(int(size) for name, size in pairs if name in (f"{prefix}active_file", f"{prefix}inactive_file"))
    return 0


def _shm() -> int | None:
    """Free bytes of shared memory; containers often have 64 MiB."""
    with suppress(OSError):
        return shutil.disk_usage("/dev/shm").free
    return None


def _cores(root: Path = Path("/sys/fs/cgroup"), own: Path = OWN_GROUPS) -> int:
    """Physical cores within the affinity of this process and the quotas of control groups."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = min(allowed, psutil.cpu_count(logical=False) or allowed)
    for group, files in product(_groups(root, own, "cpu"), CPU_FILES):
        with suppress(OSError, ValueError):
            quota, period = map(int, " ".join((group / name).read_text() for name in files).split())
            cores = min(cores, max(1, quota // period)) if quota > 0 else cores
    return cores


@cache
def cpu_name(info: Path = Path("/proc/cpuinfo")) -> str:
    """The name that the CPU of this machine reports; '' if it reports none."""
    with suppress(OSError):
        found = re.search(r"(?m)^model name\s*:\s*(.*)$", info.read_text(encoding="utf-8", errors="replace"))
        return found[1].strip() if found else ""
    return _tool("sysctl", "-n", "machdep.cpu.brand_string").strip()


def _cpu_bf16() -> bool:
    with suppress(OSError):
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        flags = re.search(r"(?m)^(?:flags|Features)\s*:(.*)$", info)
        return flags is not None and bool({"amx_bf16", "avx512_bf16", "bf16"} & set(flags[1].split()))
    return False


def _has_cpp_compiler() -> bool:
    return shutil.which(os.environ.get("CXX") or "c++") is not None and _headers()


def _headers() -> bool:
    return (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file()


def _triton_can_compile(cache: Path) -> bool:
    """Whether Triton can compile its launcher, or has a cached one. It tries compilers in this order. True without
    Triton, which is then not used."""
    if importlib.util.find_spec("triton") is None:
        return True
    names = (os.environ["CC"],) if os.environ.get("CC") else ("gcc", "clang")
    return (any(map(shutil.which, names)) and _headers()) or any(cache.glob("*/*_utils.*so"))
