"""Rules of FSDP, of slices and meshes, and of what is kept away from the devices.

Floor 3. Imports: below.
"""

from __future__ import annotations

from dataclasses import replace

from backend import registry
from backend.config import merge
from backend.machine import Machine
from backend.rules.base import Case, Example, Fix, Violation, counted, names, rule
from backend.rules.common_fixes import DDP, FSDP2, ZERO3
from backend.rules.examples import DEMO, GPT2, LAPTOP, TINY, TWO_H100

FULL = {"method.kind": "full", "train.learning_rate": 1e-5}
OFFLOADED = {"parallel.strategy": "zero2", "parallel.offload_optimizer": "cpu"}
SMALL = replace(DEMO, shape=TINY)  # its two heads can be shared by two
ON_DISK = {"parallel.strategy": "zero3", "parallel.offload_optimizer": "nvme", "parallel.nvme_path": "/nvme"}
SLICED = {**FULL, "parallel.strategy": "tensor", "save.strategy": "no"}
FOUR = {"launch.nproc_per_node": 4}


def _disk(case: Case) -> bool:
    parallel, stage = case.spec.parallel, case.strategy.zero_stage
    weights = stage == 3 and parallel.offload_param == "nvme"
    return weights or (bool(stage) and parallel.offload_optimizer == "nvme")


def _cores(machine: Machine, cores: int) -> Machine:
    return replace(machine, cores=cores)


@rule(
    "STR009",
    "error",
    fields=("parallel.strategy", "launch.device"),
    title="FSDP1 does not run on a CPU",
    source="accelerate 1.15 utils/dataclasses.py: FullyShardedDataParallelPlugin wants an accelerator for version 1",
    fixes=(FSDP2, DDP),
    fails_on=Example({"parallel.strategy": "fsdp1"}),
    passes_on=Example({"parallel.strategy": "fsdp1"}, TWO_H100),
    proof="launch",
)
def first_on_cpu(case: Case) -> str | None:
    """The library starts the first FSDP on accelerators alone. FSDP2 runs on both."""
    return "The run would take the CPU." if case.strategy.fsdp_version == 1 and case.run.device == "cpu" else None


@rule(
    "STR010",
    "warning",
    fields=("parallel.strategy",),
    title="FSDP1 is deprecated",
    source="transformers 5.23 training_args.py: deprecated, to be removed",
    fixes=(FSDP2,),
    fails_on=Example({"parallel.strategy": "fsdp1"}, TWO_H100),
    passes_on=Example({"parallel.strategy": "fsdp2"}, TWO_H100),
)
def first_is_old(case: Case) -> str | None:
    """FSDP2 shards each weight by itself: less memory, exact mixed precision, and checkpoints that fit other numbers of
    devices."""
    return "It is kept for old configurations." if case.strategy.fsdp_version == 1 else None


@rule(
    "STR011",
    "error",
    fields=("parallel.strategy", "launch.nproc_per_node"),
    title="One process has nobody to share weights with",
    source="transformers 5.23 trainer.py: FSDP only works in distributed training",
    fixes=(
        Fix("One process", {"parallel.strategy": "single"}),
        Fix("Two processes", {"launch.nproc_per_node": 2}, cost="a second device"),
    ),
    fails_on=Example({"parallel.strategy": "fsdp2", "launch.nproc_per_node": 1}, TWO_H100),
    passes_on=Example({"parallel.strategy": "fsdp2"}, TWO_H100),
    proof="launch",
)
def alone(case: Case) -> str | None:
    """FSDP and tensor parallel spread a model over processes."""
    return "There is one process." if case.strategy.engine in ("fsdp", "tensor") and case.run.world_size == 1 else None


@rule(
    "STR012",
    "error",
    fields=("parallel.offload_optimizer", "train.optim"),
    title="The CPU's step is AdamW's",
    source="accelerate 1.15 utils/deepspeed.py, map_pytorch_optim_to_deepspeed: any other becomes DeepSpeedCPUAdam",
    fixes=(
        Fix("State on the device", {"parallel.offload_optimizer": "none"}, cost="more memory there"),
        Fix("AdamW", {"train.optim": "adamw"}, safe=False),
    ),
    fails_on=Example({**OFFLOADED, "train.optim": "sgd"}, TWO_H100),
    passes_on=Example(OFFLOADED, TWO_H100),
    proof="launch",
)
def offloaded_optimizer(case: Case) -> str | None:
    """With the optimizer's state away from the device DeepSpeed steps by its own CPU Adam, whatever was asked for."""
    optimizer = registry.OPTIMIZERS[case.spec.train.optim]
    if not case.strategy.zero_stage or case.spec.parallel.offload_optimizer == "none":
        return None
    if optimizer.name in ("adamw_torch", "adamw_torch_fused"):
        return None
    return f"{optimizer.label} would be replaced by Adam, without a word."


