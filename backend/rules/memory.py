"""Rules of memory: runs that do not fit, or may not, into device memory or host RAM, with changes that help."""

from __future__ import annotations

from dataclasses import replace

from backend import registry
from backend.config import RunSpec
from backend.config.options import edit
from backend.machine import GIB
from backend.memory import Fit
from backend.memory.context import DTYPE_BYTES
from backend.memory.estimate import EVALUATION, GENERATION
from backend.memory.kinds import bytes_by_kind, kind_label
from backend.rules.base import Case, Example, Fix, Violation, error, warning
from backend.rules.common_fixes import FSDP2
from backend.rules.examples import DEMO, H100, LAPTOP, LLAMA_8B, TWO_H100
from backend.rules.memory_remedies import POSSIBLE_EXCESS, find_remedies
from backend.wording import data_size

LLAMA_8B_FACTS = replace(DEMO, shape=LLAMA_8B)
FULL = {"method.kind": "full", "train.learning_rate": 2e-5}
DEFAULT_PEAK = Case(RunSpec(), LAPTOP, DEMO).estimate.device_bytes
OPTIMIZER_OFFLOAD = {**FULL, "parallel.strategy": "zero3", "parallel.offload_optimizer": "cpu"}
HOST_PEAK = Case(edit(RunSpec(), OPTIMIZER_OFFLOAD), TWO_H100, LLAMA_8B_FACTS).estimate.host_bytes
SMALL_RAM = replace(TWO_H100, ram_bytes=48 * GIB, ram_free_bytes=48 * GIB)
NO_REMEDY = "Footplate found no combination of options that fits: use a smaller model or a machine with more memory."
LESS_HOST_RAM = (
    "Use nodes with more RAM. If loading the model needs the most RAM, start fewer processes per node; if a checkpoint "
    "does, set parallel.state_dict_type to sharded."
)
MORE_DEVICE_MEMORY = "more memory on the devices"
HOST_FIXES = (
    FSDP2,
    Fix("Save sharded checkpoints", {"parallel.state_dict_type": "sharded"}),
    Fix("Keep the optimizer state on the devices", {"parallel.offload_optimizer": "none"}, cost=MORE_DEVICE_MEMORY),
    Fix(
        "Disable offload",
        {"parallel.offload_optimizer": "none", "parallel.offload_param": "none"},
        cost=MORE_DEVICE_MEMORY,
    ),
    Fix("Disable CPU offload", {"parallel.cpu_offload": False}, cost=MORE_DEVICE_MEMORY),
)
SOURCE = "the estimate: closed formulas, verified with measured peaks"


@error(
    "MEM001",
    fields=("train.per_device_train_batch_size", "data.max_length", "method.kind"),
    title="The run does not fit into memory",
    source=SOURCE,
    fails_on=Example(FULL, H100, LLAMA_8B_FACTS),
    passes_on=Example({}, H100, LLAMA_8B_FACTS),
    at_start=True,
)
def device_out_of_memory(case: Case) -> Violation | None:
    """A GPU that runs out of memory ends the run with an out-of-memory error. On a machine without GPUs, the kernel
    kills the process without an error message."""
    if case.estimate.fit != Fit.NO:
        return None
    if case.estimate.lower_bound:
        return Violation(f"{_message(case)} This is a lower bound: {case.estimate.unknown}.", (), _fields(case))
    fixes = find_remedies(case, 1.0) or find_remedies(case, POSSIBLE_EXCESS)
    return Violation(_message(case) if fixes else f"{_message(case)} {NO_REMEDY}", tuple(fixes), _fields(case))


@warning(
    "MEM002",
    fields=("train.per_device_train_batch_size", "data.max_length", "method.kind"),
    title="The run may not fit into memory",
    source=SOURCE,
    fails_on=Example({}, replace(LAPTOP, ram_free_bytes=DEFAULT_PEAK)),
    passes_on=Example(),
)
def possible_device_out_of_memory(case: Case) -> Violation | None:
    """The upper bound of the estimated range exceeds the free memory, so the run may or may not fit."""
    found = case.estimate
    if found.fit not in (Fit.UNCERTAIN, Fit.UNLIKELY):
        return None
    peak = data_size(found.high_bytes)
    doubt = f"Peak memory may reach {peak}." if found.fits else "The run most likely does not fit."
    title = "" if found.fits else "The run most likely does not fit into memory"
    return Violation(f"{doubt} {_message(case)}", tuple(find_remedies(case, 1.0)), _fields(case), title)


