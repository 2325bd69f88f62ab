"""Rules about optimizers: which strategies, methods and precisions they support, and settings that defeat their
purpose. The rules read the registry row of the optimizer, and do not compare names.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

from backend import registry, wording
from backend.memory.optimizer_state import OptimizerState
from backend.modelspec import lora_modules
from backend.rules.base import Case, Example, Fix, Violation, advice, error, set_to, warning
from backend.rules.common_fixes import ADAMW, BF16, DDP, SINGLE_PROCESS
from backend.rules.examples import EQUIPPED, EQUIPPED_H100, EQUIPPED_TWO, LAPTOP, full_spec
from backend.rules.method import METHOD_NAMES
from backend.rules.requirements import missing_package, unsupported_device
from backend.wording import counted

FSDP2_OVER_4 = {
    "parallel.strategy": "fsdp2", "launch.nproc_per_node": 4, "parallel.state_dict_type": "sharded"
}  # fmt: skip
FULL_TRAINING = Fix("Use full fine-tuning", {"method.kind": "full"}, safe=False, cost="much more memory")
ALL_LINEAR = Fix("Project all linear layers", {"train.optim_targets": "all-linear"}, safe=False)
LION_MAX_RATES = {"lora": 1e-4, "freeze": 1e-5, "full": 1e-5}  # the highest usual rate for each method
# Paged optimizers that run on other devices than CUDA, and the same without paging.
UNPAGED = {
    "paged_adamw_32bit": "adamw_torch",
    "paged_adamw_8bit": "adamw_bnb_8bit",
    "paged_lion_32bit": "lion_32bit",
    "paged_lion_8bit": "lion_8bit",
}
SGD_MIN_RATE, SGD_RATE = 1e-3, 0.05
MAX_REPEATS = 3  # repetitions in a regular expression: each multiplies the time by the length of a module name
MAX_COMPARISONS = 300_000  # comparisons of targets with module names


# --- Strategies and processes ---


@error(
    "OPT003",
    fields=("train.optim", "parallel.strategy"),
    title="The strategy flattens parameters, and this optimizer needs matrices",
    source="verified with deepspeed 0.19, galore-torch 1.0 and apollo-torch 1.0: IndexError in the projector at the "
    "first step; torch 2.13 _muon.py refuses vectors, and fsdp/_flat_param.py flattens",
    fixes=(DDP, ADAMW),
    fails_on=Example(full_spec("galore_adamw", parallel__strategy="zero2", launch__nproc_per_node=1), EQUIPPED_TWO),
    passes_on=Example(full_spec("galore_adamw", parallel__strategy="ddp"), EQUIPPED_TWO),
    proof="launch",
)
def optimizer_needs_matrices(case: Case) -> str | None:
    """DeepSpeed and FSDP1 concatenate parameters into flat 1-D tensors. Optimizers that use the rows and columns, heads
    or layers of a weight matrix cannot work on those."""
    row = case.optimizer
    if not case.run.engine.flattens_parameters or not row.state_layout or row.state_layout == "one_block":
        return None
    return f"{row.label} needs 2-D weight matrices; {case.strategy.label} gives the optimizer flat 1-D tensors."


@error(
    "OPT004",
    fields=("train.optim", "parallel.strategy"),
    title="This optimizer supports a single process only",
    source="transformers 5.23 trainer_optimizer.py: layer-wise does not support DDP; accelerate 1.15: DeepSpeed's "
    "backward() does not take LOMO's learning rate; badam 1.4 switches requires_grad, which DDP does not follow",
    fixes=(SINGLE_PROCESS, ADAMW),
    fails_on=Example(full_spec("lomo", parallel__strategy="zero2", launch__nproc_per_node=1), EQUIPPED_TWO),
    passes_on=Example(full_spec("galore_adamw_layerwise"), EQUIPPED_TWO),
    proof="launch",
)
def optimizer_needs_single_process(case: Case) -> str | None:
    """Layer-wise optimizers and LOMO update each weight in the backward pass, before gradients are averaged over the
    processes, so the replicas would diverge. BAdam changes which layers are trainable, which DDP, FSDP and DeepSpeed
    determine once at the start."""
    row, engine = case.optimizer, case.strategy.engine
    if not engine or not (row.steps_in_backward or row.state_layout == "one_block"):
        return None
    if engine == "ddp" and case.run.world_size == 1:
        return None
    many = counted(case.run.world_size, "process")
    return (
        f"{row.label} works only in a single process without DDP, FSDP or DeepSpeed; "
        f"this run uses {case.strategy.label} with {many}."
    )


@error(
    "OPT025",
    fields=("train.optim", "lora.r", "launch.nproc_per_node"),
    title="A weight matrix has fewer rows than there are FSDP2 shards",
    source="verified with torch 2.13 on two and four processes under FSDP2: the steps of Muon and GaLore fail on "
    "matrices with fewer rows than processes",
    fixes=(DDP, ADAMW),
    fails_on=Example({"train.optim": "muon", "lora.r": 3, **FSDP2_OVER_4}, EQUIPPED),
    passes_on=Example({"train.optim": "muon", "lora.r": 4, **FSDP2_OVER_4}, EQUIPPED),
    proof="launch",
)
def matrix_rows_fewer_than_shards(case: Case) -> str | None:
    """FSDP2 shards matrices by rows. A device without a row of a matrix cannot take part in the collective operations
    of Muon's and the projecting optimizers' steps. A LoRA A matrix has as many rows as its rank, and the head of a
    reward model has one row."""
    if case.optimizer.state_layout not in ("matrix_momentum", "low_rank") or case.run.fsdp_version != 2:
        return None
    if case.shape is None:
        return None
    shards, state = case.run.parameter_shards, OptimizerState(case.spec, case.shape)
    rows = min((leaf.out_features for leaf in state.tensors if state.updates_as_matrix(leaf)), default=shards)
    if rows >= shards:
        return None
    label = case.optimizer.label
    return f"{label} updates a matrix with {counted(rows, 'row')}, which FSDP2 would shard over {shards:,} devices."


@error(
    "OPT026",
    fields=("train.optim", "launch.nproc_per_node"),
    title="Adam-mini cannot divide the attention heads over the FSDP2 shards",
    source="verified with adam-mini 1.1 and torch 2.13 under FSDP2: Cannot unflatten unevenly sharded tensor",
    fixes=(DDP, ADAMW),
    fails_on=Example({**full_spec("adam_mini"), **FSDP2_OVER_4}, EQUIPPED),
    passes_on=Example({**full_spec("adam_mini"), **FSDP2_OVER_4, "launch.nproc_per_node": 3}, EQUIPPED),
    proof="launch",
)
def adam_mini_heads_not_divisible(case: Case) -> str | None:
    """Adam-mini splits the query and key weights by attention head, and FSDP2 has already sharded them by rows. Every
    device must hold the same number of whole heads."""
    if case.optimizer.state_layout != "per_head" or case.run.fsdp_version != 2 or case.shape is None:
        return None
    shards, heads, kv_heads = case.run.parameter_shards, case.shape.heads, case.shape.kv_heads
    if heads % shards == 0 and kv_heads % shards == 0:
        return None
    return f"{heads} attention heads and {kv_heads} KV heads cannot be split evenly over {shards:,} devices."


@error(
    "OPT020",
    fields=("train.optim", "parallel.strategy"),
    title="The optimizer does not support sharded parameters (DTensor)",
    source="verified with torch 2.13 on two processes: bitsandbytes 0.50 has no sharding strategy, transformers 5.23 "
    "Adafactor mixes DTensors and plain tensors, apollo-torch 1.0 loses its random seeds, torchao 0.18 loses its "
    "shapes with 4-bit state or in pure bf16; AdamW, torchao's 8-bit AdamW, GaLore, Muon and others work",
    fixes=(DDP, ADAMW),
    fails_on=Example(full_spec("adamw_bnb_8bit", parallel__strategy="fsdp2"), EQUIPPED_TWO),
    passes_on=Example(
        full_spec("adamw_torch_8bit", parallel__strategy="fsdp2", parallel__state_dict_type="sharded"), EQUIPPED_TWO
    ),
    proof="launch",
)
def optimizer_without_dtensor_support(case: Case) -> str | None:
    """FSDP2 turns every parameter into a DTensor, and tensor parallelism does so in the layers that it shards. Some
    optimizers combine DTensors with plain tensors in their step, which torch refuses."""
    row = case.optimizer
    if not case.run.engine.uses_dtensor or not row.needs_plain_tensors(case.run.fp32_master_weights):
        return None
    precision = registry.PRECISIONS[case.spec.precision.compute].label
    condition = "" if row.needs_plain_tensors(True) else f" with the precision {precision}"
    return f"{row.label} fails on DTensor parameters{condition}, which {case.strategy.label} uses."


@error(
    "OPT021",
    fields=("train.optim", "parallel.strategy"),
    title="DeepSpeed supports Adagrad with a single parameter group only",
    source="deepspeed 0.19 stage_1_and_2.py and stage3.py, initialize_optimizer_states: torch.optim.Adagrad(all parts)",
    fixes=(DDP, ADAMW),
    fails_on=Example(full_spec("adagrad", parallel__strategy="zero2"), EQUIPPED_TWO),
    passes_on=Example({"train.optim": "adagrad", "parallel.strategy": "zero2"}, EQUIPPED_TWO),
    proof="launch",
)
def adagrad_param_groups_on_deepspeed(case: Case) -> str | None:
    """DeepSpeed creates Adagrad again over all parameters and drops its parameter groups; the first step fails if there
    was more than one. Norms and biases are a group without weight decay, and LoRA+ adds more groups."""
    row = case.optimizer
    if not row.allocates_state_at_init or case.run.zero_stage == 0 or not case.spec.has_param_groups:
        return None
    return f"{case.strategy.label} recreates {row.label} with one parameter group, and this run needs several."


@error(
    "OPT022",
    fields=("train.optim", "parallel.strategy"),
    title="Schedule-free optimizers do not work with DeepSpeed",
    source="deepspeed 0.19 runtime/zero: its optimizers have no train() or eval(), so schedulefree 1.4 is not called: "
    "evaluation uses the training weights, or a step fails because the optimizer is not in train mode",
    fixes=(DDP, ADAMW),
    fails_on=Example(full_spec("schedule_free_adamw", parallel__strategy="zero2"), EQUIPPED_TWO),
    passes_on=Example(full_spec("schedule_free_adamw", parallel__strategy="ddp"), EQUIPPED_TWO),
)
def schedule_free_on_deepspeed(case: Case) -> str | None:
    """A schedule-free optimizer trains one set of weights and evaluates their average; optimizer.train() and eval()
    switch between them. DeepSpeed wraps the optimizer and does not forward these calls."""
    row = case.optimizer
    if not row.swaps_weights_for_eval or case.strategy.engine != "deepspeed":
        return None
    return f"{case.strategy.label} does not forward optimizer.train() and optimizer.eval(), which {row.label} needs."


@warning(
    "OPT015",
    fields=("train.optim", "parallel.strategy"),
    title="DeepSpeed removes Adafactor's memory savings",
    source="transformers 5.23 optimization.py: factors matrices only; deepspeed 0.19 gives it flat tensors",
    fixes=(DDP, ADAMW),
    fails_on=Example(full_spec("adafactor", parallel__strategy="zero2"), EQUIPPED_TWO),
    passes_on=Example(full_spec("adafactor", parallel__strategy="ddp"), EQUIPPED_TWO),
)
def adafactor_unfactored_on_deepspeed(case: Case) -> str | None:
    """Adafactor stores one value per row and per column of a matrix instead of a full second moment. DeepSpeed gives
    the optimizer flat 1-D tensors, for which Adafactor keeps a full second moment."""
    row = case.optimizer
    if not row.factored or row.state_layout or case.strategy.engine != "deepspeed":
        return None
    return f"Under {case.strategy.label}, {row.label} keeps 4 bytes of state for every trainable parameter."


@warning(
    "OPT032",
    fields=("train.optim", "parallel.strategy"),
    title="The strategy changes what this optimizer computes",
    source="torch-optimi 0.3 stableadamw.py, grokadamw 0.1 grokadamw.py, transformers 5.23 optimization.py; deepspeed "
    "0.19 and torch 2.13 fsdp/_flat_param.py flatten parameters",
    fixes=(DDP, ADAMW),
    fails_on=Example(full_spec("grokadamw", parallel__strategy="zero2"), EQUIPPED_TWO),
    passes_on=Example(full_spec("grokadamw", parallel__strategy="ddp"), EQUIPPED_TWO),
)
def optimizer_computes_per_parameter(case: Case) -> str | None:
    """DeepSpeed concatenates parameters into flat tensors, and FSDP1 gives the optimizer only the part of a parameter
    that is on its device. An optimizer that computes something for each parameter computes it for these tensors: the
    run succeeds, but its losses differ from those with DDP or FSDP2."""
    row = case.optimizer
    if not row.per_tensor or not case.run.engine.flattens_parameters:
        return None
    return f"{row.label} {row.per_tensor}. {case.strategy.label} does not give it whole parameters."


# --- Accumulation, precision, devices, resuming ---


@error(
    "OPT005",
    fields=("train.gradient_accumulation_steps", "train.optim"),
    title="This optimizer does not support gradient accumulation",
    source="transformers 5.23 trainer_optimizer.py: layer-wise optimizers do not support gradient accumulation; "
    "lomo-optim 0.1.1 lomo.py: every backward pass changes the weights",
    fails_on=Example(full_spec("galore_adamw_layerwise", train__gradient_accumulation_steps=4), EQUIPPED),
    passes_on=Example(full_spec("galore_adamw_layerwise", train__per_device_train_batch_size=16), EQUIPPED),
)
def gradient_accumulation_with_step_in_backward(case: Case) -> Violation | None:
    """The optimizer updates the weights during every backward pass and frees the gradients immediately. Several
    micro-batches would become several small optimizer steps instead of one."""
    train, row = case.spec.train, case.optimizer
    if not row.steps_in_backward or train.gradient_accumulation_steps == 1:
        return None
    size = train.per_device_train_batch_size * train.gradient_accumulation_steps
    fixes = (
        Fix(
            f"Set the batch size to {size} and accumulation to 1",
            {"train.gradient_accumulation_steps": 1, "train.per_device_train_batch_size": size},
            safe=not case.spec.compares_examples,
            cost="more activation memory",
        ),
        Fix(
            "Set gradient accumulation to 1",
            {"train.gradient_accumulation_steps": 1},
            safe=False,
            cost="smaller global batch size",
        ),
    )
    steps = train.gradient_accumulation_steps
    return Violation(
        f"{row.label} updates the weights in every backward pass; gradient_accumulation_steps is {steps}.", fixes
    )


@error(
    "OPT006",
    fields=("precision.compute", "train.optim"),
    title="This optimizer does not support fp16 loss scaling",
    source="accelerate 1.15 accelerator.py: gradients are unscaled after the backward pass; torch 2.13 "
    "amp/grad_scaler.py: the initial scale is 2**16",
    fixes=(BF16, ADAMW),
    fails_on=Example(full_spec("lomo", precision__compute="fp16"), EQUIPPED_H100),
    passes_on=Example(full_spec("lomo", precision__compute="bf16"), EQUIPPED_H100),
)
def fp16_with_step_in_backward(case: Case) -> str | None:
    """In fp16, the loss is multiplied by a scale (65,536 at first), and the gradients are divided by it after the
    backward pass. This optimizer has already stepped by then, with gradients that are too large by that factor."""
    row = case.optimizer
    if not row.steps_in_backward or case.run.compute_dtype != "fp16":
        return None
    return f"{row.label} steps during the backward pass, before fp16 gradients are unscaled."


@warning(
    "OPT011",
    fields=("train.optim", "launch.device"),
    title="Paged optimizers need an NVIDIA GPU",
    source="bitsandbytes 0.50 optim/optimizer.py: without a GPU, its state is in ordinary memory",
    fails_on=Example({"train.optim": "paged_adamw_32bit"}, EQUIPPED),
    passes_on=Example({"train.optim": "paged_adamw_32bit"}, EQUIPPED_H100),
)
def paged_optimizer_without_cuda(case: Case) -> Violation | None:
    """Paging moves optimizer state between GPU memory and CPU memory. On other devices the state is in ordinary memory,
    and the paged variant has no effect."""
    row = case.optimizer
    if not row.paged or case.run.device == "cuda" or row.devices:
        return None
    name = UNPAGED[case.spec.train.optim]
    device, unpaged = registry.DEVICES[case.run.device].label, registry.OPTIMIZERS[name].label
    fix = Fix(f"Use {unpaged}", {"train.optim": name})
    message = f"{row.label} can page its state to CPU memory on NVIDIA GPUs only; this run uses {device}."
    return Violation(message, (fix,))


@advice(
    "OPT017",
    fields=("train.optim", "precision.compute"),
    title="BAdam does not need fp32 master weights",
    source="badam 1.4 block_optim.py: the active block is copied to fp32, and fp32 weights cause a warning",
    fixes=(Fix("Use pure bf16", {"precision.compute": "pure_bf16"}, safe=False, cost="weights are rounded to bf16"),),
    fails_on=Example(full_spec("badam"), EQUIPPED_H100),
    passes_on=Example(full_spec("badam", precision__compute="pure_bf16"), EQUIPPED_H100),
)
def badam_with_fp32_master_weights(case: Case) -> str | None:
    """BAdam keeps an fp32 copy of the block that it trains, so the model can be in bf16 without losing small updates.
    That halves the memory of the weights."""
    row = case.optimizer
    if row.state_layout != "one_block" or not case.run.fp32_master_weights or case.run.compute_dtype != "bf16":
        return None
    return f"{row.label} keeps its own fp32 copy of the active block, and this run holds all weights in fp32 as well."


@error(
    "OPT019",
    fields=("train.optim",),
    title="The optimizer needs a C++ compiler",
    source="torchao 0.18 optim/adam.py: torch.compile at the first step, which generates C++ on a CPU",
    manual_fix="On Debian or Ubuntu: apt-get install g++ python3-dev.",
    fixes=(ADAMW,),
    fails_on=Example({"train.optim": "adamw_torch_8bit"}, replace(EQUIPPED, has_cpp_compiler=False)),
    passes_on=Example({"train.optim": "adamw_torch_8bit"}, EQUIPPED),
)
def optimizer_without_cpp_compiler(case: Case) -> str | None:
    """The optimizers of torchao are compiled with torch.compile at the first step. For tensors in CPU memory that
    generates C++, which needs a compiler and Python's headers."""
    row = case.optimizer
    on_cpu = case.run.device == "cpu" or (case.strategy.engine == "fsdp" and case.spec.parallel.cpu_offload)
    if not row.compiled or not on_cpu or case.machine.has_cpp_compiler:
        return None
    return f"{row.label} compiles its step to C++, and this machine has no C++ compiler or no Python headers."