@rule(
    "STR013",
    "error",
    fields=("parallel.offload_optimizer", "parallel.strategy"),
    title="Only ZeRO-3 keeps state on a disk",
    source="deepspeed 0.19 runtime/zero/stage_1_and_2.py: the optimizer is offloaded to the CPU alone, and nothing "
    "comes to the disk",
    fixes=(Fix("CPU memory", {"parallel.offload_optimizer": "cpu"}, cost="RAM"), ZERO3),
    fails_on=Example({**ON_DISK, "parallel.strategy": "zero2"}, TWO_H100, replace(DEMO, nvme="")),
    passes_on=Example(ON_DISK, TWO_H100, replace(DEMO, nvme="")),
)
def disk_below_three(case: Case) -> str | None:
    """ZeRO-1 and 2 offload to RAM."""
    return f"{case.strategy.label} was chosen." if _disk(case) and case.strategy.zero_stage < 3 else None


@rule(
    "STR014",
    "error",
    fields=("parallel.nvme_path",),
    title="The NVMe folder cannot be used",
    source="deepspeed 0.19 runtime/swap_tensor: files are made in the folder that is named",
    fixes=(Fix("CPU memory", {"parallel.offload_optimizer": "cpu", "parallel.offload_param": "none"}, cost="RAM"),),
    fails_on=Example({**ON_DISK, "parallel.nvme_path": ""}, TWO_H100, replace(DEMO, nvme="No folder is named.")),
    passes_on=Example(ON_DISK, TWO_H100, replace(DEMO, nvme="")),
    proof="launch",
)
def disk_missing(case: Case) -> str | None:
    """State and weights travel to files in that folder all the time."""
    return case.facts.nvme or None if _disk(case) else None


@rule(
    "STR015",
    "error",
    fields=("parallel.offload_optimizer", "parallel.offload_param"),
    title="libaio is missing",
    source="deepspeed 0.19 ops/op_builder/async_io.py: links libaio, and tries whether it is there",
    fixes=(Fix("CPU memory", {"parallel.offload_optimizer": "cpu", "parallel.offload_param": "none"}, cost="RAM"),),
    manual_fix="On Debian: apt-get install libaio-dev g++ python3-dev.",
    fails_on=Example(ON_DISK, replace(TWO_H100, libaio=False), replace(DEMO, nvme="")),
    passes_on=Example(ON_DISK, TWO_H100, replace(DEMO, nvme="")),
)
def no_libaio(case: Case) -> str | None:
    """DeepSpeed reads and writes the disk through libaio."""
    return "Its headers are not installed." if _disk(case) and not case.machine.libaio else None


@rule(
    "STR016",
    "warning",
    fields=("parallel.nvme_path",),
    title="This folder is not on an NVMe disk",
    source="deepspeed.ai ZeRO-Infinity: made for several GB/s",
    fixes=(Fix("CPU memory", {"parallel.offload_optimizer": "cpu", "parallel.offload_param": "none"}, cost="RAM"),),
    fails_on=Example(ON_DISK, TWO_H100, replace(DEMO, nvme="", nvme_slow="/nvme lies on a turning disk.")),
    passes_on=Example(ON_DISK, TWO_H100, replace(DEMO, nvme="")),
)
def disk_slow(case: Case) -> str | None:
    """Every step reads and writes twelve bytes a trained weight."""
    return case.facts.nvme_slow or None if _disk(case) else None


