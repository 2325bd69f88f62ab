"""Rules of context parallelism (FSDP2, ring attention) and sequence parallelism (DeepSpeed-Ulysses)."""

from __future__ import annotations

from dataclasses import replace

from backend import registry
from backend.rules.base import Case, Example, Fix, Violation, error, names, set_to, warning
from backend.rules.common_fixes import NO_PACKING
from backend.rules.distributed.examples import LLAMA_8B_FACTS
from backend.rules.examples import LLAMA_8B, TWO_H100
from backend.rules.stages import DPO
from backend.wording import counted

SEQUENCE = {"parallel.strategy": "zero3", "parallel.sequence_parallel_size": 2}
CONTEXT = {"parallel.strategy": "fsdp2", "parallel.context_parallel_size": 2}
WINDOW_FACTS = replace(LLAMA_8B_FACTS, shape=replace(LLAMA_8B, has_sliding_window=True, sliding_window=4096))
NO_SEQUENCE_PARALLEL = Fix(
    "Disable sequence parallelism",
    {"parallel.sequence_parallel_size": 1},
    cost="long sequences take more memory",
)
NO_CONTEXT_PARALLEL = Fix(
    "Disable context parallelism", {"parallel.context_parallel_size": 1}, cost="long sequences take more memory"
)
SDPA = Fix("Use SDPA attention", {"model.attn_implementation": "sdpa"})


@error(
    "STR022",
    fields=("parallel.context_parallel_size", "launch.device"),
    title="Context parallelism requires GPUs",
    source="verified with torch 2.13: attention on the CPU has no sharding strategy registered",
    fixes=(NO_CONTEXT_PARALLEL,),
    fails_on=Example(CONTEXT),
    passes_on=Example(CONTEXT, TWO_H100),
    proof="launch",
)
def context_parallel_on_cpu(case: Case) -> str | None:
    """Ring attention exchanges keys and values inside the attention kernel, and torch implements it for GPU kernels
    only."""
    size = case.run.context_parallel_size
    if size == 1 or case.run.device != "cpu":
        return None
    return f"parallel.context_parallel_size is {size}, but this run would use the CPU."


@warning(
    "STR023",
    fields=("parallel.context_parallel_size",),
    title="Context parallelism is not verified by Footplate's tests",
    source="Footplate's tests run without GPUs",
    fixes=(NO_CONTEXT_PARALLEL,),
    fails_on=Example(CONTEXT, TWO_H100),
    passes_on=Example({"parallel.strategy": "fsdp2"}, TWO_H100),
)
def untested_context_parallelism(case: Case) -> str | None:
    """Context parallelism is configured as accelerate documents it, but no test of Footplate has compared its losses
    with those of a run without context parallelism."""
    size = case.run.context_parallel_size
    if size == 1 or case.run.device == "cpu":
        return None
    return f"Compare the first losses of this run with those of a run without context parallelism (size {size} here)."


@error(
    "STR026",
    fields=("parallel.sequence_parallel_size", "launch.nproc_per_node"),
    title="The processes cannot be divided into sequence parallel groups",
    source="deepspeed 0.19 runtime/sequence_parallel/parallel_state_sp.py: the world size must be a multiple of the "
    "group size; torch 2.13 distributed/nn/functional.py: with gloo, gradients are scattered from global ranks, which "
    "fails in a group that leaves out ranks",
    fails_on=Example({**SEQUENCE, "parallel.sequence_parallel_size": 4}, TWO_H100, LLAMA_8B_FACTS),
    passes_on=Example(SEQUENCE, TWO_H100, LLAMA_8B_FACTS),
)
def sequence_parallel_group_size(case: Case) -> Violation | None:
    """Each sequence is divided among one group of processes, and all groups have the same size. On a CPU, one group
    must contain all processes."""
    size, world_size = case.run.sequence_parallel_size, case.run.world_size
    one_group = case.run.device == "cpu"
    if size == 1 or (world_size == size if one_group else world_size % size == 0):
        return None
    set_size = Fix(
        set_to("parallel.sequence_parallel_size", world_size), {"parallel.sequence_parallel_size": world_size}
    )
    needed = f"exactly {size}" if one_group else f"a multiple of {size}"
    message = f"parallel.sequence_parallel_size {size} needs {needed} processes; the run starts {world_size}."
    return Violation(message, (*((set_size,) if world_size > 1 else ()), NO_SEQUENCE_PARALLEL))


@error(
    "STR027",
    fields=("parallel.sequence_parallel_size", "train.stage"),
    title="This training stage does not support sequence parallelism",
    source="deepspeed 0.19 runtime/sequence_parallel/ulysses_sp.py requires position_ids, which preference batches "
    "lack; trl 1.16: only the SFT trainer supports sequence parallelism",
    fixes=(NO_SEQUENCE_PARALLEL,),
    fails_on=Example({**SEQUENCE, **DPO}, TWO_H100, LLAMA_8B_FACTS),
    passes_on=Example(SEQUENCE, TWO_H100, LLAMA_8B_FACTS),
    proof="launch",
)
def sequence_parallel_stage(case: Case) -> str | None:
    """Preference and reward losses need the log-probability or the score of a complete sequence, but with sequence
    parallelism each rank has only some of its tokens."""
    stage = case.spec.train.stage
    if case.run.sequence_parallel_size == 1 or stage in registry.NEXT_TOKEN_STAGES:
        return None
    label = registry.STAGES[stage].label
    return f"{label} does not support sequence parallelism: its loss needs complete sequences on each rank."


