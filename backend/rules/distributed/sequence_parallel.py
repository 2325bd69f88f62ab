"""Rules of rows whose tokens several devices share: context and sequence parallel.

Floor 3. Imports: below.
"""

from __future__ import annotations

from dataclasses import replace

from backend import registry
from backend.rules.base import Case, Example, Fix, Violation, counted, names, rule
from backend.rules.examples import DEMO, GPT2, LLAMA_8B, TWO_H100
from backend.rules.stages import DPO

SEQUENCE = {"parallel.strategy": "zero3", "parallel.sequence_parallel_size": 2}
WITHOUT = Fix("Whole rows", {"parallel.sequence_parallel_size": 1}, cost="long rows take more memory")
EIGHT_B = replace(DEMO, shape=LLAMA_8B)


def _shared(case: Case) -> bool:
    return case.strategy.engine == "deepspeed" and case.spec.parallel.sequence_parallel_size > 1


@rule(
    "STR022",
    "error",
    fields=("parallel.context_parallel_size", "launch.device"),
    title="Context parallel needs GPUs",
    source="seen with torch 2.13: the CPU's attention has no sharding strategy registered",
    fixes=(Fix("Whole rows", {"parallel.context_parallel_size": 1}, cost="long rows take more memory"),),
    fails_on=Example({"parallel.strategy": "fsdp2", "parallel.context_parallel_size": 2}),
    passes_on=Example({"parallel.strategy": "fsdp2", "parallel.context_parallel_size": 2}, TWO_H100),
    proof="launch",
)
def context_on_cpu(case: Case) -> str | None:
    """The pieces of a row meet in the attention's kernel."""
    asked = case.strategy.fsdp_version == 2 and case.spec.parallel.context_parallel_size > 1
    return "The run would take the CPU." if asked and case.run.device == "cpu" else None


@rule(
    "STR023",
    "warning",
    fields=("parallel.context_parallel_size",),
    title="Context parallel is not proven here",
    source="Footplate's own tests run without GPUs",
    fixes=(Fix("Whole rows", {"parallel.context_parallel_size": 1}, cost="long rows take more memory"),),
    fails_on=Example({"parallel.strategy": "fsdp2", "parallel.context_parallel_size": 2}, TWO_H100),
    passes_on=Example({"parallel.strategy": "fsdp2"}, TWO_H100),
)
def context_unproven(case: Case) -> str | None:
    """It is planned as accelerate documents it, and no test of Footplate has seen its losses."""
    asked = case.strategy.fsdp_version == 2 and case.spec.parallel.context_parallel_size > 1
    return "Compare the first losses with a run without it." if asked and case.run.device != "cpu" else None


@rule(
    "STR026",
    "error",
    fields=("parallel.sequence_parallel_size", "launch.nproc_per_node"),
    title="The processes cannot form groups that share a row",
    source="deepspeed 0.19 runtime/sequence_parallel/parallel_state_sp.py: the group's size must divide the world's; "
    "torch 2.13 distributed/nn/functional.py: with gloo gradients are scattered from global ranks, of which such a "
    "group has some",
    fails_on=Example({**SEQUENCE, "parallel.sequence_parallel_size": 4}, TWO_H100, EIGHT_B),
    passes_on=Example(SEQUENCE, TWO_H100, EIGHT_B),
)
def sequence_groups(case: Case) -> Violation | None:
    """Each row is worked on by one group of processes, all of the same size; on a CPU by all processes together."""
    size, count = case.spec.parallel.sequence_parallel_size, case.run.world_size
    whole = case.run.device == "cpu"
    if not _shared(case) or (count == size if whole else count % size == 0):
        return None
    fixes = (Fix(f"{count} share a row", {"parallel.sequence_parallel_size": count}),) if count > 1 else ()
    return Violation(f"{counted(count, 'process')}, and {size} share a row.", (*fixes, WITHOUT))


@rule(
    "STR027",
    "error",
    fields=("parallel.sequence_parallel_size", "train.stage"),
    title="This stage looks at whole rows",
    source="deepspeed 0.19 runtime/sequence_parallel/ulysses_sp.py wants position_ids, which pairs of answers lack; "
    "trl 1.16: sequence parallel is known to the SFT trainer alone",
    fixes=(WITHOUT,),
    fails_on=Example({**SEQUENCE, **DPO}, TWO_H100, EIGHT_B),
    passes_on=Example(SEQUENCE, TWO_H100, EIGHT_B),
    proof="launch",
)
def sequence_stage(case: Case) -> str | None:
    """A loss that compares answers adds up all tokens of each, and a device has some of them."""
    stage = case.spec.train.stage
    return f"{registry.STAGES[stage].label}." if _shared(case) and stage not in registry.PLAIN else None


@rule(
    "STR028",
    "error",
    fields=("parallel.sequence_parallel_size", "data.packing"),
    title="Packed rows are not cut evenly",
    source="deepspeed 0.19 runtime/sequence_parallel/ulysses_sp.py, refill, with trl 1.16: the boundaries of "
    "documents in a packed batch are no row of tokens",
    fixes=(Fix("Without packing", {"data.packing": False}, cost="short rows leave devices idle"), WITHOUT),
    fails_on=Example({**SEQUENCE, "data.packing": True}, TWO_H100, EIGHT_B),
    passes_on=Example(SEQUENCE, TWO_H100, EIGHT_B),
    proof="launch",
)
def sequence_packing(case: Case) -> str | None:
    """Packing tells where documents begin, and DeepSpeed cuts whatever stands in a batch into equal pieces."""
    return "Rows would be packed." if _shared(case) and case.spec.data.packing else None


