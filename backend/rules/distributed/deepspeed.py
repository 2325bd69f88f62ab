"""Rules of DeepSpeed: ZeRO stages, the compiler they need, and offload to CPU and NVMe."""

from __future__ import annotations

from dataclasses import replace

from backend import registry
from backend.config.options import effective
from backend.modelspec import trainable_tensors
from backend.rules.base import Case, Example, Fix, advice, error, warning
from backend.rules.common_fixes import ADAMW, DDP, FSDP2, NO_CHECKPOINTS, WEIGHTS_ONLY, ZERO2, ZERO3
from backend.rules.distributed.examples import ZERO2_STRATEGY
from backend.rules.examples import DEMO, EQUIPPED_TWO, LAPTOP, TWO_H100

CPU_OFFLOAD = {**ZERO2_STRATEGY, "parallel.offload_optimizer": "cpu"}
NVME_OFFLOAD = {
    "parallel.strategy": "zero3", "parallel.offload_optimizer": "nvme", "parallel.nvme_path": "/nvme",
    "save.only_model": True,
}  # fmt: skip
ABOUT_AS_MUCH = 1.1  # times the memory per device
STATE_BLOCK = 256  # elements of a block in torchao's 8-bit and 4-bit optimizers, at most
BLOCKWISE = {**ZERO2_STRATEGY, "train.optim": "adamw_torch_8bit"}
ZERO3_DPO = {
    "parallel.strategy": "zero3",
    "launch.nproc_per_node": 2,
    "train.stage": "dpo",
    "data.builtin": "train-pairs",
    "preference.precompute_ref_log_probs": True,
}
NVME_FACTS = replace(DEMO, nvme_problem="")
OPTIMIZER_TO_CPU = Fix(
    "Offload the optimizer to CPU memory", {"parallel.offload_optimizer": "cpu"}, cost="needs host RAM"
)
NO_NVME = Fix(
    "Offload to CPU memory instead",
    {"parallel.offload_optimizer": "cpu", "parallel.offload_param": "none"},
    cost="needs host RAM",
)


@advice(
    "STR006",
    fields=("parallel.strategy",),
    title="ZeRO-1 and ZeRO-2 save almost no memory with LoRA",
    source="arithmetic: the optimizer state of an adapter is small",
    fixes=(DDP,),
    fails_on=Example(ZERO2_STRATEGY, TWO_H100),
    passes_on=Example({**ZERO2_STRATEGY, "method.kind": "full", "train.learning_rate": 1e-5}, TWO_H100),
)
def zero_1_or_2_with_lora(case: Case) -> str | None:
    """ZeRO-1 shards the optimizer state, and ZeRO-2 also shards the gradients; both are small for adapters. The base
    weights stay replicated, so DDP needs about as much memory and is simpler. This does not hold for modules that are
    trained in full, or for adapters on many experts."""
    if case.run.zero_stage not in (1, 2) or case.spec.method.kind != "lora" or case.run.world_size == 1:
        return None
    with_ddp = case.estimated(effective(case.with_patch(DDP.patch)))
    if with_ddp.device_bytes > ABOUT_AS_MUCH * case.estimate.device_bytes:
        return None
    return (
        f"Only LoRA adapters are trained, and {case.strategy.label} does not shard the base weights: "
        "DDP needs about the same memory per device."
    )


@error(
    "STR007",
    fields=("parallel.strategy", "launch.device", "parallel.offload_optimizer"),
    title="DeepSpeed needs a C++ compiler",
    source="deepspeed 0.19 comm/torch.py: build_shm_op, and ops/op_builder/cpu/cpu_adam.py: built on first use",
    fixes=(DDP,),
    manual_fix="On Debian and Ubuntu: apt-get install g++ python3-dev.",
    fails_on=Example(ZERO2_STRATEGY, replace(LAPTOP, has_cpp_compiler=False)),
    passes_on=Example(ZERO2_STRATEGY),
)
def deepspeed_without_compiler(case: Case) -> str | None:
    """On a CPU, DeepSpeed compiles its shared-memory collectives on first use, which takes a minute or two. For an
    offloaded optimizer it compiles CPU Adam, on machines with GPUs too."""
    if case.machine.has_cpp_compiler or not case.run.engine.compiles_kernels(case.spec, case.run.device):
        return None
    kernel = "its collectives" if case.run.device == "cpu" else "CPU Adam for the offloaded optimizer"
    return (
        f"{case.strategy.label} compiles {kernel} on first use, but this machine has no C++ compiler (c++) or no "
        "Python headers."
    )


