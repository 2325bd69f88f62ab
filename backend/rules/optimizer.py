"""Rules of the optimizers: what they need, what they cannot be combined with, how they are used well.

Floor 3. Imports: below. What a row of the catalogue says is judged here, and no list of names.
"""

from __future__ import annotations

from dataclasses import replace

from backend import registry
from backend.rules.base import Case, Example, Fix, Violation, counted, rule
from backend.rules.common_fixes import ADAMW, BF16, DDP, ONE
from backend.rules.examples import EQUIPPED, EQUIPPED_H100, EQUIPPED_TWO, LAPTOP

FULL = {"method.kind": "full", "train.learning_rate": 2e-5}


def _row(case: Case) -> registry.Optimizer:
    return registry.OPTIMIZERS[case.spec.train.optim]


def _strategy(case: Case) -> registry.Strategy:
    return registry.STRATEGIES[case.spec.parallel.strategy]


def _engine(case: Case) -> str:
    return _strategy(case).engine


def _with(name: str, **more: object) -> dict[str, object]:
    return {**FULL, "train.optim": name, **{key.replace("__", "."): value for key, value in more.items()}}


@rule(
    "OPT001",
    "error",
    fields=("train.optim",),
    title="The optimizer's package is missing",
    source="transformers 5.23 trainer_optimizer.py: ImportError once the model is loaded",
    fixes=(ADAMW,),
    fails_on=Example(_with("galore"), LAPTOP),
    passes_on=Example(_with("galore"), EQUIPPED),
)
def missing_optimizer(case: Case) -> str | None:
    """Most special optimizers are packages of their own. Take the name that is said: `muon` on PyPI, for one, is about
    cells and no optimizer; Muon comes with torch."""
    package = _row(case).package
    if not package or not case.machine.versions or package in case.machine.versions:
        return None
    return f"{_row(case).label} needs the package {package}: pip install {package}."


@rule(
    "OPT002",
    "error",
    fields=("train.optim", "launch.device"),
    title="The optimizer does not run on this device",
    source="galore-torch 1.0 adamw8bit.py and lomo-optim 0.1.1 adalomo.py call torch.cuda; bitsandbytes 0.50 on a CPU: "
    "no managed memory for AdEMAMix; torch_npu drives Ascend alone",
    fixes=(ADAMW,),
    fails_on=Example(_with("galore_8bit"), EQUIPPED),
    passes_on=Example(_with("galore_8bit"), EQUIPPED_H100),
    proof="launch",
)
def wrong_device(case: Case) -> str | None:
    """Some optimizers are written for one kind of device, and fail at the first step on any other."""
    devices = _row(case).devices
    if not devices or case.run.device in devices:
        return None
    needed = " or ".join(registry.DEVICES[name].label for name in devices)
    return f"{_row(case).label} needs a {needed}; the run would take: {registry.DEVICES[case.run.device].label}."


@rule(
    "OPT003",
    "error",
    fields=("train.optim", "parallel.strategy"),
    title="The strategy hands this optimizer no matrices",
    source="seen with deepspeed 0.19, galore-torch 1.0 and apollo-torch 1.0: IndexError in the projector at the first "
    "step; torch 2.13 _muon.py refuses vectors, and fsdp/_flat_param.py flattens",
    fixes=(DDP, ADAMW),
    fails_on=Example(_with("galore", parallel__strategy="zero2", launch__nproc_per_node=1), EQUIPPED_TWO),
    passes_on=Example(_with("galore", parallel__strategy="ddp"), EQUIPPED_TWO),
    proof="launch",
)
def flat_parts(case: Case) -> str | None:
    """ZeRO and FSDP1 cut all weights into flat parts, one a device. Optimizers that look at rows and columns, heads or
    layers find nothing to look at there."""
    row = _row(case)
    flat = _engine(case) == "deepspeed" or _strategy(case).fsdp_version == 1
    if not flat or not row.layout or row.layout == "block":
        return None
    return f"{row.label} needs whole matrices; {_strategy(case).label} hands it flat parts."