# --- Methods ---


@error(
    "OPT007",
    fields=("method.kind", "train.optim"),
    title="Adam-mini does not support LoRA",
    source="verified with adam-mini 1.1.1 and peft 0.21: the two matrices of an adapter do not divide into heads",
    fixes=(ADAMW, FULL_TRAINING),
    fails_on=Example({"train.optim": "adam_mini"}, EQUIPPED),
    passes_on=Example(full_spec("adam_mini"), EQUIPPED),
    proof="launch",
)
def adam_mini_with_lora(case: Case) -> str | None:
    """Adam-mini keeps one second moment per attention head, and splits the query and key weights by the head dimension.
    The low-rank matrices of an adapter cannot be split that way."""
    row = case.optimizer
    if case.spec.method.kind != "lora" or row.state_layout != "per_head":
        return None
    return f"{row.label} splits query and key weights by attention head, which fails on LoRA's low-rank matrices."


@warning(
    "OPT008",
    fields=("method.kind", "train.optim"),
    title="This optimizer is designed for full fine-tuning, not for LoRA",
    source="GaLore (arXiv 2403.03507), APOLLO (2412.05270), Muon (2502.16982), BAdam (2404.02827): for full training",
    fixes=(ADAMW, FULL_TRAINING),
    fails_on=Example({"train.optim": "galore_adamw"}, EQUIPPED),
    passes_on=Example(full_spec("galore_adamw"), EQUIPPED),
)
def full_training_optimizer_with_lora(case: Case) -> str | None:
    """Adapters are already low-rank and their optimizer state is small. Projecting adapters or training them block by
    block saves almost nothing and trains worse; Muon orthogonalizes the two factors instead of their product."""
    row = case.optimizer
    if case.spec.method.kind != "lora" or row.state_layout not in ("low_rank", "matrix_momentum", "one_block"):
        return None
    return f"{row.label} is designed for full weight matrices, and this run trains LoRA adapters."


