"""Rules about the machine: the device type, the build of torch, busy GPUs, NVLink and shared memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from backend import registry
from backend.machine import GIB
from backend.rules.base import Case, Example, Fix, Violation, advice, error, names, warning
from backend.rules.examples import DEMO, EQUIPPED, H100, INSTALLED, LAPTOP, NPU, TINY, TORCH_ONLY, TWO_H100
from backend.rules.quantization import NF4_SPEC
from backend.rules.requirements import (
    attention,
    liger,
    missing_package,
    missing_packages,
    outdated_package,
    prequantized,
    quantization,
)
from backend.wording import data_size

MIN_SHARED_MEMORY = GIB
CPU_TORCH = {**INSTALLED, "torch": "2.13.0+cpu"}
TENSOR_SPEC = {"parallel.strategy": "tensor", "method.kind": "full", "save.strategy": "no"}
TINY_MODEL = replace(DEMO, shape=TINY)  # two attention heads, which two devices can share
BUSY = replace(
    TWO_H100,
    gpus=tuple(replace(gpu, processes=("python (4711)",) if gpu.id == 0 else ()) for gpu in TWO_H100.gpus),
)
NO_NVLINK = replace(TWO_H100, gpus=tuple(replace(gpu, nvlink_peers=()) for gpu in TWO_H100.gpus))


@error(
    "HW001",
    fields=("launch.device",),
    title="This machine has no device of the requested type",
    source="arithmetic: the machine's list of devices",
    fixes=(Fix("Set device to auto", {"launch.device": "auto"}),),
    fails_on=Example({"launch.device": "cuda"}),
    passes_on=Example({"launch.device": "cpu"}),
    proof="launch",
)
def device_not_found(case: Case) -> str | None:
    """A run cannot use a device type that the machine does not have."""
    if case.run.device in ("cpu", case.machine.device):
        return None
    found, wanted = registry.DEVICES[case.machine.device].label, registry.DEVICES[case.run.device].label
    return f"launch.device is {case.run.device} ({wanted}), and the only device type found on this machine is {found}."


@advice(
    "HW005",
    fields=("parallel.strategy",),
    title="The run uses only one of several nodes",
    source="Footplate's launch plan: without a rendezvous, processes start on this node only",
    manual_fix="Set launch.rendezvous to static or elastic to train on several nodes.",
    fails_on=Example(machine=replace(H100, nodes=2)),
    passes_on=Example(machine=H100),
)
def other_nodes_unused(case: Case) -> str | None:
    """A run uses the node that it is started on, unless a rendezvous connects several nodes."""
    if case.machine.nodes == 1 or case.run.nnodes > 1 or case.spec.launch.place != "local":
        return None
    return f"The machine description has {case.machine.nodes} nodes; this run uses 1."


@error(
    "HW006",
    fields=("launch.device",),
    title="The installed torch build does not support this device",
    source="torch 2.13 cuda/__init__.py: is_available() is false in a build without CUDA, and the run would use the "
    "CPU",
    fixes=(Fix("Run on the CPU", {"launch.device": "cpu"}, safe=False, cost="much slower"),),
    manual_fix="Install a torch build for this device; pytorch.org lists the commands.",
    fails_on=Example(machine=replace(H100, versions=CPU_TORCH)),
    passes_on=Example(machine=H100),
)
def torch_build_without_device(case: Case) -> str | None:
    """Each torch build supports one vendor's devices, which its version suffix names: +cu, +rocm, +xpu or +cpu. A build
    for another vendor finds no device and silently uses the CPU."""
    version = case.versions.get("torch", "")
    if case.run.device != case.machine.device or not version or case.run.device not in ("cuda", "xpu"):
        return None
    nvidia = any(gpu.capability > (0, 0) for gpu in case.gpus)
    others = {"cuda": ("rocm", "xpu") if nvidia else ("cu", "xpu"), "xpu": ("cu", "rocm")}[case.run.device]
    if not case.gpus or not version.partition("+")[2].startswith(("cpu", *others)):
        return None
    return f"torch {version} does not support {case.gpus[0].name}, so this run would silently use the CPU."


@advice(
    "HW008",
    fields=("launch.devices",),
    title="Another process is using this GPU, so the run would wait in the queue",
    source="NVML: nvmlDeviceGetComputeRunningProcesses",
    fails_on=Example({}, BUSY),
    passes_on=Example({"launch.devices": (1,)}, BUSY),
    at_start=True,
)
def gpu_in_use(case: Case) -> Violation | None:
    """A run waits in the queue until no other process uses its GPUs. Processes that use one GPU at the same time share
    its compute and memory: all of them slow down, and each can run out of memory."""
    busy = [gpu for gpu in case.gpus if gpu.processes] if case.run.device == case.machine.device else []
    if not busy:
        return None
    free = tuple(gpu.id for gpu in case.machine.gpus if not gpu.processes)[: case.run.nproc_per_node]
    fix = Fix(f"Use GPU{'s' if len(free) > 1 else ''} {names(free)}", {"launch.devices": free})
    users = names([f"GPU {gpu.id} ({gpu.name}) is used by {names(gpu.processes)}" for gpu in busy])
    return Violation(f"{users}.", (fix,) if len(free) == case.run.nproc_per_node else ())


@warning(
    "HW009",
    fields=("train.dataloader_num_workers", "launch.nproc_per_node"),
    title="/dev/shm is too small for worker processes",
    source="torch 2.13 storage.py share_memory_, by which DataLoader workers pass batches; NCCL's user guide, "
    "troubleshooting, shared memory",
    manual_fix="Start the container with --ipc=host or --shm-size=8g.",
    fixes=(Fix("Load data in the training process", {"train.dataloader_num_workers": 0}),),
    fails_on=Example({"train.dataloader_num_workers": 2}, replace(LAPTOP, shm_free_bytes=64 * 2**20)),
    passes_on=Example({"train.dataloader_num_workers": 2}, replace(LAPTOP, shm_free_bytes=8 * GIB)),
    at_start=True,
)
def small_shared_memory(case: Case) -> str | None:
    """DataLoader workers pass batches through /dev/shm, and NCCL exchanges data through it. A container has 64 MiB of
    it by default; when it is full, a bus error can end the run at any step."""
    free, workers = case.machine.shm_free_bytes, case.spec.train.dataloader_num_workers
    nccl = case.run.device == "cuda" and case.run.nproc_per_node > 1
    if free is None or free >= MIN_SHARED_MEMORY or not (workers or nccl):
        return None
    users = [f"{workers} DataLoader worker{'s' if workers > 1 else ''}"] if workers else []
    users += [f"NCCL between {case.run.nproc_per_node} processes"] if nccl else []
    return (
        f"/dev/shm has {data_size(free)} free, but {names(users)} should have at least {data_size(MIN_SHARED_MEMORY)}."
    )


@advice(
    "HW010",
    fields=("parallel.strategy",),
    title="Tensor parallelism without NVLink",
    source="Narayanan et al. 2021, Megatron-LM: tensor parallelism within NVLink, as each layer waits for all-reduces",
    fixes=(Fix("Use FSDP2", {"parallel.strategy": "fsdp2"}),),
    fails_on=Example(TENSOR_SPEC, NO_NVLINK, TINY_MODEL),
    passes_on=Example(TENSOR_SPEC, TWO_H100, TINY_MODEL),
)
def tensor_parallel_without_nvlink(case: Case) -> str | None:
    """With tensor parallelism, every layer waits for all-reduces in both passes. Over PCIe these take longer than the
    computation; FSDP2 overlaps its communication with computation."""
    if case.run.tensor_parallel_size == 1 or case.run.device != case.machine.device:
        return None
    ids = {gpu.id for gpu in case.gpus}
    apart = [gpu.id for gpu in case.gpus if gpu.nvlink_peers is not None and not ids <= {gpu.id, *gpu.nvlink_peers}]
    if not apart:
        return None
    return (
        f"Every layer is split over GPUs {names(sorted(ids))}. These GPUs lack an NVLink connection to at least one "
        f"of the others: {names(apart)}."
    )


LOST = replace(TWO_H100, gpus=TWO_H100.gpus[:1], lost_gpus={1: "GPU is lost"})


@warning(
    "HW011",
    fields=("launch.devices",),
    title="A GPU of this machine does not respond",
    source="NVML API reference: nvmlDeviceGetHandleByIndex, NVML_ERROR_GPU_IS_LOST; NVML indices may differ from those "
    "of CUDA",
    manual_fix="Restart the machine, or reset the GPU with nvidia-smi --gpu-reset; the messages of the kernel (dmesg) "
    "name the Xid error.",
    fails_on=Example(machine=LOST),
    passes_on=Example(machine=H100),
)
def lost_gpu(case: Case) -> str | None:
    """A GPU that has fallen off the bus (Xid 79) responds to no program until it is reset or the machine restarts. CUDA
    leaves the GPU out, so that its numbers of the GPUs after it can differ from those of nvidia-smi."""
    lost = case.machine.lost_gpus
    if not lost or case.spec.launch.device == "cpu" or case.spec.launch.place != "local":
        return None
    answers = names([f"GPU {number} ({error})" for number, error in lost.items()])
    if case.machine.device == "cpu":
        return f"NVML cannot reach {answers}, and this machine has no other device, so this run would use the CPU."
    return (
        f"NVML cannot reach {answers}. Footplate selects the others by UUID, since CUDA may number them differently "
        "from nvidia-smi: launch.devices has the numbers of nvidia-smi."
    )


BASE_PACKAGES = ("torch", "transformers", "accelerate", "peft", "trl", "datasets")
ROWS: Mapping[str, Callable[[Case], registry.Choice | None]] = {
    "train.optim": lambda case: case.optimizer,
    "method.quantization": quantization,
    "model.attn_implementation": attention,
    "train.use_liger_kernel": liger,
    "model.path": prequantized,
}


# --- What the registry row requires ---


@error(
    "HW002",
    fields=("launch.device",),
    title="A required package is not installed",
    source="pyproject.toml",
    manual_fix="Alternatively, set up Footplate's own environment again with `make run`.",
    fails_on=Example(machine=TORCH_ONLY),
    passes_on=Example(),
)
def base_package_missing(case: Case) -> str | None:
    """The trainer imports these packages, in the Python environment that starts the run."""
    return missing_packages(case, "Training", BASE_PACKAGES)


@error(
    "HW003",
    fields=("launch.device",),
    title="Ascend NPUs need torch_npu",
    source="torch 2.13: torch.npu exists only with torch_npu",
    fixes=(Fix("Run on the CPU", {"launch.device": "cpu"}, safe=False, cost="much slower"),),
    manual_fix="Choose the torch_npu release that matches the installed torch.",
    fails_on=Example(machine=NPU),
    passes_on=Example(machine=replace(NPU, versions={**NPU.versions, "torch_npu": "2.13.0"})),
)
def torch_npu_missing(case: Case) -> str | None:
    """PyTorch supports Ascend NPUs only through the package torch_npu."""
    return missing_package(case, registry.DEVICES[case.run.device])


@error(
    "HW004",
    fields=("logging.report_to",),
    title="The experiment tracker is not installed",
    source="transformers 5.23 integrations: the callback raises an error without its package",
    fixes=(Fix("Turn off the tracker", {"logging.report_to": "none"}),),
    fails_on=Example({"logging.report_to": "wandb"}),
    passes_on=Example({"logging.report_to": "wandb"}, replace(LAPTOP, versions={**LAPTOP.versions, "wandb": "0.23"})),
    proof="launch",
)
def tracker_package_missing(case: Case) -> str | None:
    """The Trainer imports the tracker's package after the model is loaded, and stops if it is missing."""
    return missing_package(case, registry.REPORTERS[case.spec.logging.report_to])


@error(
    "HW007",
    fields=tuple(ROWS),
    title="A package is too old",
    source="transformers 5.23 utils/import_utils.py, trainer_optimizer.py and quantizers/quantizer_awq.py: an older "
    "version counts as not installed",
    manual_fix="Check that the new version is compatible with the installed torch.",
    fails_on=Example(NF4_SPEC, replace(LAPTOP, versions={**INSTALLED, "bitsandbytes": "0.43.0"})),
    passes_on=Example(NF4_SPEC, EQUIPPED),
)
def package_too_old(case: Case) -> Violation | None:
    """transformers treats a package below its minimum version as not installed, and reports this only after the model
    is loaded."""
    return outdated_package(case, {field: row(case) for field, row in ROWS.items()})