@error(
    "STR012",
    fields=("parallel.offload_optimizer", "train.optim"),
    title="DeepSpeed replaces an offloaded optimizer with CPU Adam",
    source="accelerate 1.15 utils/deepspeed.py, map_pytorch_optim_to_deepspeed: any other optimizer becomes "
    "DeepSpeedCPUAdam",
    fixes=(
        Fix(
            "Keep the optimizer state on the device",
            {"parallel.offload_optimizer": "none"},
            cost="more memory on each device",
        ),
        Fix("Use AdamW", {"train.optim": "adamw_torch"}, safe=False),
    ),
    fails_on=Example({**CPU_OFFLOAD, "train.optim": "sgd"}, TWO_H100),
    passes_on=Example(CPU_OFFLOAD, TWO_H100),
)
def offloaded_optimizer_replaced_by_cpu_adam(case: Case) -> str | None:
    """With offload_optimizer, DeepSpeed steps with DeepSpeedCPUAdam, whatever optimizer is set."""
    optimizer = case.optimizer
    if not case.run.zero_stage or case.run.optimizer_offload == "none":
        return None
    if optimizer.trainer_optim in ("adamw_torch", "adamw_torch_fused"):
        return None
    return (
        f"parallel.offload_optimizer is {case.run.optimizer_offload}, so DeepSpeed would silently replace "
        f"{optimizer.label} with its CPU Adam."
    )


def _uses_nvme(case: Case) -> bool:
    return "nvme" in (case.run.optimizer_offload, case.run.param_offload)


@error(
    "STR013",
    fields=("parallel.offload_optimizer", "parallel.strategy"),
    title="NVMe offload requires ZeRO-3",
    source="deepspeed 0.19 runtime/zero/stage_1_and_2.py: the optimizer is offloaded to the CPU only; verified: no "
    "file appears in the NVMe folder",
    fixes=(OPTIMIZER_TO_CPU, ZERO3),
    fails_on=Example({**NVME_OFFLOAD, "parallel.strategy": "zero2"}, TWO_H100, NVME_FACTS),
    passes_on=Example(NVME_OFFLOAD, TWO_H100, NVME_FACTS),
)
def nvme_offload_without_zero3(case: Case) -> str | None:
    """ZeRO-1 and ZeRO-2 offload the optimizer state to CPU memory only and write nothing to the disk."""
    if not _uses_nvme(case) or case.run.zero_stage == 3:
        return None
    return f"parallel.offload_optimizer is nvme, but {case.strategy.label} would keep the optimizer state in host RAM."


@error(
    "STR014",
    fields=("parallel.nvme_path",),
    title="The NVMe folder cannot be used",
    source="deepspeed 0.19 runtime/swap_tensor: creates its swap files in this folder",
    fixes=(NO_NVME,),
    fails_on=Example(
        {**NVME_OFFLOAD, "parallel.nvme_path": ""},
        TWO_H100,
        replace(DEMO, nvme_problem="parallel.nvme_path is empty: set a folder on a local NVMe disk."),
    ),
    passes_on=Example(NVME_OFFLOAD, TWO_H100, NVME_FACTS),
    proof="launch",
)
def unusable_nvme_folder(case: Case) -> str | None:
    """DeepSpeed swaps optimizer state and parameters to files in this folder at every step."""
    return case.facts.nvme_problem or None if _uses_nvme(case) else None


@error(
    "STR015",
    fields=("parallel.offload_optimizer", "parallel.offload_param"),
    title="libaio is not installed",
    source="deepspeed 0.19 ops/op_builder/async_io.py: links libaio, and checks that it is installed",
    fixes=(NO_NVME,),
    manual_fix="On Debian and Ubuntu: apt-get install libaio-dev g++ python3-dev.",
    fails_on=Example(NVME_OFFLOAD, replace(TWO_H100, has_libaio=False), NVME_FACTS),
    passes_on=Example(NVME_OFFLOAD, TWO_H100, NVME_FACTS),
)
def missing_libaio(case: Case) -> str | None:
    """DeepSpeed compiles its NVMe I/O against libaio, the Linux library for asynchronous disk I/O."""
    if case.machine.has_libaio or not _uses_nvme(case):
        return None
    return "NVMe offload reads and writes the disk through libaio, whose headers are not installed on this machine."


@warning(
    "STR016",
    fields=("parallel.nvme_path",),
    title="The NVMe folder is not on a fast local disk",
    source="deepspeed.ai ZeRO-Infinity: designed for a disk bandwidth of several GB/s",
    fixes=(NO_NVME,),
    fails_on=Example(
        NVME_OFFLOAD,
        TWO_H100,
        replace(DEMO, nvme_problem="", nvme_slow_reason="/nvme is on a hard disk, not on an SSD."),
    ),
    passes_on=Example(NVME_OFFLOAD, TWO_H100, NVME_FACTS),
)
def slow_nvme_folder(case: Case) -> str | None:
    """Every optimizer step reads and writes 12 bytes per trainable parameter: the fp32 weight and AdamW's two
    moments."""
    if not case.facts.nvme_slow_reason or not _uses_nvme(case):
        return None
    return f"{case.facts.nvme_slow_reason} Every optimizer step would wait for this disk."