# --- Projection (GaLore, APOLLO) ---


@error(
    "OPT009",
    fields=("train.optim_target_modules",),
    title="No modules are listed for the projection",
    source="transformers 5.23 trainer_optimizer.py: no target modules found",
    fixes=(ALL_LINEAR,),
    fails_on=Example(full_spec("galore_adamw", train__optim_targets="custom"), EQUIPPED),
    passes_on=Example(
        full_spec("galore_adamw", train__optim_targets="custom", train__optim_target_modules=("mlp",)), EQUIPPED
    ),
    proof="launch",
)
def projection_targets_missing(case: Case) -> str | None:
    """GaLore and APOLLO project the gradients of the listed modules, and raise an error if the list is empty."""
    train, row = case.spec.train, case.optimizer
    if row.state_layout != "low_rank" or train.optim_targets != "custom" or train.optim_target_modules:
        return None
    return f"{row.label} is set to custom target modules, and train.optim_target_modules is empty."


@error(
    "OPT023",
    fields=("train.optim_targets", "train.optim_target_modules"),
    title="No linear layer matches the projection targets",
    source="transformers 5.23 trainer_optimizer.py: No target modules found; only nn.Linear layers are projected",
    fixes=(ADAMW,),
    fails_on=Example(
        full_spec("galore_adamw", train__optim_targets="custom", train__optim_target_modules=("foo",)), EQUIPPED
    ),
    passes_on=Example(
        full_spec("galore_adamw", train__optim_targets="custom", train__optim_target_modules=("mlp",)), EQUIPPED
    ),
    proof="launch",
)
def projection_targets_not_found(case: Case) -> Violation | None:
    """GaLore and APOLLO project nn.Linear layers whose names contain a target or match it as a regular expression.
    The blocks of OpenAI GPT and GPT-2 have no nn.Linear layers: they use Conv1D."""
    train, shape, row = case.spec.train, case.shape, case.optimizer
    unlisted = train.optim_targets == "custom" and not train.optim_target_modules  # see projection_targets_missing
    if row.state_layout != "low_rank" or shape is None or unlisted:
        return None
    if _projected_layers(case):
        return None
    listed = ", ".join(train.optim_target_modules) if train.optim_targets == "custom" else train.optim_targets
    fixes = () if shape.model_type in registry.CONV1D_MODELS else (ALL_LINEAR,)
    return Violation(f"{row.label} would project {listed}; {shape.architecture} has no such nn.Linear layer.", fixes)


