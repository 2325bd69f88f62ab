"""What GPUs can do at most, from the vendors' data sheets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

TERA = 10**12


@dataclass(frozen=True)
class GpuModel:
    """A GPU of a data sheet: dense matrix multiplications with fp32 accumulation in `bf16` (0: not in hardware) and
    `fp16` in TFLOP/s, `memory` in GB/s, the power limit in `watts`, the last-level `cache` in MB, NVLink in GB/s in
    each direction (0: none), and the network of the vendor's own servers in GB/s for each node (0: there are none).

    `generation` names the chips that reach the same FLOP/s per watt; '' where no training of a GPU of this generation
    was compared, so that no time can be predicted.
    """

    bf16: float
    fp16: float
    memory: float
    watts: int
    cache: int = 0
    nvlink: float = 0
    network: float = 0
    generation: str = ""


def _ampere(tflops: float, memory: float, watts: int) -> GpuModel:
    """GA102 and its relatives."""
    return GpuModel(tflops, tflops, memory, watts, 6, generation="GA10x")


def _ada(tflops: float, memory: float, watts: int, cache: int) -> GpuModel:
    return GpuModel(tflops, tflops, memory, watts, cache, generation="Ada")


_A100 = GpuModel(312, 312, 2039, 400, 40, 300, 200, "A100")
_A100_PCIE = replace(_A100, memory=1935, watts=300, nvlink=0, network=0)
_A100_PCIE_40 = replace(_A100_PCIE, memory=1555, watts=250)
_H100 = GpuModel(989, 989, 3350, 700, 50, 450, 400, "Hopper")
# Part of the device's name -> data sheet. The first part that matches is used.
GPU_MODELS: Mapping[str, GpuModel] = {
    "B200": GpuModel(2250, 2250, 8000, 1000, 126, 900, 400),
    "H100 PCIe": replace(_H100, bf16=756, fp16=756, memory=2000, watts=350, nvlink=0, network=0),
    "H100 NVL": replace(_H100, bf16=835, fp16=835, memory=3900, watts=400, nvlink=0, network=0),
    "H100": _H100,
    "H200 NVL": replace(_H100, bf16=835, fp16=835, memory=4800, watts=600, nvlink=0, network=0),
    "H200": replace(_H100, memory=4800),
    "H20": replace(_H100, bf16=148, fp16=148, memory=4000, watts=400, cache=60),
    "A100 PCIE 40GB": _A100_PCIE_40,
    "A100 40GB PCIe": _A100_PCIE_40,
    "A100 80GB PCIe": _A100_PCIE,
    "A100 PCIE": _A100_PCIE,
    "A100 40GB": replace(_A100, memory=1555),
    "A100 SXM4 40GB": replace(_A100, memory=1555),
    "A100": _A100,
    "A800 80GB PCIe": _A100_PCIE,
    "A800": replace(_A100, nvlink=200),
    "L40S": _ada(362, 864, 350, 96),
    "L4": _ada(121, 300, 72, 48),
    "A10": _ampere(125, 600, 150),
    "A40": _ampere(150, 696, 300),
    "RTX A5000": _ampere(111, 768, 230),
    "RTX A6000": _ampere(155, 768, 300),
    "RTX 6000 Ada": _ada(364, 960, 300, 96),
    "RTX 5090": GpuModel(209, 209, 1792, 575, 96),
    "RTX 4090": _ada(165, 1008, 450, 72),
    "RTX 3090": _ampere(71, 936, 350),
    "V100": GpuModel(0, 125, 900, 300, 6, 150),
    "T4": GpuModel(0, 65, 320, 70, 4),
    "MI300X": GpuModel(1307, 1307, 5300, 750, 256, 448),
}
SLOWER_VARIANTS = {"Laptop", "D"}  # words in the names of slower GPUs whose names are otherwise the same


def gpu_model(name: str) -> GpuModel | None:
    """The data sheet of the device called `name`; None if it is not known, as for a part of a GPU, such as 1g.10gb."""
    words = name.replace("-", " ").upper().split()
    if {word.upper() for word in SLOWER_VARIANTS} & set(words) or any(re.match(r"\d+G\.\d", word) for word in words):
        return None
    for part, model in GPU_MODELS.items():
        wanted = part.upper().split()
        if any(words[at : at + len(wanted)] == wanted for at in range(len(words))):
            return model
    return None


def peak_flops(name: str, dtype: str) -> int:
    """FLOP/s of the device called `name` in bf16 or fp16; 0 if unknown."""
    model = gpu_model(name)
    return round({"bf16": model.bf16, "fp16": model.fp16}.get(dtype, 0) * TERA) if model else 0