@error(
    "STR028",
    fields=("parallel.sequence_parallel_size", "data.packing"),
    title="Sequence parallelism does not support packing",
    source="deepspeed 0.19 runtime/sequence_parallel/ulysses_sp.py, refill, with trl 1.16: the document boundaries of "
    "a packed batch are not a tensor of tokens",
    fixes=(NO_SEQUENCE_PARALLEL, NO_PACKING),
    fails_on=Example({**SEQUENCE, "data.packing": True}, TWO_H100, LLAMA_8B_FACTS),
    passes_on=Example(SEQUENCE, TWO_H100, LLAMA_8B_FACTS),
    proof="launch",
)
def sequence_parallel_packing(case: Case) -> str | None:
    """DeepSpeed divides every tensor of a batch into equal shards, but packed batches also contain the boundaries of
    their documents."""
    size = case.run.sequence_parallel_size
    if size == 1 or not case.spec.data.packing:
        return None
    return f"data.packing is set, but packed batches cannot be divided among {size} sequence parallel ranks."


@error(
    "STR029",
    fields=("parallel.sequence_parallel_size", "model.attn_implementation"),
    title="This attention implementation does not support sequence parallelism",
    source="accelerate 1.15 utils/dataclasses.py, DeepSpeedSequenceParallelConfig refuses eager and flex_attention",
    fixes=(SDPA, NO_SEQUENCE_PARALLEL),
    fails_on=Example({**SEQUENCE, "model.attn_implementation": "eager"}, TWO_H100, LLAMA_8B_FACTS),
    passes_on=Example({**SEQUENCE, "model.attn_implementation": "sdpa"}, TWO_H100, LLAMA_8B_FACTS),
)
def sequence_parallel_attention(case: Case) -> str | None:
    """DeepSpeed-Ulysses exchanges tokens for heads around the attention kernel and supports SDPA and FlashAttention
    only."""
    attention = case.spec.model.attn_implementation
    if case.run.sequence_parallel_size == 1 or attention in registry.SEQUENCE_PARALLEL_ATTENTIONS:
        return None
    return f"model.attn_implementation is {attention}, but sequence parallelism needs SDPA or FlashAttention."


@error(
    "STR047",
    fields=("parallel.sequence_parallel_size",),
    title="This architecture does not support sequence parallelism",
    source="tests/process/test_sequence_parallel.py, with deepspeed 0.19 and every causal model type of transformers "
    "5.23: the inputs of attention for a part of a sequence, compared with those for the whole sequence",
    fixes=(NO_SEQUENCE_PARALLEL,),
    fails_on=Example(SEQUENCE, TWO_H100, replace(LLAMA_8B_FACTS, shape=replace(LLAMA_8B, model_type="qwen3_next"))),
    passes_on=Example(SEQUENCE, TWO_H100, LLAMA_8B_FACTS),
)
def sequence_parallel_architecture(case: Case) -> str | None:
    """DeepSpeed-Ulysses divides each sequence among the ranks and exchanges tokens only around transformers' attention
    function. State-space layers, linear attention and convolutions would process a rank's own tokens only; position
    embeddings without position IDs and custom attention masks would be wrong. The loss would silently be incorrect, or
    the run would fail."""
    kinds = case.model_types
    if case.run.sequence_parallel_size == 1 or not kinds or kinds & registry.SEQUENCE_PARALLEL_TYPES:
        return None
    return (
        f"{case.spec.model.name} has the model type {names(sorted(kinds))}. With sequence parallelism, some of its "
        "layers would process only the tokens of their own rank, which gives an incorrect loss or an error."
    )


@error(
    "STR056",
    fields=("parallel.sequence_parallel_size", "data.max_length", "model.attn_implementation"),
    title="Sequence parallelism with SDPA ignores the sliding window",
    source="deepspeed 0.19 runtime/sequence_parallel/ulysses_sp.py: uattn_wrapper sets the attention mask to None; "
    "transformers 5.23 integrations/sdpa_attention.py does not read sliding_window",
    fails_on=Example({**SEQUENCE, "data.max_length": 8192}, TWO_H100, WINDOW_FACTS),
    passes_on=Example({**SEQUENCE, "data.max_length": 4096}, TWO_H100, WINDOW_FACTS),
)
def sequence_parallel_sliding_window(case: Case) -> Violation | None:
    """SDPA gets a sliding window as an attention mask, and DeepSpeed-Ulysses drops masks. The sliding-window layers
    would attend to all earlier tokens: the model would silently train with full attention."""
    shape, length, attention = case.shape, case.spec.data.max_length, case.spec.model.attn_implementation
    if case.run.sequence_parallel_size == 1 or shape is None or not shape.has_sliding_window:
        return None
    if attention in registry.FLASH_ATTENTIONS or 0 < length <= shape.sliding_window:
        return None
    window = counted(shape.sliding_window, "token") if shape.sliding_window else "an unknown number of tokens"
    fixes = [NO_SEQUENCE_PARALLEL]
    if shape.sliding_window:
        label = set_to("data.max_length", f"{shape.sliding_window:,}")
        fixes.append(Fix(label, {"data.max_length": shape.sliding_window}, safe=False, cost="shorter examples"))
    message = f"The model's sliding window has {window}, and data.max_length is {length:,} tokens."
    return Violation(f"{message} Only FlashAttention, which needs a GPU, would keep to the window.", tuple(fixes))


