"""Rules about packing: which architectures keep packed sequences apart, the length of packed batches, and grouping."""

from __future__ import annotations

from dataclasses import replace

from backend import registry
from backend.rules.base import Case, Example, Fix, Violation, error, warning
from backend.rules.common_fixes import NO_PACKING
from backend.rules.examples import DEMO, H100, LOCAL_MODEL, SMOL
from backend.rules.requirements import missing_packages

MAMBA = replace(DEMO, shape=None, model_type="mamba")
PACKED = {**LOCAL_MODEL, "data.packing": True}


@error(
    "DAT020",
    fields=("data.packing",),
    title="This architecture does not isolate packed sequences",
    source="verified with transformers 5.23, trl 1.16: tokens of a packed sequence change the logits of the next one",
    fixes=(NO_PACKING,),
    fails_on=Example(PACKED, facts=MAMBA),
    passes_on=Example({**PACKED, "data.packing": False}, facts=MAMBA),
)
def packing_without_isolation(case: Case) -> str | None:
    """Packing concatenates several examples. The position ids tell attention where each example starts, and some
    architectures ignore them: state-space and convolution layers, ALiBi, or attention with a custom mask. Each example
    would then be trained with the examples before it as its context."""
    types = case.model_types
    if not case.spec.data.packing or not types or types & (registry.PACKING_ISOLATED | registry.PACKING_NEEDS_CONV1D):
        return None
    return f"data.packing is on, and packed sequences of {case.facts.model_type or types.pop()} are not isolated."


@error(
    "DAT022",
    fields=("data.packing", "data.max_length", "train.per_device_train_batch_size"),
    title="A packed batch is longer than the model's attention mask",
    source="transformers 5.23 models/gpt_neo/modeling_gpt_neo.py: a causal mask of max_position_embeddings tokens; trl "
    "1.16 concatenates the packed sequences of a batch",
    fixes=(NO_PACKING,),
    fails_on=Example(
        {**PACKED, "data.max_length": 1024},
        facts=replace(DEMO, model_type="gpt_neo", shape=replace(SMOL, max_positions=2048)),
    ),
    passes_on=Example({**PACKED, "data.max_length": 256}, facts=replace(DEMO, model_type="gpt_neo")),
)
def packed_batch_exceeds_attention_mask(case: Case) -> str | None:
    """Packed sequences of a batch are concatenated into one. Most architectures make an attention mask of that length;
    GPT-Neo has one of max_position_embeddings tokens and fails on a longer batch."""
    data, shape, size = case.spec.data, case.shape, case.spec.train.per_device_train_batch_size
    if not data.packing or shape is None or not case.model_types & registry.PACKING_WITHIN_POSITIONS:
        return None
    if not shape.max_positions or size * data.max_length <= shape.max_positions:
        return None
    return (
        f"A batch of {size} packed sequences of {data.max_length:,} tokens exceeds the {shape.max_positions:,} tokens "
        "of the model's attention mask. Use a smaller batch or max_length, or no packing."
    )


@error(
    "DAT021",
    fields=("data.packing",),
    title="Packing with this architecture needs packages that are not installed",
    source="transformers 5.23 integrations/hub_kernels.py: a function can't keep packed sequences apart without "
    "causal_conv1d, mamba_ssm or flash-linear-attention",
    fixes=(NO_PACKING,),
    manual_fix="Install them on a machine with a CUDA GPU, which they need.",
    fails_on=Example(PACKED, facts=replace(MAMBA, model_type="qwen3_next")),
    passes_on=Example(
        PACKED,
        replace(H100, versions={**H100.versions, "causal_conv1d": "1.5", "flash-linear-attention": "0.4"}),
        replace(MAMBA, model_type="qwen3_next"),
    ),
)
def packing_without_its_packages(case: Case) -> str | None:
    """The convolution, state-space and linear attention layers of this architecture separate packed sequences only with
    the kernels of these packages: causal_conv1d, mamba_ssm, flash-linear-attention."""
    kinds = sorted(case.model_types & registry.PACKING_PACKAGES.keys())
    if not case.spec.data.packing or not kinds:
        return None
    return missing_packages(case, f"Packing with {kinds[0]}", registry.PACKING_PACKAGES[kinds[0]])


MAX_PACKED_TOKENS = 8192


@warning(
    "DAT013",
    fields=("data.packing", "train.per_device_train_batch_size", "data.max_length"),
    title="Packing with a large batch makes attention slow",
    source="transformers 5.23 masking_utils.py: without flash attention a mask of tokens x tokens is built",
    fails_on=Example({"data.packing": True, "train.per_device_train_batch_size": 8, "data.max_length": 2048}, H100),
    passes_on=Example({"data.packing": True, "train.per_device_train_batch_size": 1, "data.max_length": 2048}, H100),
)
def packed_batch_too_long(case: Case) -> Violation | None:
    """The packed sequences of a batch are concatenated into one, and without FlashAttention, attention is computed for
    every pair of its tokens, including masked pairs. Doubling the batch size then quadruples the time and memory of
    attention; doubling gradient accumulation only doubles the time."""
    train, data = case.spec.train, case.spec.data
    batch, tokens = train.per_device_train_batch_size, train.per_device_train_batch_size * data.max_length
    if not data.packing or batch == 1 or tokens <= MAX_PACKED_TOKENS:
        return None
    if case.spec.model.attn_implementation in registry.FLASH_ATTENTIONS:
        return None
    patch = {
        "train.per_device_train_batch_size": 1,
        "train.gradient_accumulation_steps": train.gradient_accumulation_steps * batch,
    }
    message = f"{batch} packed sequences of {data.max_length:,} tokens become one sequence of {tokens:,} tokens."
    return Violation(message, (Fix("Use gradient accumulation instead", patch),))


@warning(
    "DAT012",
    fields=("data.packing", "train.train_sampling_strategy"),
    title="group_by_length does not help with packing",
    source="arithmetic: packed sequences all have one length",
    fixes=(Fix("Sample at random", {"train.train_sampling_strategy": "random"}, safe=False, cost="another order"),),
    fails_on=Example({"data.packing": True, "train.train_sampling_strategy": "group_by_length"}, H100),
    passes_on=Example({"data.packing": True}, H100),
)
def group_by_length_with_packing(case: Case) -> str | None:
    """Packing fills every sequence up to max_length, so there is no padding that grouping could save. Grouping only
    makes the order of the examples less random."""
    if not case.spec.data.packing or case.spec.train.train_sampling_strategy != "group_by_length":
        return None
    return "data.packing is on and train.train_sampling_strategy is group_by_length."
