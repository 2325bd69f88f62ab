"""What torch's out-of-memory error says: how much was requested, allocated, free, and used by other processes.

The text is that of torch 2.13's caching allocators (c10/cuda/CUDACachingAllocator.cpp, and the one for XPU) and of
torch_npu, which still has the earlier wording.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from backend.wording import data_size

UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
SIZE = r"([\d.]+) (bytes|[KMG]iB)"
SIGNIFICANT = 0.03  # of the device: memory of other processes below it is not worth a sentence


@dataclass(frozen=True)
class OutOfMemory:
    """Bytes; None where the error does not say. `unused` is reserved by torch, but not allocated; `process` is all that
    the process uses on the device, with its context."""

    requested: int | None
    total: int | None
    free: int | None
    process: int | None
    allocated: int | None
    unused: int | None

    @property
    def needed(self) -> int | None:
        """The least that torch's allocator needed to continue."""
        if self.requested is None or self.allocated is None:
            return None
        return self.requested + self.allocated + (self.unused or 0)

    @property
    def others(self) -> int:
        """What other processes used on the device, if that is a significant part of it."""
        if self.total is None or self.free is None or self.process is None:
            return 0
        others = self.total - self.free - self.process
        return others if others > SIGNIFICANT * self.total else 0


def parse(text: str) -> OutOfMemory | None:
    """The last out-of-memory error of a device in `text`; None without one."""
    start = max((match.start() for match in re.finditer(r"(?i)(CUDA|HIP|XPU|NPU) out of memory", text)), default=None)
    if start is None:
        return None
    error = text[start : start + 2000]
    return OutOfMemory(
        requested=_size(rf"Tried to allocate {SIZE}", error),
        total=_size(rf"total capacity of {SIZE}|{SIZE} total capacity", error),
        free=_size(rf"of which {SIZE} is free|{SIZE} free", error),
        process=_size(rf"this process has {SIZE} memory in use", error),
        allocated=_size(rf"Of the allocated memory {SIZE} is allocated|{SIZE} already allocated", error),
        unused=_size(rf"{SIZE} is reserved by PyTorch but unallocated", error),
    )


def sentence(found: OutOfMemory) -> str:
    """The numbers of the error as a sentence."""
    if found.requested is None:
        return "The device ran out of memory."
    text = f"The device ran out of memory: {data_size(found.requested)} more were requested"
    if found.allocated is not None:
        text += f" when this process had {data_size(found.allocated)} allocated"
    if found.total is not None:
        text += f", of {data_size(found.total)} in total"
    if found.others:
        text += f". Other processes used {data_size(found.others)}"
    return f"{text}."


def _size(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text)
    if not match:
        return None
    number, unit = (group for group in match.groups() if group)
    return round(float(number) * UNITS[unit])
