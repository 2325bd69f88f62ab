"""Rules of the optimizers' use: rates, ranks, turns, and what they do by themselves.

Floor 3. Imports: below.
"""

from __future__ import annotations

import re

from backend import registry
from backend.memory.optimizer_state import State
from backend.rules.base import Case, Example, Fix, Violation, counted, rule
from backend.rules.common_fixes import ADAMW, DDP
from backend.rules.examples import EQUIPPED, EQUIPPED_H100, EQUIPPED_TWO

FULL = {"method.kind": "full", "train.learning_rate": 2e-5}
SPREAD = {"parallel.strategy": "fsdp2", "launch.nproc_per_node": 4}


def _row(case: Case) -> registry.Optimizer:
    return registry.OPTIMIZERS[case.spec.train.optim]


def _sharers(case: Case) -> int:
    """Devices that FSDP2 spreads a matrix over."""
    return case.run.world_size // max(1, case.spec.parallel.replicate_size)


def _with(name: str, **more: object) -> dict[str, object]:
    return {**FULL, "train.optim": name, **{key.replace("__", "."): value for key, value in more.items()}}


@rule(
    "OPT010",
    "warning",
    fields=("train.projection_rank",),
    title="The projection is as wide as the matrices",
    source="arithmetic: galore-torch 1.0 galore_projector.py takes no more directions than there are",
    fails_on=Example(_with("galore", train__projection_rank=1024), EQUIPPED),
    passes_on=Example(_with("galore", train__projection_rank=128), EQUIPPED),
)
def wide_projection(case: Case) -> Violation | None:
    """A projection that keeps every direction saves nothing, and costs its own memory and time."""
    rank, shape = case.spec.train.projection_rank, case.shape
    if _row(case).layout != "low_rank" or shape is None or rank < shape.hidden:
        return None
    quarter = max(1, shape.hidden // 4)
    return Violation(
        f"Rank {rank:,}, and the model is {shape.hidden:,} wide.",
        (Fix(f"Rank {quarter:,}", {"train.projection_rank": quarter}, safe=False),),
    )


@rule(
    "OPT024",
    "error",
    fields=("train.galore_proj_type", "train.projection_rank"),
    title="GaLore cannot project back",
    source="galore-torch 1.0 galore_projector.py project_back: it tells sides apart by what is left of a matrix, and "
    "takes a wide one for a tall one",
    fails_on=Example(_with("galore", train__galore_proj_type="reverse_std", train__projection_rank=1024), EQUIPPED),
    passes_on=Example(_with("galore", train__galore_proj_type="reverse_std", train__projection_rank=128), EQUIPPED),
    proof="launch",
)
def cannot_project_back(case: Case) -> Violation | None:
    """On its longer side, a matrix that is wider than high keeps its height. With a rank of that height or more the
    first step fails."""
    train, shape = case.spec.train, case.shape
    if "galore_proj_type" not in _row(case).reads or train.galore_proj_type != "reverse_std" or shape is None:
        return None
    state = State(case.spec, shape)
    wide = [leaf for leaf in state.weights if leaf.outputs < leaf.inputs and state.projected(leaf)]
    least = min((leaf.outputs for leaf in wide), default=train.projection_rank + 1)
    if train.projection_rank < least:
        return None
    fixes = [Fix("The shorter side", {"train.galore_proj_type": "std"}, safe=False, cost="another projection")]
    if least > 1:  # a reward's head is one row
        low = max(1, least // 4)
        fixes.append(Fix(f"Rank {low:,}", {"train.projection_rank": low}, safe=False))
    return Violation(f"Rank {train.projection_rank:,}, and projected matrices are {least:,} high.", tuple(fixes))


@rule(
    "OPT025",
    "error",
    fields=("train.optim", "lora.r", "launch.nproc_per_node"),
    title="The optimizer needs a row of each matrix on every device",
    source="seen with torch 2.13 on two and four processes under FSDP2: Muon's and GaLore's steps on matrices of fewer "
    "rows",
    fixes=(DDP, ADAMW),
    fails_on=Example({"train.optim": "muon", "lora.r": 3, **SPREAD}, EQUIPPED),
    passes_on=Example({"train.optim": "muon", "lora.r": 4, **SPREAD}, EQUIPPED),
    proof="launch",
)
def fewer_rows_than_devices(case: Case) -> str | None:
    """FSDP2 spreads matrices by rows. A device without one cannot take part in a step that works on whole matrices, as
    Muon's and a projection do. An adapter has as many rows as its rank, the head of a reward model one."""
    if _row(case).layout not in ("matrices", "low_rank") or case.strategy.fsdp_version != 2 or case.shape is None:
        return None
    devices, state = _sharers(case), State(case.spec, case.shape)
    least = min((leaf.outputs for leaf in state.weights if state.whole(leaf)), default=devices)
    return f"A matrix has {counted(least, 'row')}, for {devices:,} devices." if least < devices else None


@rule(
    "OPT026",
    "error",
    fields=("train.optim", "launch.nproc_per_node"),
    title="The attention's heads cannot be shared out to this optimizer",
    source="seen with adam-mini 1.1 and torch 2.13 under FSDP2: Cannot unflatten unevenly sharded tensor",
    fixes=(DDP, ADAMW),
    fails_on=Example({**_with("adam_mini"), **SPREAD}, EQUIPPED),
    passes_on=Example({**_with("adam_mini"), **SPREAD, "launch.nproc_per_node": 3}, EQUIPPED),
    proof="launch",
)
def heads_over_devices(case: Case) -> str | None:
    """Adam-mini takes the weights of queries and keys head by head, and FSDP2 has spread them by rows: each device must
    have as many heads."""
    if _row(case).layout != "heads" or case.strategy.fsdp_version != 2 or case.shape is None:
        return None
    devices = _sharers(case)
    uneven = case.shape.heads % devices or case.shape.kv_heads % devices
    return f"{case.shape.heads} heads, {case.shape.kv_heads} of keys, {devices:,} devices." if uneven else None


@rule(
    "OPT012",
    "advice",
    fields=("train.learning_rate", "train.optim"),
    title="A high learning rate for Lion",
    source="Lion (arXiv 2302.06675): a third to a tenth of AdamW's rate",
    fails_on=Example({"train.optim": "lion"}, EQUIPPED),
    passes_on=Example({"train.optim": "lion", "train.learning_rate": 5e-5}, EQUIPPED),
)
def fast_lion(case: Case) -> Violation | None:
    """Lion moves every weight by the full rate at each step, whatever its gradient: what suits AdamW overshoots."""
    usual = 1e-4 if case.spec.method.kind == "lora" else 1e-5
    rate = case.spec.train.learning_rate
    if not case.spec.train.optim.startswith("lion") or rate <= usual:
        return None
    return Violation(f"The rate is {rate:g}.", (Fix(f"{usual / 2:g}", {"train.learning_rate": usual / 2}, safe=False),))


@rule(
    "OPT013",
    "advice",
    fields=("train.learning_rate", "train.optim"),
    title="A low learning rate for SGD",
    source="steps are not divided by the gradient's size; lomo-optim 0.1.1 lomo.py: 1e-3 unless told otherwise",
    fails_on=Example({"train.optim": "sgd"}, EQUIPPED),
    passes_on=Example({"train.optim": "sgd", "train.learning_rate": 0.05}, EQUIPPED),
)
def slow_sgd(case: Case) -> Violation | None:
    """Adam divides each gradient by its size, and SGD does not: at Adam's rates it hardly moves."""
    train, row = case.spec.train, _row(case)
    plain = (
        row.reads and not row.factored and "adam_beta1" not in row.reads and ("sgd" in row.name or row.name == "lomo")
    )
    if not plain or train.learning_rate >= 1e-3:
        return None
    return Violation(f"The rate is {train.learning_rate:g}.", (Fix("0.05", {"train.learning_rate": 0.05}, safe=False),))


@rule(
    "OPT014",
    "advice",
    fields=("train.max_grad_norm", "train.optim"),
    title="Adafactor clips by itself",
    source="transformers 5.23 optimization.py, Adafactor: an update is scaled to a size of at most 1",
    fixes=(Fix("Leave it to Adafactor", {"train.max_grad_norm": 0.0}, safe=False),),
    fails_on=Example({"train.optim": "adafactor"}),
    passes_on=Example({"train.optim": "adafactor", "train.max_grad_norm": 0.0}),
)
def clipped_twice(case: Case) -> str | None:
    """It scales each update to a size of at most one; cutting the gradients before distorts what it measures."""
    train = case.spec.train
    factored = _row(case).factored and "max_grad_norm" in _row(case).reads
    return f"Gradients are clipped at {train.max_grad_norm:g} before." if factored and train.max_grad_norm else None


@rule(
    "OPT015",
    "warning",
    fields=("train.optim", "parallel.strategy"),
    title="ZeRO undoes Adafactor's saving",
    source="transformers 5.23 optimization.py: factors matrices only; deepspeed 0.19 hands it flat parts",
    fixes=(DDP, ADAMW),
    fails_on=Example(_with("adafactor", parallel__strategy="zero2"), EQUIPPED_TWO),
    passes_on=Example(_with("adafactor", parallel__strategy="ddp"), EQUIPPED_TWO),
)
def unfactored(case: Case) -> str | None:
    """Rows and columns of a matrix are what it keeps instead of the matrix; ZeRO hands it flat parts, and a whole
    second moment is kept."""
    row = _row(case)
    lost = row.factored and not row.layout and registry.STRATEGIES[case.spec.parallel.strategy].engine == "deepspeed"
    return "Every trained weight gets 4 bytes of state." if lost else None


@rule(
    "OPT017",
    "advice",
    fields=("train.optim", "precision.compute"),
    title="BAdam keeps fp32 copies of its own",
    source="badam 1.4 block_optim.py: the active block is copied to fp32; it warns of weights in fp32",
    fixes=(Fix("Pure bf16", {"precision.compute": "pure_bf16"}, safe=False),),
    fails_on=Example(_with("badam"), EQUIPPED_H100),
    passes_on=Example(_with("badam", precision__compute="pure_bf16"), EQUIPPED_H100),
)
def two_masters(case: Case) -> str | None:
    """The layer whose turn it is gets a copy in fp32, so that the weights themselves may lie in bf16 without losing
    small updates: half the memory of the model."""
    pure = case.spec.precision.compute == "pure_bf16"
    better = _row(case).layout == "block" and not pure and case.run.compute_dtype == "bf16"
    return "All weights are held in fp32 as well." if better else None


@rule(
    "OPT018",
    "warning",
    fields=("train.badam_switch_block_every",),
    title="Not every layer gets its turn",
    source="arithmetic: layers x steps a layer against the steps of the run",
    fails_on=Example(_with("badam", train__duration="steps", train__max_steps=100), EQUIPPED),
    passes_on=Example(_with("badam", train__duration="steps", train__max_steps=3000), EQUIPPED),
)
def short_turns(case: Case) -> Violation | None:
    """The run ends before each layer was trained once; the others stay as they were."""
    steps, shape, each = case.run.total_steps, case.shape, case.spec.train.badam_switch_block_every
    if _row(case).layout != "block" or steps is None or shape is None or steps >= shape.layers * each:
        return None
    fewer = steps // shape.layers
    fixes = (
        (Fix(f"{counted(fewer, 'step')} a layer", {"train.badam_switch_block_every": fewer}, safe=False),)
        if fewer
        else ()
    )
    return Violation(f"{shape.layers} layers x {counted(each, 'step')}, and {counted(steps, 'step')} in all.", fixes)


def _projected(case: Case) -> list[str]:
    """The linear layers that a projection would find by the names asked for."""
    train, shape = case.spec.train, case.shape
    if shape is None:
        return []
    # GPT-2 keeps its layers as Conv1D, and a tied head belongs to the embeddings.
    linear = [leaf.path for leaf in shape.leaves() if leaf.linear and leaf.parameters]
    if shape.model_type == "gpt2":
        linear = [path for path in linear if path == shape.head]
    if train.optim_targets == "all-linear":
        return linear
    names = ("attn", "attention") if train.optim_targets == "attention" else train.optim_target_modules
    return [path for path in linear if any(name in path or _fits(name, path) for name in names)]


def _fits(pattern: str, path: str) -> bool:
    try:
        return re.fullmatch(pattern, path) is not None
    except re.error:
        return False


@rule(
    "OPT023",
    "error",
    fields=("train.optim_targets", "train.optim_target_modules"),
    title="No layer to project",
    source="transformers 5.23 trainer_optimizer.py: No target modules found; it projects nn.Linear alone",
    fixes=(ADAMW,),
    fails_on=Example(_with("galore", train__optim_targets="custom", train__optim_target_modules=("foo",)), EQUIPPED),
    passes_on=Example(_with("galore", train__optim_targets="custom", train__optim_target_modules=("mlp",)), EQUIPPED),
    proof="launch",
)
def unprojected(case: Case) -> Violation | None:
    """A projection is for linear layers whose names contain what is asked for, or fit it as a pattern. GPT-2 has
    none: its layers are of another kind."""
    train, shape = case.spec.train, case.shape
    unnamed = train.optim_targets == "custom" and not train.optim_target_modules  # a rule of its own says so
    if _row(case).layout != "low_rank" or shape is None or case.spec.method.kind == "lora" or unnamed:
        return None
    if _projected(case):
        return None
    every = {"train.optim_targets": "all-linear"}
    fixes = () if shape.model_type == "gpt2" else (Fix("All linear layers", every, safe=False),)
    return Violation(f"{shape.architecture} has no such linear layer.", fixes)