@rule(
    "STR029",
    "error",
    fields=("parallel.sequence_parallel_size", "model.attn_implementation"),
    title="This attention cannot be shared",
    source="accelerate 1.15 utils/dataclasses.py, DeepSpeedSequenceParallelConfig refuses eager and flex_attention",
    fixes=(Fix("SDPA", {"model.attn_implementation": "sdpa"}), WITHOUT),
    fails_on=Example({**SEQUENCE, "model.attn_implementation": "eager"}, TWO_H100, EIGHT_B),
    passes_on=Example({**SEQUENCE, "model.attn_implementation": "sdpa"}, TWO_H100, EIGHT_B),
)
def sequence_attention(case: Case) -> str | None:
    """DeepSpeed exchanges tokens for heads around the attention, and knows SDPA and FlashAttention."""
    asked = case.spec.model.attn_implementation
    return f"{registry.ATTENTIONS[asked].label}." if _shared(case) and asked not in registry.SHAREABLE else None


@rule(
    "STR047",
    "error",
    fields=("parallel.sequence_parallel_size",),
    title="GPT-2's attention cannot be shared",
    source="seen with deepspeed 0.19 and transformers 5.23 models/gpt2/modeling_gpt2.py: it puts heads together, "
    "and DeepSpeed has done so already",
    fixes=(WITHOUT,),
    fails_on=Example(SEQUENCE, TWO_H100, replace(DEMO, shape=GPT2)),
    passes_on=Example(SEQUENCE, TWO_H100, EIGHT_B),
    proof="launch",
)
def sequence_gpt2(case: Case) -> str | None:
    """DeepSpeed exchanges tokens for heads around the attention, and gives back what GPT-2's layers do not expect."""
    found = _shared(case) and case.shape is not None and case.shape.model_type == "gpt2"
    return f"{case.spec.model.name} is a GPT-2." if found else None


@rule(
    "STR030",
    "error",
    fields=("parallel.sequence_parallel_size",),
    title="The attention's heads cannot be shared out",
    source="deepspeed 0.19 runtime/sequence_parallel/ulysses_sp.py: heads are divided by the group's size",
    fixes=(WITHOUT,),
    fails_on=Example(SEQUENCE, TWO_H100),
    passes_on=Example(SEQUENCE, TWO_H100, EIGHT_B),
    proof="launch",
)
def sequence_heads(case: Case) -> str | None:
    """Between the layers a device has some tokens of all heads, in the attention all tokens of some heads."""
    shape, size = case.shape, case.spec.parallel.sequence_parallel_size
    if not _shared(case) or shape is None:
        return None
    keys = shape.kv_heads
    fits = shape.heads % size == 0 and (keys % size == 0 or size % keys == 0)
    return None if fits else f"{shape.heads} heads, {keys} of keys, {size} devices."


@rule(
    "STR031",
    "warning",
    fields=("parallel.sequence_parallel_size", "train.gradient_accumulation_steps"),
    title="Batches of a step count alike",
    source="transformers 5.23 integrations/deepspeed.py, deepspeed_sp_compute_loss: a mean of each batch; with "
    "accumulation 2 the losses differ from those of one process by 0.0003",
    fixes=(Fix("No accumulation", {"train.gradient_accumulation_steps": 1}, safe=False),),
    fails_on=Example({**SEQUENCE, "train.gradient_accumulation_steps": 4}, TWO_H100, EIGHT_B),
    passes_on=Example(SEQUENCE, TWO_H100, EIGHT_B),
)
def sequence_accumulation(case: Case) -> str | None:
    """Elsewhere every token of a step counts alike. With sequence parallel every accumulated batch does, so that tokens
    of short rows weigh more."""
    asked = case.spec.train.gradient_accumulation_steps
    return f"{asked} batches a step." if _shared(case) and asked > 1 else None


CONTEXT = {"parallel.strategy": "fsdp2", "parallel.context_parallel_size": 2}


@rule(
    "STR037",
    "error",
    fields=("parallel.context_parallel_size", "train.stage", "data.packing", "model.attn_implementation"),
    title="Context parallel cannot share these rows",
    source="transformers 5.23 trainer.py _prepare_context_parallel_inputs: SDPA alone, and inputs, labels and mask of "
    "plain rows; accelerate 1.15 big_modeling.py: full attention alone; trl 1.16 sft_trainer.py: no packing",
    fixes=(Fix("Whole rows", {"parallel.context_parallel_size": 1}, cost="long rows take more memory"),),
    fails_on=Example({**CONTEXT, "data.packing": True}, TWO_H100),
    passes_on=Example(CONTEXT, TWO_H100),
)
def context_limits(case: Case) -> Violation | None:
    """A row is cut into pieces for the devices, and the attention's kernel puts them together again. It knows one
    kernel, rows that stand alone and are seen whole, and a loss that adds up single tokens."""
    spec = case.spec
    if case.strategy.fsdp_version != 2 or spec.parallel.context_parallel_size == 1:
        return None
    wrong = [
        (
            "packed rows",
            spec.data.packing,
            Fix("Without packing", {"data.packing": False}, cost="short rows leave devices idle"),
        ),
        (
            registry.ATTENTIONS[spec.model.attn_implementation].label,
            spec.model.attn_implementation not in ("auto", "sdpa"),
            Fix("SDPA", {"model.attn_implementation": "sdpa"}),
        ),
        (registry.STAGES[spec.train.stage].label, spec.train.stage not in registry.PLAIN, None),
        ("a window of attention in the model", case.shape is not None and case.shape.sliding, None),
    ]
    found = [(name, fix) for name, holds, fix in wrong if holds]
    return Violation(f"Asked for: {names([n for n, _ in found])}.", tuple(f for _, f in found if f)) if found else None