@error(
    "STR030",
    fields=("parallel.sequence_parallel_size",),
    title="The attention heads are not divisible by the sequence parallel size",
    source="deepspeed 0.19 runtime/sequence_parallel/ulysses_sp.py: heads are divided by the group's size",
    fixes=(NO_SEQUENCE_PARALLEL,),
    fails_on=Example(SEQUENCE, TWO_H100),
    passes_on=Example(SEQUENCE, TWO_H100, LLAMA_8B_FACTS),
    proof="launch",
)
def sequence_parallel_head_count(case: Case) -> str | None:
    """Sequence parallelism gives each rank some tokens of all heads outside attention, and all tokens of some heads
    inside attention, so the numbers of heads must be divisible by the sequence parallel size."""
    shape, size = case.shape, case.run.sequence_parallel_size
    if shape is None:
        return None
    kv_heads = shape.kv_heads
    if shape.heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0):
        return None
    return f"{shape.heads} attention heads and {kv_heads} KV heads cannot be split over {size} devices."


@warning(
    "STR031",
    fields=("parallel.sequence_parallel_size", "train.gradient_accumulation_steps"),
    title="Sequence parallelism weights every accumulated batch equally",
    source="transformers 5.23 integrations/deepspeed.py, deepspeed_sp_compute_loss: the mean of each batch; the first "
    "loss differed by 0.04 from that of one process with 4 accumulated batches of short and long completions",
    fixes=(
        Fix(
            "Turn off gradient accumulation",
            {"train.gradient_accumulation_steps": 1},
            safe=False,
        ),
    ),
    fails_on=Example({**SEQUENCE, "train.gradient_accumulation_steps": 4}, TWO_H100, LLAMA_8B_FACTS),
    passes_on=Example(SEQUENCE, TWO_H100, LLAMA_8B_FACTS),
)
def sequence_parallel_accumulation(case: Case) -> str | None:
    """Other strategies average the loss over all tokens of an optimizer step. With sequence parallelism the Trainer
    averages it per batch, so tokens in batches of short sequences weigh more."""
    steps = case.spec.train.gradient_accumulation_steps
    if case.run.sequence_parallel_size == 1 or steps == 1:
        return None
    return (
        f"The loss would be averaged over each of the {steps} accumulated batches instead of over all tokens of an "
        "optimizer step. It differs from that of a run without sequence parallelism unless all batches have equally "
        "many tokens with a loss."
    )


@error(
    "STR037",
    fields=("parallel.context_parallel_size", "train.stage", "data.packing", "model.attn_implementation"),
    title="Context parallelism does not support these options",
    source="transformers 5.23 trainer.py _prepare_context_parallel_inputs: SDPA only, and inputs, labels and mask of "
    "unpacked sequences; accelerate 1.15 big_modeling.py: full attention only; trl 1.16 sft_trainer.py: no packing",
    fails_on=Example({**CONTEXT, "data.packing": True}, TWO_H100),
    passes_on=Example(CONTEXT, TWO_H100),
)
def unsupported_context_parallelism(case: Case) -> Violation | None:
    """Ring attention divides each sequence among devices inside SDPA. It supports unpacked sequences, full causal
    attention, and losses that are a sum over tokens."""
    spec, size = case.spec, case.run.context_parallel_size
    if size == 1:
        return None
    candidates = [
        ("packed sequences", spec.data.packing, NO_PACKING),
        (
            registry.ATTENTIONS[spec.model.attn_implementation].label,
            spec.model.attn_implementation not in ("auto", "sdpa"),
            SDPA,
        ),
        (registry.STAGES[spec.train.stage].label, spec.train.stage not in registry.NEXT_TOKEN_STAGES, None),
        ("the model's sliding-window attention", case.shape is not None and case.shape.has_sliding_window, None),
    ]
    found = [(name, fix) for name, applies, fix in candidates if applies]
    if not found:
        return None
    unsupported = names([name for name, _ in found])
    message = f"parallel.context_parallel_size is {size}, but context parallelism does not support {unsupported}."
    fixes = [*(fix for _, fix in found if fix), NO_CONTEXT_PARALLEL]
    return Violation(message, tuple(sorted(fixes, key=lambda fix: not fix.safe)))