@rule(
    "STR017",
    "error",
    fields=("parallel.transformer_layer_cls_to_wrap",),
    title="The model has no such layers",
    source="accelerate 1.15 utils/dataclasses.py and fsdp_utils.py: could not find the transformer layer class",
    fixes=(
        Fix("The model's own", {"parallel.transformer_layer_cls_to_wrap": ()}, cost="layers are found by themselves"),
    ),
    fails_on=Example(
        {"parallel.strategy": "fsdp2", "parallel.transformer_layer_cls_to_wrap": ("GPT2Block",)},
        TWO_H100,
        replace(DEMO, classes=("LlamaDecoderLayer", "LlamaMLP")),
    ),
    passes_on=Example(
        {"parallel.strategy": "fsdp2", "parallel.transformer_layer_cls_to_wrap": ("LlamaDecoderLayer",)},
        TWO_H100,
        replace(DEMO, classes=("LlamaDecoderLayer", "LlamaMLP")),
    ),
)
def unknown_layers(case: Case) -> Violation | None:
    """FSDP gathers a model layer by layer, and finds the layers by the names of their classes."""
    known, asked = case.facts.classes, case.spec.parallel.transformer_layer_cls_to_wrap
    missing = [name for name in asked if known and name not in known]
    if case.strategy.engine != "fsdp" or not missing:
        return None
    layers = [name for name in known if name.endswith(("Layer", "Block"))] or list(known)
    fixes = (Fix(layers[0], {"parallel.transformer_layer_cls_to_wrap": (layers[0],)}),) if layers else ()
    return Violation(f"{names(missing)} is not among its classes, such as {names(layers[:4])}.", fixes)


