"""Rates that devices, links and networks reach in training: those of GPUs are shares of their data sheets, that of this
CPU is measured.

The shares were set before they were compared with published throughputs. A fit did not improve the prediction of
programs that were left out of it (docs/time.md), so they are not fitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from backend import registry
from backend.inspect import CpuSpeed
from backend.machine import Gpu, Machine
from backend.registry.gpus import TERA, GpuModel
from backend.resolve import ResolvedRun, estimated_gpus

GIGA, MEGA = 10**9, 10**6
PCIE_RATE = 12 * GIGA  # bytes/s between GPUs without NVLink, through host RAM
ETHERNET_RATE = 3 * GIGA  # bytes/s of a node of which nothing is known: 25 Gbit/s
DISK_RATE = GIGA
SMALL_MATRIX_RATE = 0.3  # of the rate of large matrices, which LoRA's reach on GPUs
LAYER_OPERATIONS = 80  # operations that start in a decoder layer of transformers, forward and backward
GLOO_SHARE = 0.08  # of the memory rate: an all-reduce copies each byte several times, through sockets


@dataclass(frozen=True)
class Calibration:
    """What a fit may change. `flops_per_watt`: TFLOP/s per watt of the power limit, by generation; `operation_seconds`:
    the time of the CPU for one operation of PyTorch; all others are shares."""

    peak: float = 0.92  # of the data sheet's FLOP/s, where power does not limit it
    flops_per_watt: Mapping[str, float] = field(
        default_factory=lambda: {"A100": 0.57, "Hopper": 0.90, "Ada": 0.62, "GA10x": 0.45}
    )
    memory: float = 0.80  # of the memory's rate
    attention: float = 0.75  # of the rate of linear layers
    attention_hopper: float = 0.55  # the same for kernels that were not written for Hopper
    operation_seconds: float = 7e-6
    link: float = 0.75  # of NVLink or PCIe
    network: float = 0.60
    overlap: float = 0.75  # hidden share of the shorter one of computing and communication
    dequantization: float = 2.0  # traffic over the bytes that must be moved


CALIBRATION = Calibration()


@dataclass(frozen=True)
class DeviceRates:
    """What the slowest device of a run reaches: FLOP/s of linear layers, of LoRA's matrices and of attention, bytes/s
    of its memory and of activations, the bytes of its cache, and seconds of the loss of one logit (0: it follows from
    the memory rate)."""

    matmul: float
    small: float
    attention: float
    memory: float
    activations: float
    cache: int = 0
    logit: float = 0.0


@dataclass(frozen=True)
class LinkRates:
    """Bytes/s from a GPU to the others of its node, and of a node to the others. `assumed` says which of them the
    machine's description does not have, '' if it has all that matter."""

    inside: float
    between: float
    assumed: str = ""


def models_of(run: ResolvedRun, machine: Machine) -> list[GpuModel]:
    """The data sheets of the GPUs that a run uses; those that are not known are left out."""
    names = dict.fromkeys(gpu.name for gpu in estimated_gpus(run, machine))
    return [model for name in names if (model := registry.gpu_model(name))]


def device_rates(models: list[GpuModel], dtype: str, own_kernels: bool, calibration: Calibration) -> DeviceRates:
    """The rates of the slowest of `models` in `dtype`, bf16 or fp16. `own_kernels`: attention has kernels that were
    written for this generation."""
    matmul = min(_matmul_rate(model, dtype, calibration) for model in models)
    hopper = any(model.generation == "Hopper" for model in models) and not own_kernels
    attention = matmul * (calibration.attention_hopper if hopper else calibration.attention)
    memory = calibration.memory * min(model.memory for model in models) * GIGA
    cache = min(model.cache for model in models) * MEGA
    return DeviceRates(matmul, SMALL_MATRIX_RATE * matmul, attention, memory, memory, cache)


def cpu_rates(cpu: CpuSpeed) -> DeviceRates:
    """What was measured, for the threads of one process."""
    return DeviceRates(cpu.matmul, cpu.small, cpu.attention, cpu.memory, cpu.activations, 0, cpu.logit)


def cpu_calibration(cpu: CpuSpeed) -> Calibration:
    """What differs on a CPU: starting an operation takes as long as measured, and communication uses the same cores."""
    return replace(CALIBRATION, operation_seconds=cpu.layer / LAYER_OPERATIONS, overlap=0.0)


def _matmul_rate(model: GpuModel, dtype: str, calibration: Calibration) -> float:
    peak = model.bf16 if dtype == "bf16" else model.fp16
    return min(calibration.peak * peak, calibration.flops_per_watt[model.generation] * model.watts) * TERA


def link_rates(run: ResolvedRun, machine: Machine, models: list[GpuModel], calibration: Calibration) -> LinkRates:
    """The rates between the GPUs of a run. A rate that the machine's description does not have is that of the GPU's
    data sheet. A described rate is measured, so it is reached."""
    used = estimated_gpus(run, machine)
    inside, between, assumed = machine.gpu_link_rate, machine.network_rate, []
    inside_rate = float(inside or 0)
    if not inside:
        has_nvlink = all(gpu.nvlink_peers is None or _has_peers(gpu, used) for gpu in used)
        nvlink = min(model.nvlink for model in models) * GIGA if has_nvlink else 0
        inside_rate = calibration.link * (nvlink or PCIE_RATE)
        if run.nproc_per_node > 1 and not nvlink:
            assumed.append(f"{PCIE_RATE / GIGA:g} GB/s between the GPUs of a node (gpu_link_gb_per_s)")
    between_rate = float(between or 0)
    if not between:
        sheet = min(model.network for model in models) * GIGA or ETHERNET_RATE
        between_rate = calibration.network * sheet
        if run.nnodes > 1:
            assumed.append(f"{sheet / GIGA:g} GB/s of network for each node (network_gb_per_s)")
    return LinkRates(inside_rate, between_rate, " and ".join(assumed))


def _has_peers(gpu: Gpu, used: tuple[Gpu, ...]) -> bool:
    return all(other.id == gpu.id or other.id in (gpu.nvlink_peers or ()) for other in used)
