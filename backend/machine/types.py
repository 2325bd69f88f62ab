"""Machine and Gpu."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from backend.wording import counted

GIB = 1024**3


@dataclass(frozen=True)
class Gpu:
    """One device. `capability` is the CUDA compute capability, (0, 0) for other vendors; `nvlink_peers` are the ids of
    the devices that NVLink connects it to, None if unknown; `processes` are those that use it: 'python (4711)'."""

    id: int
    name: str
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int] = (0, 0)
    nvlink_peers: tuple[int, ...] | None = None
    processes: tuple[str, ...] = ()
    uuid: str = ""  # of NVIDIA and AMD GPUs
    only_by_uuid: bool = False  # a number in CUDA_VISIBLE_DEVICES may select another device

    @property
    def is_part(self) -> bool:
        """Whether it is a part of a GPU (a MIG device)."""
        return self.uuid.startswith("MIG-")

    @property
    def visible_as(self) -> str:
        """What selects it in a variable such as CUDA_VISIBLE_DEVICES."""
        return self.uuid if self.only_by_uuid else str(self.id)

    @property
    def usable_bytes(self) -> int:
        """Free memory when a run starts: it waits in the queue until no other process uses the device."""
        return self.total_bytes if self.processes else self.free_bytes


@dataclass(frozen=True)
class Machine:
    """The hardware and software of a machine that a run depends on.

    `device` is the device type (a key of registry.DEVICES). `cores` are those that this process may use. Empty
    `versions` mean unknown, not missing. An empty `name` is the machine that Footplate runs on. `lost_gpus` are the
    numbers of the NVIDIA GPUs that do not respond, with NVML's error.
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
    has_cpp_compiler: bool = True  # with Python's headers, for extensions that are compiled on first use
    triton_can_compile: bool = True  # a C compiler for Triton's launcher exists, or Triton has a cached launcher
    driver_version: str = ""  # of the NVIDIA driver
    unsloth_unmet_requirements: str = ""  # of the installed Unsloth: 'transformers <=5.17.0'
    has_libaio: bool = True  # with its headers, for DeepSpeed's NVMe offload
    shm_free_bytes: int | None = None  # free bytes of /dev/shm; None without one, or if unknown
    # Measured bandwidths in bytes per second, in one direction; None if unknown.
    gpu_link_rate: int | None = None  # from one GPU to the others of its node
    network_rate: int | None = None  # of a node, all its network adapters together
    disk_rate: int | None = None  # of the file system that stores models and runs
    price_per_gpu_hour: float | None = None  # in any currency
    lost_gpus: Mapping[int, str] = field(default_factory=dict)

    @property
    def uses_hip(self) -> bool:
        """Whether its GPUs are AMD's, or may be: only those of NVIDIA have a compute capability."""
        return self.device == "cuda" and bool(self.gpus) and all(gpu.capability == (0, 0) for gpu in self.gpus)


def describe(machine: Machine) -> str:
    """A short description: '2 cores, 24 GiB, no GPU', '8 x H100 80GB', '2 nodes of 8 x H100'."""
    if machine.gpus:
        first = machine.gpus[0]
        count = f"{len(machine.gpus)} x " if len(machine.gpus) > 1 else ""
        size = f"{round(first.total_bytes / GIB)}GB"
        label = count + (first.name if re.search(r"\d\s?G(i)?B", first.name) else f"{first.name} {size}")
    else:
        cores = counted(machine.cores, "core")
        label = f"{cores}, {round(machine.ram_bytes / GIB)} GiB, no GPU"
    label = f"{machine.nodes} nodes of {label}" if machine.nodes > 1 else label
    return f"{machine.name}: {label}" if machine.name else label