def _projected_layers(case: Case) -> list[str]:
    """The linear layers that match the projection targets."""
    train, shape = case.spec.train, case.shape
    if shape is None:
        return []
    # Layers of GPT and GPT-2 are Conv1D, except for the output layer; a tied output layer is part of the embeddings.
    each = train.optim_targets == "custom" and bool(re.search(r"\d", " ".join(train.optim_target_modules)))
    modules = shape.all_modules() if each else shape.modules()
    linear = [leaf.path for leaf in modules if leaf.is_linear and leaf.parameters]
    if case.spec.method.kind == "lora":  # the adapters are nn.Linear, whatever the layer is; the rest is frozen
        linear = [f"{leaf.path}.lora_A" for leaf in lora_modules(case.spec.lora, shape, each)]
    elif shape.model_type in registry.CONV1D_MODELS:
        linear = [path for path in linear if path == shape.head]
    if train.optim_targets == "all-linear":
        return linear
    targets = ("attn", "attention") if train.optim_targets == "attention" else train.optim_target_modules
    if len(targets) * len(linear) > MAX_COMPARISONS:
        return linear  # too many to compare while a form waits: all count as matches
    return [path for path in linear if any(target in path or _matches_regex(target, path) for target in targets)]


def _matches_regex(pattern: str, path: str) -> bool:
    """Whether the pattern matches. One that can take exponential time counts as a match, so it is not reported."""
    try:
        return _can_take_long(pattern) or re.fullmatch(pattern, path) is not None
    except (re.error, RecursionError, OverflowError):
        return False


