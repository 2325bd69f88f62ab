"""What follows from a spec and a machine without any doubt: device family, processes, precision, batch.

Floor 1. Imports: catalog, hostfile, spec, machine. One place, so that plan, estimate and rules never differ.
"""

from __future__ import annotations

import math

from backend import registry
from backend.config import RunSpec
from backend.launch import hostfile
from backend.machine import Gpu, Machine

PORT = 29500  # torch's own, where none is given


def device(spec: RunSpec, machine: Machine) -> str:
    """The device family that the run uses: the one asked for, or the accelerator that is there."""
    return machine.device if spec.launch.device == "auto" else spec.launch.device


def processes(spec: RunSpec) -> int:
    """Processes on this node."""
    return spec.launch.nproc_per_node if spec.parallel.strategy in registry.MANY else 1


def nodes(spec: RunSpec) -> int:
    """Machines that train together; of an elastic run, the most."""
    launch = spec.launch
    alone = launch.rendezvous == "standalone" or launch.launcher == "python"
    return 1 if alone or spec.parallel.strategy not in registry.MANY else launch.nnodes


def ids(spec: RunSpec, machine: Machine) -> tuple[int, ...]:
    """The device ids that the run takes on a node: those that are named, or the first."""
    return spec.launch.devices or tuple(gpu.id for gpu in machine.gpus[: processes(spec)])


def used(spec: RunSpec, machine: Machine) -> list[Gpu]:
    """The devices of `ids` that are there."""
    wanted = ids(spec, machine)
    return [gpu for gpu in machine.gpus if gpu.id in wanted]


def world(spec: RunSpec) -> int:
    """Processes of all nodes together."""
    return processes(spec) * nodes(spec)


def port(spec: RunSpec) -> int:
    """Where the ranks meet on this node, so that it must be free; 0 if that is elsewhere, or any free one is taken."""
    launch, alone = spec.launch, nodes(spec) == 1
    if launch.launcher == "python" or launch.rendezvous == "elastic" or (alone and launch.launcher == "accelerate"):
        return 0
    if not alone and launch.node_rank:
        return 0
    return launch.master_port or (0 if alone and launch.launcher == "torchrun" else PORT)


def include(spec: RunSpec) -> str:
    """Hosts and slots of the hostfile that DeepSpeed's launcher is to take: those named, or the device ids on each."""
    return spec.launch.include or hostfile.included(spec.launch.hostfile, spec.launch.devices)


def precision(spec: RunSpec, machine: Machine) -> str:
    """bf16, fp16 or fp32: what the choice computes in, or bf16 where the device does."""
    if asked := registry.PRECISIONS[spec.precision.compute].computes:
        return asked
    family = device(spec, machine)
    if family == "cuda":
        return "fp32" if any(old(gpu.capability) for gpu in machine.gpus) else "bf16"
    return "bf16" if family in ("npu", "xpu") else "fp32"


def masters(spec: RunSpec) -> bool:
    """Whether trained weights, gradients and optimizer state are held in fp32, whatever it computes in."""
    return registry.PRECISIONS[spec.precision.compute].masters


def reads_once(spec: RunSpec) -> bool:
    """Whether one process of all reads the weights, and sends the others their parts: FSDP2 can, unless the model is
    made anew."""
    return registry.STRATEGIES[spec.parallel.strategy].version == 2 and not spec.remade


def old(capability: tuple[int, int]) -> bool:
    """Whether an NVIDIA GPU has no bf16 units: before Ampere. (0, 0) is another maker's."""
    return (0, 0) < capability < (8, 0)


def learners(spec: RunSpec) -> int:
    """Processes, or groups of them, that work on rows of their own: those of a group share theirs."""
    return max(1, world(spec) // (spec.parallel.slices * spec.parallel.pieces))


def global_batch(spec: RunSpec) -> int:
    """Rows that one optimizer step learns from, over all processes."""
    return spec.train.per_device_train_batch_size * spec.train.gradient_accumulation_steps * learners(spec)


def backend(family: str) -> str:
    """The collective backend of a device family."""
    return registry.DEVICES[family].backends[0]


def steps(spec: RunSpec, rows: int | None) -> int | None:
    """Optimizer steps of the whole run; None where they cannot be known (rows unknown, or packed to fewer)."""
    if spec.train.duration == "steps":
        return spec.train.max_steps
    each = steps_per_epoch(spec, rows)
    return None if each is None else max(1, math.ceil(spec.train.num_train_epochs * each))


def steps_per_epoch(spec: RunSpec, rows: int | None) -> int | None:
    """Optimizer steps of one pass over `rows`; the last, smaller batch counts too."""
    if rows is None or spec.data.packing:
        return None
    batches = math.ceil(math.ceil(rows / spec.train.per_device_train_batch_size) / learners(spec))
    return max(1, math.ceil(batches / spec.train.gradient_accumulation_steps))


def unconvertible(spec: RunSpec) -> str:
    """With what DeepSpeed cannot convert a checkpoint for another number of processes; '' if it can. Looked up in
    deepspeed 0.19 checkpoint/ds_to_universal.py, runtime/engine.py and runtime/sequence_parallel."""
    parallel, row = spec.parallel, registry.STRATEGIES[spec.parallel.strategy]
    if not row.stage:
        return row.label
    if row.stage == 3 and "nvme" in (parallel.offload_optimizer, parallel.offload_param):
        return "its state on a disk"
    if parallel.pieces > 1:
        return "sequence parallel"
    return "" if registry.OPTIMIZERS[spec.train.optim].moments else "another optimizer than AdamW"