@error(
    "STR058",
    fields=("parallel.offload_optimizer", "save.strategy", "save.only_model"),
    title="A run with its optimizer on NVMe cannot be resumed",
    source="verified with deepspeed 0.19: stage3.py, _rigid_load_state_dict, purges the state on NVMe; weights of "
    "groups below 1 MiB are not restored either, and the losses after a resume differ",
    fixes=(WEIGHTS_ONLY, OPTIMIZER_TO_CPU, NO_CHECKPOINTS),
    fails_on=Example({**NVME_OFFLOAD, "save.only_model": False}, TWO_H100, NVME_FACTS),
    passes_on=Example(NVME_OFFLOAD, TWO_H100, NVME_FACTS),
)
def nvme_optimizer_resume(case: Case) -> str | None:
    """DeepSpeed copies the optimizer state from NVMe into the checkpoint, but does not use it when it loads the
    checkpoint: the moments start at zero again, and the weights of small groups, such as adapters and norms, are those
    from before the training."""
    save = case.spec.save
    if case.run.zero_stage != 3 or case.run.optimizer_offload != "nvme" or not save.can_resume:
        return None
    return f"save.strategy is {save.strategy} with optimizer state, which DeepSpeed would not restore from NVMe."


@error(
    "STR050",
    fields=("parallel.strategy",),
    title="transformers cannot load this architecture under ZeRO-3",
    source="transformers 5.23: _init_weights of BLT, RWKV and Youtu reads shapes or rows of parameters that ZeRO-3 has "
    "already sharded; verified with transformers 5.23 and deepspeed 0.19",
    fixes=(FSDP2, ZERO2),
    fails_on=Example({"parallel.strategy": "zero3"}, TWO_H100, replace(DEMO, model_type="youtu")),
    passes_on=Example(
        {"parallel.strategy": "zero3", "method.quantization": "nf4"}, TWO_H100, replace(DEMO, model_type="youtu")
    ),
)
def unloadable_under_zero3(case: Case) -> str | None:
    """With ZeRO-3, parameters are sharded while the model is built. The initialization of this architecture needs their
    full shapes. Quantized models are loaded before they are sharded."""
    kinds = case.model_types & registry.NO_ZERO3
    if case.run.zero_stage != 3 or not kinds or case.spec.method.quantization != "none":
        return None
    return f"The strategy is {case.strategy.label}, and the model type is {kinds.pop()}."


@error(
    "STR051",
    fields=(
        "preference.precompute_ref_log_probs",
        "parallel.strategy",
        "train.activation_checkpointing",
        "method.kind",
    ),
    title="Precomputed reference log-probabilities fail with activation checkpointing under ZeRO-3",
    source="verified with trl 1.16 and deepspeed 0.19: torch.utils.checkpoint.CheckpointError at the first step",
    fixes=(Fix("Compute them at each step", {"preference.precompute_ref_log_probs": False}, cost="slower steps"),),
    fails_on=Example({**ZERO3_DPO, "train.activation_checkpointing": True}, EQUIPPED_TWO),
    passes_on=Example(ZERO3_DPO, EQUIPPED_TWO),
    proof="launch",
)
def precomputed_reference_with_activation_checkpointing(case: Case) -> str | None:
    """To precompute the log-probabilities of the reference, TRL wraps the model in a separate DeepSpeed engine before
    training. During training, ZeRO-3 then gathers frozen parameters at other times when activations are recomputed, and
    the first step fails."""
    spec = case.spec
    if not registry.STAGES[case.spec.train.stage].uses_reference_model or not spec.preference.precompute_ref_log_probs:
        return None
    if case.run.zero_stage < 3 or spec.method.kind == "full" or not spec.train.activation_checkpointing:
        return None
    method = registry.METHODS[spec.method.kind].label
    return f"Precomputed reference log-probabilities, {method}, ZeRO-3 and activation checkpointing fail together."


@error(
    "STR052",
    fields=("train.optim", "parallel.strategy"),
    title="This optimizer's quantization blocks do not match DeepSpeed's flat parameter buffers",
    source="deepspeed 0.19 utils/tensor_fragment.py, set_optim_state_fragment; torchao 0.18 optim/subclass_4bit.py and "
    "subclass_8bit.py: each shard must start and end at a block boundary",
    fixes=(DDP, ADAMW),
    fails_on=Example({**BLOCKWISE, "lora.r": 3}, EQUIPPED_TWO),
    passes_on=Example({**BLOCKWISE, "lora.r": 16}, EQUIPPED_TWO),
)
def blockwise_state_in_fragments(case: Case) -> str | None:
    """torchao's 8-bit and 4-bit AdamW quantize their state in blocks. With ZeRO-0 to 2, DeepSpeed flattens many
    parameters into one buffer, with one state tensor. The first step fails if the state of a parameter does not begin
    at a block boundary. If the buffer is not a multiple of the block size, its state silently stays in fp32."""
    row, shape = case.optimizer, case.shape
    blockwise = row.compiled and row.bits < 32
    if not blockwise or shape is None or case.strategy.engine != "deepspeed" or case.run.zero_stage == 3:
        return None
    matrices = [leaf for leaf in trainable_tensors(case.spec.method, case.spec.lora, shape) if leaf.out_features]
    found = next((leaf for leaf in matrices if leaf.parameters % STATE_BLOCK), None)
    if found is None:
        return None
    needed = f"{row.label} with DeepSpeed needs a multiple of {STATE_BLOCK}"
    return f"{found.path} has {found.parameters:,} elements, but {needed}."