@lru_cache(maxsize=1024)
def _can_take_long(pattern: str) -> bool:
    """Whether a pattern repeats a group, has more than a few repetitions, or refers to a group. Raises re.error."""
    re.compile(pattern)
    plain = re.sub(r"\\\D|\[(?:\\.|[^\]\\])+\]", "x", pattern)  # without escaped characters and character classes
    repeats = len(re.findall(r"[*+{]", plain))
    return repeats > MAX_REPEATS or bool(re.search(r"\)[*+{]|\\\d|\(\?P=", plain))


@error(
    "OPT024",
    fields=("train.galore_proj_type", "train.projection_rank"),
    title="The projection rank is too high for GaLore's reverse_std",
    source="galore-torch 1.0 galore_projector.py project_back: it infers the projected side from the shape of the "
    "projected gradient, and takes a wide matrix for a tall one",
    fails_on=Example(
        full_spec("galore_adamw", train__galore_proj_type="reverse_std", train__projection_rank=1024), EQUIPPED
    ),
    passes_on=Example(
        full_spec("galore_adamw", train__galore_proj_type="reverse_std", train__projection_rank=128), EQUIPPED
    ),
    proof="launch",
)
def reverse_std_rank_too_high(case: Case) -> Violation | None:
    """The projection type reverse_std projects the longer side of a matrix. If the rank reaches the number of rows of a
    wide matrix, GaLore mistakes its projected gradient for that of a tall matrix, and the first step fails."""
    train, shape = case.spec.train, case.shape
    if "galore_proj_type" not in case.optimizer.reads or train.galore_proj_type != "reverse_std" or shape is None:
        return None
    state = OptimizerState(case.spec, shape)
    wide = [leaf for leaf in state.tensors if leaf.out_features < leaf.in_features and state.is_projected(leaf)]
    rows = min((leaf.out_features for leaf in wide), default=train.projection_rank + 1)
    if train.projection_rank < rows:
        return None
    fixes = [Fix("Use projection type std", {"train.galore_proj_type": "std"}, safe=False, cost="another projection")]
    if rows > 1:  # the head of a reward model has one row, and no rank is below that
        low = max(1, rows // 4)
        fixes.append(Fix(set_to("train.projection_rank", f"{low:,}"), {"train.projection_rank": low}, safe=False))
    rank = f"projection_rank is {train.projection_rank:,}"
    return Violation(f"{rank}, and a projected matrix has only {counted(rows, 'row')}.", tuple(fixes))


# --- Learning rates, clipping, schedules ---


@advice(
    "OPT012",
    fields=("train.learning_rate", "train.optim"),
    title="The learning rate is high for Lion",
    source="Lion (arXiv 2302.06675): a third to a tenth of AdamW's rate",
    fails_on=Example({"train.optim": "lion_32bit"}, EQUIPPED),
    passes_on=Example({"train.optim": "lion_32bit", "train.learning_rate": 5e-5}, EQUIPPED),
)
def lion_learning_rate_too_high(case: Case) -> Violation | None:
    """Lion updates every weight by the full learning rate, whatever the size of its gradient. It needs a third to a
    tenth of AdamW's learning rate."""
    maximum = LION_MAX_RATES[case.spec.method.kind]
    rate, half = case.spec.train.learning_rate, maximum / 2
    if "lion" not in case.spec.train.optim or rate <= maximum:
        return None
    fix = Fix(f"Set the learning rate to {wording.learning_rate(half)}", {"train.learning_rate": half}, safe=False)
    usual = f"for Lion and {METHOD_NAMES[case.spec.method.kind]}, at most {wording.learning_rate(maximum)} is usual"
    return Violation(f"The learning rate is {wording.learning_rate(rate)}; {usual}.", (fix,))


@advice(
    "OPT013",
    fields=("train.learning_rate", "train.optim"),
    title="The learning rate is low for SGD",
    source="SGD steps are not divided by the gradient's size; lomo-optim 0.1.1 lomo.py: 1e-3 by default",
    fails_on=Example({"train.optim": "sgd"}, EQUIPPED),
    passes_on=Example({"train.optim": "sgd", "train.learning_rate": 0.05}, EQUIPPED),
)
def sgd_learning_rate_too_low(case: Case) -> Violation | None:
    """Adam divides each gradient by a running average of its size, and SGD does not. At Adam's learning rates, SGD
    hardly changes the weights."""
    rate, row = case.spec.train.learning_rate, case.optimizer
    if row.is_adaptive or rate >= SGD_MIN_RATE:
        return None
    label = f"Set the learning rate to {wording.learning_rate(SGD_RATE)}"
    fix = Fix(label, {"train.learning_rate": SGD_RATE}, safe=False)
    usual = f"for {row.label}, at least {wording.learning_rate(SGD_MIN_RATE)} is usual"
    return Violation(f"The learning rate is {wording.learning_rate(rate)}; {usual}.", (fix,))


@advice(
    "OPT014",
    fields=("train.max_grad_norm", "train.optim"),
    title="Adafactor already clips its updates",
    source="transformers 5.23 optimization.py, Adafactor: an update is scaled to an RMS of at most 1",
    fixes=(Fix("Turn off gradient clipping", {"train.max_grad_norm": 0.0}, safe=False),),
    fails_on=Example({"train.optim": "adafactor"}),
    passes_on=Example({"train.optim": "adafactor", "train.max_grad_norm": 0.0}),
)
def adafactor_with_gradient_clipping(case: Case) -> str | None:
    """Adafactor limits the RMS of each update to 1. Clipping the gradients beforehand distorts the second-moment
    estimates that it computes from them."""
    norm, row = case.spec.train.max_grad_norm, case.optimizer
    if not row.factored or "max_grad_norm" not in row.reads or not norm:
        return None
    return f"max_grad_norm is {norm:g}, so gradients are clipped before {row.label} scales its own updates."


@warning(
    "OPT018",
    fields=("train.badam_switch_block_every",),
    title="The run ends before BAdam has trained every layer",
    source="arithmetic: trained layers x steps per layer, compared with the steps of the run",
    fails_on=Example(full_spec("badam", train__duration="steps", train__max_steps=100), EQUIPPED),
    passes_on=Example(full_spec("badam", train__duration="steps", train__max_steps=3000), EQUIPPED),
)
def badam_skips_layers(case: Case) -> Violation | None:
    """BAdam trains one layer at a time. A run that ends before BAdam has reached every layer leaves the remaining
    layers unchanged."""
    steps, shape, each = case.run.total_steps, case.shape, case.spec.train.badam_switch_block_every
    if case.optimizer.state_layout != "one_block" or steps is None or shape is None:
        return None
    layers = OptimizerState(case.spec, shape).num_layers
    if steps >= layers * each:
        return None
    fewer = steps // layers
    fixes: tuple[Fix, ...] = ()
    if fewer:
        label = f"Switch layers every {counted(fewer, 'step')}"
        fixes = (Fix(label, {"train.badam_switch_block_every": fewer}, safe=False),)
    trained = f"{counted(layers, 'trained layer')} with {counted(each, 'step')} each"
    needed = f"{trained} {'needs' if layers == 1 else 'need'} {counted(layers * each, 'step')}"
    return Violation(f"{needed}; the run has {counted(steps, 'step')}.", fixes)


GALORE_SPEC = {"method.kind": "full", "train.learning_rate": 2e-5, "train.optim": "galore_adamw"}


# --- What the registry row requires ---


@error(
    "OPT001",
    fields=("train.optim",),
    title="The optimizer's package is not installed",
    source="transformers 5.23 trainer_optimizer.py: ImportError once the model is loaded",
    fixes=(ADAMW,),
    fails_on=Example(GALORE_SPEC, LAPTOP),
    passes_on=Example(GALORE_SPEC, EQUIPPED),
)
def optimizer_package_missing(case: Case) -> str | None:
    """This optimizer is in a separate package. Install exactly the package that is named: similar names on PyPI, such
    as muon, are unrelated projects, and Muon itself is part of torch."""
    return missing_package(case, case.optimizer)


@error(
    "OPT002",
    fields=("train.optim", "launch.device"),
    title="The optimizer does not support this device type",
    source="galore-torch 1.0 adamw8bit.py and lomo-optim 0.1.1 adalomo.py call torch.cuda; bitsandbytes 0.50 on a CPU: "
    "no managed memory for AdEMAMix; torch_npu supports Ascend NPUs only",
    fixes=(ADAMW,),
    fails_on=Example({**GALORE_SPEC, "train.optim": "galore_adamw_8bit"}, EQUIPPED),
    passes_on=Example({**GALORE_SPEC, "train.optim": "galore_adamw_8bit"}, EQUIPPED_H100),
    proof="launch",
)
def optimizer_unsupported_on_device(case: Case) -> str | None:
    """This optimizer's package calls one device type's API directly, and its first step fails on any other device
    type."""
    return unsupported_device(case, case.optimizer)


@warning(
    "OPT010",
    fields=("train.projection_rank",),
    title="The projection rank is as large as the weight matrices",
    source="arithmetic: galore-torch 1.0 galore_projector.py cannot use a rank above the dimensions of the matrix",
    fails_on=Example({**GALORE_SPEC, "train.projection_rank": 1024}, EQUIPPED),
    passes_on=Example({**GALORE_SPEC, "train.projection_rank": 128}, EQUIPPED),
)
def projection_rank_too_high(case: Case) -> Violation | None:
    """GaLore and APOLLO save memory because the projected gradients are smaller than the weight matrices. A projection
    of full rank saves nothing and adds its own memory and time."""
    row, shape = case.optimizer, case.shape
    if row.state_layout != "low_rank" or shape is None or case.spec.train.projection_rank < shape.hidden:
        return None
    rank = max(1, shape.hidden // 4)
    fix = Fix(
        set_to("train.projection_rank", f"{rank:,}"),
        {"train.projection_rank": rank},
        safe=False,
        cost="a quarter of the hidden size",
    )
    return Violation(
        f"train.projection_rank is {case.spec.train.projection_rank:,}; the model's hidden size makes "
        f"{shape.hidden - 1:,} the highest useful rank.",
        (fix,),
    )