@rule(
    "STR018",
    "error",
    fields=(
        "parallel.replicate_size",
        "parallel.context_parallel_size",
        "parallel.tensor_parallel_size",
        "launch.nproc_per_node",
    ),
    title="The processes do not fill the mesh",
    source="accelerate 1.15 parallelism_config.py, transformers 5.23 distributed: sizes multiply to the world's",
    fixes=(
        Fix(
            "No further dimensions",
            {"parallel.replicate_size": 1, "parallel.context_parallel_size": 1},
            cost="all devices share one copy",
        ),
    ),
    fails_on=Example({**FULL, **FOUR, "parallel.strategy": "fsdp2", "parallel.replicate_size": 3}, _cores(LAPTOP, 4)),
    passes_on=Example({**FULL, **FOUR, "parallel.strategy": "fsdp2", "parallel.replicate_size": 2}, _cores(LAPTOP, 4)),
    proof="launch",
)
def mesh_arithmetic(case: Case) -> Violation | str | None:
    """Replicas, context and slices divide the processes; what remains are shards, at least two under FSDP."""
    parallel, row, count = case.spec.parallel, case.strategy, case.run.world_size
    if row.engine == "tensor":
        if count % parallel.tensor_parallel_size == 0:
            return None
        wanted = max(1, count // parallel.tensor_parallel_size) * parallel.tensor_parallel_size
        message = f"{counted(count, 'process')} cannot form groups of {parallel.tensor_parallel_size}."
        return Violation(message, _as_many(case, wanted))
    whole = parallel.replicate_size * parallel.context_parallel_size
    alone = parallel.replicate_size > 1 and count == whole  # no shard is left beside the replicas
    if row.fsdp_version != 2 or whole == 1 or (count % whole == 0 and not alone):
        return None
    wanted = 2 * whole if count < 2 * whole else count // whole * whole
    message = f"{counted(count, 'process')} for {parallel.replicate_size} replicas x {parallel.context_parallel_size} context."
    return Violation(message, _as_many(case, wanted))


def _as_many(case: Case, wanted: int) -> tuple[Fix, ...]:
    """So many processes on all nodes together, if they can be shared out."""
    each, rest = divmod(wanted, case.run.nnodes)
    return () if rest else (Fix(counted(wanted, "process"), {"launch.nproc_per_node": each}, cost="as many devices"),)


@rule(
    "STR019",
    "error",
    fields=("parallel.strategy", "method.kind"),
    title="Adapters do not fit slices of layers",
    source="seen with peft 0.21 and transformers 5.23: the adapter's shapes are those of the whole layer",
    fixes=(FSDP2, Fix("Full training", FULL, safe=False, cost="much more memory")),
    fails_on=Example({"parallel.strategy": "tensor", "save.strategy": "no"}, TWO_H100, SMALL),
    passes_on=Example(SLICED, TWO_H100, SMALL),
    proof="launch",
)
def adapters_on_slices(case: Case) -> str | None:
    """Tensor parallel loads a slice of every layer; an adapter beside it expects the whole."""
    return "LoRA was chosen." if case.strategy.engine == "tensor" and case.spec.method.kind == "lora" else None


@rule(
    "STR020",
    "error",
    fields=("parallel.strategy", "save.strategy", "save.only_model"),
    title="A run of slices cannot be resumed",
    source="transformers 5.23 trainer.py: resuming is not supported for models sharded at load time",
    fixes=(
        Fix("Weights only", {"save.only_model": True}, cost="cannot be resumed"),
        Fix("No checkpoints", {"save.strategy": "no"}, cost="nothing before the end"),
        FSDP2,
    ),
    fails_on=Example({**SLICED, "save.strategy": "epoch"}, TWO_H100, SMALL),
    passes_on=Example(SLICED, TWO_H100, SMALL),
    proof="launch",
)
def slices_resume(case: Case) -> str | None:
    """The library keeps no optimizer state of a model that was loaded in slices."""
    whole = case.spec.save.strategy != "no" and not case.spec.save.only_model
    return "Whole checkpoints are asked for." if case.strategy.engine == "tensor" and whole else None


@rule(
    "STR021",
    "error",
    fields=("parallel.tensor_parallel_size",),
    title="The heads cannot be shared out",
    source="transformers 5.23 distributed/tensor_parallel.py: a projection is cut evenly, and attention reads whole "
    "heads",
    fixes=(FSDP2,),
    fails_on=Example({**SLICED, **FOUR, "parallel.tensor_parallel_size": 4}, _cores(LAPTOP, 4)),
    passes_on=Example({**SLICED, "parallel.tensor_parallel_size": 3, "launch.nproc_per_node": 3}, _cores(LAPTOP, 3)),
    proof="launch",
)
def heads_in_slices(case: Case) -> str | None:
    """A layer is sliced between its attention heads."""
    shape, size = case.shape, case.spec.parallel.tensor_parallel_size
    if case.strategy.engine != "tensor" or shape is None or shape.kv_heads % size == 0:
        return None
    return f"{shape.kv_heads} key and value heads, {size} slices."


@rule(
    "STR024",
    "error",
    fields=("save.only_model", "parallel.state_dict_type"),
    title="Weights alone cannot be sharded",
    source="transformers 5.23 trainer.py: save_only_model is not compatible with SHARDED_STATE_DICT",
    fixes=(
        Fix("One file", {"parallel.state_dict_type": "full"}, cost="gathered in RAM"),
        Fix("Whole checkpoints", {"save.only_model": False}, cost="larger on disk"),
    ),
    fails_on=Example(
        {
            "parallel.strategy": "fsdp2",
            "parallel.state_dict_type": "sharded",
            "save.only_model": True,
            "save.strategy": "epoch",
        },
        TWO_H100,
    ),
    passes_on=Example({"parallel.strategy": "fsdp2", "parallel.state_dict_type": "sharded"}, TWO_H100),
    proof="launch",
)
def sharded_weights(case: Case) -> str | None:
    """The library writes sharded checkpoints whole."""
    sharded = case.spec.parallel.state_dict_type == "sharded"
    alone = case.spec.save.strategy != "no" and case.spec.save.only_model
    return "Weights only, sharded." if case.strategy.engine == "fsdp" and sharded and alone else None


@rule(
    "STR025",
    "warning",
    fields=("parallel.extra_config",),
    title="Further keys win over the form",
    source="Footplate lays them over the file that the form makes",
    fixes=(Fix("Drop them", {"parallel.extra_config": ""}),),
    fails_on=Example(
        {"parallel.strategy": "zero2", "parallel.extra_config": '{"zero_optimization": {"overlap_comm": false}}'},
        TWO_H100,
    ),
    passes_on=Example(
        {"parallel.strategy": "zero2", "parallel.extra_config": '{"wall_clock_breakdown": true}'}, TWO_H100
    ),
)
def keys_over_form(case: Case) -> str | None:
    """A value that stands in both is that of the further keys, and what is estimated and checked is the form's."""
    spec, engine = case.spec, case.strategy.engine
    if engine not in ("deepspeed", "fsdp") or not spec.parallel.extra_config:
        return None
    form = case.with_patch({"parallel.extra_config": ""})
    made = case.run.engine.configuration(form)
    over = merge.paths(merge.clashes(merge.parse(spec.parallel.extra_config), made))
    return f"{names(over)} would be another." if over else None


@rule(
    "STR038",
    "error",
    fields=("parallel.strategy", "model.builtin", "model.path", "model.hub_id"),
    title="Nobody has planned how to slice this model",
    source="transformers 5.23 distributed/mixin.py: a model without tp_plan is refused; GPT-2 has none",
    fixes=(FSDP2, DDP),
    fails_on=Example(SLICED, TWO_H100, replace(DEMO, shape=GPT2)),
    passes_on=Example(SLICED, TWO_H100, SMALL),
    proof="launch",
)
def unsliced(case: Case) -> str | None:
    """Which layers are cut by rows and which by columns is written in the library, for each architecture."""
    shape = case.shape
    if case.strategy.engine != "tensor" or shape is None or shape.model_type != "gpt2":
        return None
    return f"There is no plan for {shape.architecture}."