@rule(
    "OPT004",
    "error",
    fields=("train.optim", "parallel.strategy"),
    title="This optimizer works in one process",
    source="transformers 5.23 trainer_optimizer.py: layer-wise does not support DDP; accelerate 1.15: LOMO's learning "
    "rate is no argument of DeepSpeed's backward; badam 1.4 switches requires_grad, which DDP does not follow",
    fixes=(ONE, ADAMW),
    fails_on=Example(_with("lomo", parallel__strategy="zero2", launch__nproc_per_node=1), EQUIPPED_TWO),
    passes_on=Example(_with("galore_layerwise"), EQUIPPED_TWO),
    proof="launch",
)
def one_process(case: Case) -> str | None:
    """Steps within the backward pass are taken before gradients of other processes arrive, so that the copies of the
    model would drift apart; and layers that take turns change what is trained, which engines fix at the start."""
    row, engine = _row(case), _engine(case)
    if not engine or not (row.inside or row.layout == "block"):
        return None
    if engine == "ddp" and case.run.nproc_per_node == 1:
        return None
    return f"{row.label} would run in {counted(case.run.nproc_per_node, 'process')} of {_strategy(case).label}."


@rule(
    "OPT005",
    "error",
    fields=("train.gradient_accumulation_steps", "train.optim"),
    title="This optimizer cannot accumulate",
    source="transformers 5.23 trainer_optimizer.py: layer-wise does not support gradient accumulation; lomo-optim "
    "0.1.1 lomo.py: every backward pass changes the weights",
    fails_on=Example(_with("galore_layerwise", train__gradient_accumulation_steps=4), EQUIPPED),
    passes_on=Example(_with("galore_layerwise", train__per_device_train_batch_size=16), EQUIPPED),
    proof="launch",
)
def nothing_adds_up(case: Case) -> Violation | None:
    """It steps within each backward pass and frees the gradients there, so nothing is left to add up: it would take
    several small steps instead of a large one."""
    train = case.spec.train
    if not _row(case).inside or train.gradient_accumulation_steps == 1:
        return None
    size = train.per_device_train_batch_size * train.gradient_accumulation_steps
    fixes = (
        Fix(
            f"{counted(size, 'row')} at once",
            {"train.gradient_accumulation_steps": 1, "train.per_device_train_batch_size": size},
            cost="more memory",
        ),
        Fix(
            "Smaller steps", {"train.gradient_accumulation_steps": 1}, safe=False, cost="learns from fewer rows a step"
        ),
    )
    return Violation(f"{_row(case).label} with {counted(train.gradient_accumulation_steps, 'batch')} a step.", fixes)


@rule(
    "OPT006",
    "error",
    fields=("precision.compute", "train.optim"),
    title="fp16 with steps within the backward pass",
    source="accelerate 1.15 accelerator.py: gradients are unscaled after the backward pass",
    fixes=(BF16, ADAMW),
    fails_on=Example(_with("lomo", precision__compute="fp16"), EQUIPPED_H100),
    passes_on=Example(_with("lomo", precision__compute="bf16"), EQUIPPED_H100),
)
def scaled_steps(case: Case) -> str | None:
    """Under fp16 the loss is multiplied, and the gradients are divided again when the backward pass has ended; by then
    this optimizer has stepped, thousands of times too far."""
    return (
        f"{_row(case).label} steps too early for fp16."
        if _row(case).inside and case.run.compute_dtype == "fp16"
        else None
    )


@rule(
    "OPT007",
    "error",
    fields=("method.kind", "train.optim"),
    title="Adam-mini finds no heads in adapters",
    source="seen with adam-mini 1.1.1 and peft 0.21: the halves of an adapter do not divide into heads",
    fixes=(ADAMW, Fix("Train all weights", {"method.kind": "full"}, safe=False, cost="much more memory")),
    fails_on=Example({"train.optim": "adam_mini"}, EQUIPPED),
    passes_on=Example(_with("adam_mini"), EQUIPPED),
    proof="launch",
)
def no_heads(case: Case) -> str | None:
    """It keeps one second moment a head, and divides the query and key matrices by the size of a head. The narrow
    matrices of an adapter cannot be divided so."""
    lora = case.spec.method.kind == "lora"
    return "The method is LoRA." if lora and _row(case).layout == "heads" else None