@error(
    "MEM003",
    fields=("parallel.strategy", "parallel.offload_optimizer", "parallel.cpu_offload"),
    title="The run does not fit into host RAM",
    source=SOURCE,
    manual_fix=LESS_HOST_RAM,
    fails_on=Example(OPTIMIZER_OFFLOAD, SMALL_RAM, LLAMA_8B_FACTS),
    passes_on=Example(OPTIMIZER_OFFLOAD, TWO_H100, LLAMA_8B_FACTS),
    at_start=True,
)
def host_out_of_memory(case: Case) -> Violation | None:
    """The weights are loaded into host RAM before they are moved to the devices, by every process or by rank 0 only.
    Offloaded state stays there, and FSDP copies checkpoints there before it writes them. When RAM runs out, the kernel
    kills processes without an error message."""
    if case.estimate.host_fit(case.machine.ram_free_bytes) != Fit.NO:
        return None
    return _exceeded_host_ram(case)


@warning(
    "MEM004",
    fields=("parallel.strategy", "parallel.offload_optimizer", "parallel.cpu_offload"),
    title="The run may not fit into host RAM",
    source=SOURCE,
    manual_fix=LESS_HOST_RAM,
    fails_on=Example(OPTIMIZER_OFFLOAD, replace(TWO_H100, ram_free_bytes=HOST_PEAK - 1), LLAMA_8B_FACTS),
    passes_on=Example(OPTIMIZER_OFFLOAD, replace(TWO_H100, ram_free_bytes=HOST_PEAK), LLAMA_8B_FACTS),
    at_start=True,
)
def possible_host_out_of_memory(case: Case) -> Violation | None:
    """The estimate of host RAM exceeds what is free, by less than its uncertainty. Loading, offloaded state and FSDP
    checkpoints use host RAM. When it runs out, the kernel kills processes without an error message."""
    if case.estimate.host_fit(case.machine.ram_free_bytes) != Fit.UNLIKELY:
        return None
    return _exceeded_host_ram(case)


def _exceeded_host_ram(case: Case) -> Violation:
    found, free = case.estimate, case.machine.ram_free_bytes
    largest = max((row for row in found.rows if row.where == "host"), key=lambda row: row.bytes)
    fixes = [fix for fix in HOST_FIXES if case.takes(fix.patch) and _fits_afterwards(case, fix)]
    message = (
        f"The run needs {data_size(found.host_bytes)} of host RAM on each node; {data_size(free)} is free. "
        f"The largest part is {_lower(largest.name)}: {data_size(largest.bytes)}."
    )
    return Violation(message, tuple(fixes[:2]))


def _fits_afterwards(case: Case, fix: Fix) -> bool:
    """Whether the fix saves host RAM, and neither host RAM nor device memory is clearly exceeded after it."""
    found = case.estimated(case.with_patch(fix.patch))
    exceeded = Fit.NO in (found.fit, found.host_fit(case.machine.ram_free_bytes))
    return not exceeded and found.host_bytes < case.estimate.host_bytes


def _lower(name: str) -> str:
    """The name of a row or kind of the estimate within a sentence."""
    return name if name.startswith("Python") else name[:1].lower() + name[1:]


def _message(case: Case) -> str:
    found = case.estimate
    where = "for each process" if case.run.device == "cpu" else "on each device"
    kind, size = max(bytes_by_kind(found.rows).items(), key=lambda item: item[1])
    largest = _lower(kind_label(kind, case.run.device))
    needs = f"needs {'at least ' if found.lower_bound else ''}{data_size(found.device_bytes)}"
    return (
        f"The run {needs} {where}; {data_size(found.capacity_bytes)} is free. "
        f"The largest part is {largest}: {data_size(size)}.{_unquantized_experts(case)}"
    )


def _unquantized_experts(case: Case) -> str:
    """Why quantization saves so little of a mixture of experts."""
    quantization = registry.QUANTIZATIONS[case.spec.method.quantization]
    if case.shape is None or case.spec.method.kind != "lora" or not quantization.bits or not case.shape.most_experts:
        return ""
    count = sum(leaf.parameters * leaf.count for leaf in case.shape.modules() if leaf.stacked > 1)
    size, dtype = data_size(count * DTYPE_BYTES[case.run.compute_dtype]), case.run.compute_dtype
    return f" {quantization.label} quantizes linear layers only: the experts, {size} in total, stay in {dtype}."


def _fields(case: Case) -> tuple[str, ...]:
    """The options that the largest part of the estimate depends on."""
    sizes, moments = bytes_by_kind(case.estimate.rows), case.estimate.moments
    largest = max(sizes, key=sizes.__getitem__)
    phase = max(moments, key=lambda moment: moment.bytes).phase if moments else ""
    if phase == GENERATION and largest in ("activations", "gathered"):
        return ("eval.num_generations", "eval.per_device_eval_batch_size")
    if phase == EVALUATION and largest == "activations":
        return ("eval.per_device_eval_batch_size", "data.max_length")
    if largest == "activations":
        return ("train.per_device_train_batch_size", "data.max_length", "train.activation_checkpointing")
    return ("method.kind", "train.optim", "precision.compute")
