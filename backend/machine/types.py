"""What a machine is.

Floor 1. Imports: nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

GIB = 1024**3


@dataclass(frozen=True)
class Gpu:
    """One device. `capability` is NVIDIA's compute capability, (0, 0) for others; `links` are the ids that NVLink
    reaches, None if nobody knows; `users` are the processes that hold some of its memory: 'python (4711)'."""

    id: int
    name: str
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int] = (0, 0)
    links: tuple[int, ...] | None = None
    users: tuple[str, ...] = ()
    uuid: str = ""  # NVIDIA's


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
    triton: bool = True  # it can build what it launches kernels by: a C compiler is there, or it has built it before
    driver: str = ""  # of NVIDIA's GPUs
    unsloth_wants: str = ""  # other versions than those that are here, which Unsloth asks for
    libaio: bool = True  # with its headers, for DeepSpeed's way to a disk
    shm_bytes: int | None = None  # of /dev/shm, free; None where there is none or nobody knows
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