@rule(
    "OPT008",
    "warning",
    fields=("method.kind", "train.optim"),
    title="An optimizer for whole matrices on adapters",
    source="GaLore (arXiv 2403.03507), APOLLO (2412.05270), Muon (2502.16982), BAdam (2404.02827): for full training",
    fixes=(ADAMW, Fix("Train all weights", {"method.kind": "full"}, safe=False, cost="much more memory")),
    fails_on=Example({"train.optim": "galore"}, EQUIPPED),
    passes_on=Example(_with("galore"), EQUIPPED),
)
def matrices_of_adapters(case: Case) -> str | None:
    """Adapters are of low rank already, and their state is small: to project them, or to train them in turns, saves
    next to nothing and learns worse. Muon makes the two factors orthogonal instead of their product."""
    row = _row(case)
    if case.spec.method.kind != "lora" or row.layout not in ("low_rank", "matrices", "block"):
        return None
    return f"{row.label} is made for full training, and the method is LoRA."


@rule(
    "OPT009",
    "error",
    fields=("train.optim_target_modules",),
    title="No module is named",
    source="transformers 5.23 trainer_optimizer.py: no target modules found",
    fixes=(Fix("All linear layers", {"train.optim_targets": "all-linear"}, safe=False),),
    fails_on=Example(_with("galore", train__optim_targets="custom"), EQUIPPED),
    passes_on=Example(_with("galore", train__optim_targets="custom", train__optim_target_modules=("mlp",)), EQUIPPED),
    proof="launch",
)
def no_targets(case: Case) -> str | None:
    """The optimizer must know which layers it projects."""
    train = case.spec.train
    if _row(case).layout != "low_rank" or train.optim_targets != "custom" or train.optim_target_modules:
        return None
    return "Projected layers are chosen by name, and there is no name."


@rule(
    "OPT011",
    "warning",
    fields=("train.optim", "launch.device"),
    title="Nothing is paged on a CPU",
    source="bitsandbytes 0.50 optim/optimizer.py: without a GPU its state is ordinary memory",
    fails_on=Example({"train.optim": "adamw_paged"}, EQUIPPED),
    passes_on=Example({"train.optim": "adamw_paged"}, EQUIPPED_H100),
)
def nothing_paged(case: Case) -> Violation | None:
    """Paging moves state between a GPU and the host's RAM; on a CPU all of it lies in RAM anyway."""
    row = _row(case)
    if not row.paged or case.run.device == "cuda" or row.devices:
        return None
    name = case.spec.train.optim.replace("_paged", "")
    return Violation(
        f"The run takes: {registry.DEVICES[case.run.device].label}.",
        (Fix(registry.OPTIMIZERS[name].label, {"train.optim": name}),),
    )


@rule(
    "OPT016",
    "warning",
    fields=("train.optim", "save.strategy"),
    title="A resumed run begins with an empty optimizer",
    source="grokadamw 0.1.2: its moments hang on weights of the stopped process; lomo-optim 0.1.1 adalomo.py keeps "
    "them outside of its state",
    fixes=(ADAMW,),
    fails_on=Example({"train.optim": "grokadamw"}, EQUIPPED),
    passes_on=Example({"train.optim": "adamw"}, EQUIPPED),
)
def forgetful(case: Case) -> str | None:
    """Its checkpoints do not bring its moments back: a run that goes on takes other steps than one that was not
    stopped."""
    return f"{_row(case).label} cannot be resumed exactly." if _row(case).loses_state_on_save else None


