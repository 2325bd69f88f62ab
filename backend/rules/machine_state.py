"""Rules of what devices share: other processes, their links, the memory through which processes talk.

Floor 3. Imports: below.
"""

from __future__ import annotations

from dataclasses import replace

from backend import registry
from backend.machine import GIB, Gpu
from backend.rules.base import Case, Example, Fix, Violation, amount, names, rule
from backend.rules.examples import DEMO, LAPTOP, TINY, TWO_H100

LEAST_SHARED = GIB
SLICED = {"parallel.strategy": "tensor", "method.kind": "full", "save.strategy": "no"}
SMALL = replace(DEMO, shape=TINY)  # its two heads can be shared by two
BUSY = tuple(replace(gpu, users=("python (4711)",) if gpu.id == 0 else ()) for gpu in TWO_H100.gpus)


def _used(case: Case) -> tuple[Gpu, ...]:
    """The machine's devices that the run computes on."""
    return case.gpus if case.run.on_gpu and case.run.device == case.machine.device else ()


@rule(
    "HW008",
    "warning",
    fields=("launch.devices",),
    title="Another process computes on this device",
    source="NVML: nvmlDeviceGetComputeRunningProcesses",
    fails_on=Example({}, replace(TWO_H100, gpus=BUSY)),
    passes_on=Example({"launch.devices": (1,)}, replace(TWO_H100, gpus=BUSY)),
)
def busy(case: Case) -> Violation | None:
    """Two processes on one device take turns, and share its memory: both are slow, and either may run out of it."""
    taken = [gpu for gpu in _used(case) if gpu.users]
    if not taken:
        return None
    free = tuple(gpu.id for gpu in case.machine.gpus if not gpu.users)[: case.run.nproc_per_node]
    fix = Fix(f"Device{'s' if len(free) > 1 else ''} {names(free)}", {"launch.devices": free})
    said = "; ".join(f"{gpu.name} {gpu.id} is used by {names(gpu.users)}" for gpu in taken)
    return Violation(f"{said}.", (fix,) if len(free) == case.run.nproc_per_node else ())


@rule(
    "HW009",
    "warning",
    fields=("train.dataloader_num_workers", "launch.nproc_per_node"),
    title="Little memory for processes to share",
    source="torch 2.13 storage.py share_memory_, by which loaders hand rows over; NCCL's user guide, troubleshooting, "
    "shared memory",
    manual_fix="Start the container with --ipc=host, or --shm-size=8g.",
    fixes=(Fix("Load rows in the training process", {"train.dataloader_num_workers": 0}),),
    fails_on=Example({"train.dataloader_num_workers": 2}, replace(LAPTOP, shm_bytes=64 * 2**20)),
    passes_on=Example({"train.dataloader_num_workers": 2}, replace(LAPTOP, shm_bytes=8 * GIB)),
)
def little_shared(case: Case) -> str | None:
    """Processes that load rows hand them over through /dev/shm, and NCCL talks through it. A container has 64 MiB
    unless it is told otherwise: then a bus error ends the run, at any step."""
    room = case.machine.shm_bytes
    shares = case.spec.train.dataloader_num_workers or (case.run.device == "cuda" and case.run.nproc_per_node > 1)
    if room is None or room >= LEAST_SHARED or not shares:
        return None
    return f"/dev/shm has {amount(room)} free."


@rule(
    "HW010",
    "advice",
    fields=("parallel.strategy",),
    title="Layers are cut over devices without NVLink",
    source="Narayanan et al. 2021, Megatron-LM: tensor parallel within NVLink, since each layer waits for its sums",
    fixes=(Fix("FSDP2", {"parallel.strategy": "fsdp2"}),),
    fails_on=Example(
        SLICED,
        replace(TWO_H100, gpus=tuple(replace(gpu, links=()) for gpu in TWO_H100.gpus)),
        SMALL,
    ),
    passes_on=Example(SLICED, TWO_H100, SMALL),
)
def slow_links(case: Case) -> str | None:
    """With tensor parallel every layer waits four times a step for sums over the devices. Over PCIe that takes longer
    than the computing itself; sharded strategies send theirs ahead."""
    if registry.STRATEGIES[case.spec.parallel.strategy].engine != "tensor":
        return None
    ids = {gpu.id for gpu in _used(case)}
    apart = [g for g in _used(case) if g.links is not None and not ids <= {g.id, *g.links}]
    return f"NVLink does not join devices {names([g.id for g in apart])} with all others." if apart else None
