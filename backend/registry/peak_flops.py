"""Peak matmul throughput of GPUs, from the vendors' data sheets: dense, with fp32 accumulation."""

from __future__ import annotations

from collections.abc import Mapping

TERA = 10**12
# Part of the device's name -> FLOP/s in bf16 (0: not in hardware) and fp16. The first part that fits counts.
PEAK_FLOPS: Mapping[str, tuple[int, int]] = {
    "B200": (2250 * TERA, 2250 * TERA),
    "H100 PCIe": (756 * TERA, 756 * TERA),
    "H100 NVL": (835 * TERA, 835 * TERA),
    "H100": (989 * TERA, 989 * TERA),
    "H200": (989 * TERA, 989 * TERA),
    "A100": (312 * TERA, 312 * TERA),
    "L40S": (362 * TERA, 362 * TERA),
    "L4": (121 * TERA, 121 * TERA),
    "A10": (125 * TERA, 125 * TERA),
    "RTX 4090": (165 * TERA, 165 * TERA),
    "RTX 3090": (71 * TERA, 71 * TERA),
    "V100": (0, 125 * TERA),
    "T4": (0, 65 * TERA),
    "MI300X": (1307 * TERA, 1307 * TERA),
}


def peak_flops(name: str, dtype: str) -> int:
    """FLOP/s of the device called `name` in bf16 or fp16; 0 if unknown."""
    words = name.replace("-", " ").split()
    if {"Laptop", "D"} & set(words):  # slower variants with the same name
        return 0
    for part, (bf16, fp16) in PEAK_FLOPS.items():
        wanted = part.split()
        if any(words[at : at + len(wanted)] == wanted for at in range(len(words))):
            return {"bf16": bf16, "fp16": fp16}.get(dtype, 0)
    return 0