@rule(
    "OPT019",
    "error",
    fields=("train.optim",),
    title="No compiler for the optimizer's kernels",
    source="torchao 0.18 optim/adam.py: torch.compile at the first step; on a CPU that is C++",
    manual_fix="Install a compiler: apt-get install g++ python3-dev.",
    fixes=(ADAMW,),
    fails_on=Example({"train.optim": "adamw_8bit_torchao"}, replace(EQUIPPED, compiler=False)),
    passes_on=Example({"train.optim": "adamw_8bit_torchao"}, EQUIPPED),
)
def no_compiler(case: Case) -> str | None:
    """The optimizers of torchao are compiled when they first step: to C++ where their numbers lie in RAM."""
    hosted = case.run.device == "cpu" or (_engine(case) == "fsdp" and case.spec.parallel.cpu_offload)
    missing = _row(case).compiled and hosted and not case.machine.compiler
    return f"{_row(case).label} needs a C++ compiler, and there is none." if missing else None


@rule(
    "OPT021",
    "error",
    fields=("train.optim", "parallel.strategy"),
    title="DeepSpeed makes this optimizer anew, with one group",
    source="deepspeed 0.19 stage_1_and_2.py and stage3.py, initialize_optimizer_states: torch.optim.Adagrad(all parts)",
    fixes=(DDP, ADAMW),
    fails_on=Example(_with("adagrad", parallel__strategy="zero2"), EQUIPPED_TWO),
    passes_on=Example({"train.optim": "adagrad", "parallel.strategy": "zero2"}, EQUIPPED_TWO),
    proof="launch",
)
def made_anew(case: Case) -> str | None:
    """Norms and biases are a group of their own, which does not decay; LoRA+ makes more. DeepSpeed forgets the groups
    of Adagrad, and fails at the first step where there was more than one."""
    row = _row(case)
    several = row.early and case.strategy.zero_stage > 0 and case.spec.has_param_groups
    return f"{row.label} under {case.strategy.label}, with several groups of weights." if several else None


@rule(
    "OPT022",
    "error",
    fields=("train.optim", "parallel.strategy"),
    title="DeepSpeed does not switch the optimizer",
    source="deepspeed 0.19 runtime/zero: its optimizers have neither train nor eval, so schedulefree 1.4 is not told: "
    "validation sees the weights of the training, or a step finds it not in train mode",
    fixes=(DDP, ADAMW),
    fails_on=Example(_with("schedule_free_adamw", parallel__strategy="zero2"), EQUIPPED_TWO),
    passes_on=Example(_with("schedule_free_adamw", parallel__strategy="ddp"), EQUIPPED_TWO),
)
def unswitched(case: Case) -> str | None:
    """It trains one set of weights and averages another, and has to be told which of them is wanted now. DeepSpeed's
    optimizer stands between and does not pass that on."""
    return (
        f"{_row(case).label} with DeepSpeed."
        if _row(case).swaps_weights_for_eval and _engine(case) == "deepspeed"
        else None
    )


@rule(
    "OPT020",
    "error",
    fields=("train.optim", "parallel.strategy"),
    title="The optimizer does not take spread weights",
    source="seen with torch 2.13 on two processes: bitsandbytes 0.50 has no sharding strategy, transformers 5.23 "
    "Adafactor mixes tensors, apollo-torch 1.0 loses its seeds, torchao 0.18 its shapes with 4 bits, or in pure "
    "bf16; AdamW, torchao's with 8 bits, GaLore, Muon and others go on",
    fixes=(DDP, ADAMW),
    fails_on=Example(_with("adamw_8bit", parallel__strategy="fsdp2"), EQUIPPED_TWO),
    passes_on=Example(_with("adamw_8bit_torchao", parallel__strategy="fsdp2"), EQUIPPED_TWO),
    proof="launch",
)
def spread_weights(case: Case) -> str | None:
    """FSDP2 and tensor parallel turn each weight into a tensor whose parts lie on several devices. Some optimizers
    calculate with ordinary tensors beside it, and fail at the first step."""
    row = _row(case)
    if (
        not row.plain(case.run.fp32_master_weights)
        or _engine(case) not in ("fsdp", "tensor")
        or _strategy(case).fsdp_version == 1
    ):
        return None
    because = "" if row.plain(True) else f", in {registry.PRECISIONS[case.spec.precision.compute].label}"
    return f"{row.label} with {_strategy(case).label}{because}."
