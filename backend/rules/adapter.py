"""Rules of the kin of LoRA: how adapters begin, are scaled and learn.

Floor 3. Imports: below.
"""

from __future__ import annotations

import math
from dataclasses import replace

from backend import registry
from backend.modelspec import adapted, trainable
from backend.rules.base import Case, Example, Fix, Violation, rule
from backend.rules.common_fixes import ATTENTION
from backend.rules.examples import DEMO, GPT2, H100, MIXTURE

ZERO = Fix("The usual start", {"lora.init": "default"}, safe=False, cost="learns a little slower")
MOVING = tuple(name for name, row in registry.LORA_INITS.items() if row.changes_base_weights)


def _lora(case: Case) -> bool:
    return case.spec.method.kind == "lora"


@rule(
    "ADP001",
    "error",
    fields=("lora.r", "lora.init"),
    title="An orthogonal start needs an even rank",
    source="peft 0.21 lora/layer.py: orthogonal_init refuses an odd rank",
    fails_on=Example({"lora.init": "orthogonal", "lora.r": 5}),
    passes_on=Example({"lora.init": "orthogonal", "lora.r": 6}),
    proof="launch",
)
def odd_rank(case: Case) -> Violation | None:
    """Half of the directions go to A and the other half to B, so that together they cancel out."""
    rank = case.spec.lora.r
    if not _lora(case) or case.spec.lora.init != "orthogonal" or rank % 2 == 0:
        return None
    return Violation(f"{rank} cannot be halved.", (Fix(f"Rank {rank + 1}", {"lora.r": rank + 1}, False), ZERO))


@rule(
    "ADP002",
    "error",
    fields=("lora.r", "lora.init"),
    title="A start with more directions than a layer has",
    source="seen with peft 0.21: the adapter silently gets a smaller rank than its configuration says, and cannot "
    "be loaded again",
    fails_on=Example({"lora.init": "pissa", "lora.r": 1024, "lora.alpha": 1024.0}),
    passes_on=Example({"lora.init": "pissa", "lora.r": 64}),
    proof="launch",
)
def rank_beyond_layer(case: Case) -> Violation | None:
    """PiSSA and OLoRA take their start out of each weight, which has no more directions than its shorter side."""
    shape = case.shape
    if not _lora(case) or case.spec.lora.init not in MOVING or shape is None:
        return None
    narrow = min((min(leaf.inputs, leaf.outputs) for leaf in adapted(case.spec.lora, shape)), default=case.spec.lora.r)
    if case.spec.lora.r <= narrow:
        return None
    message = f"Rank {case.spec.lora.r}; the narrowest adapted layer has {narrow} directions."
    return Violation(message, (Fix(f"Rank {narrow}", {"lora.r": narrow}, False), ZERO))


@rule(
    "ADP003",
    "error",
    fields=("lora.init",),
    title="OLoRA does not know this model's layers",
    source="peft 0.21 lora/layer.py: olora_init does not transpose the weights of a Conv1D",
    fixes=(ZERO, Fix("PiSSA", {"lora.init": "pissa"}, safe=False, cost="a minute at the start")),
    fails_on=Example({"lora.init": "olora"}, facts=replace(DEMO, shape=GPT2)),
    passes_on=Example({"lora.init": "pissa"}, facts=replace(DEMO, shape=GPT2)),
)
def olora_transposed(case: Case) -> str | None:
    """GPT-2 stores its weights the other way round, and the adapter would not fit them."""
    asked = _lora(case) and case.spec.lora.init == "olora"
    return "GPT-2's layers are transposed." if asked and case.shape and case.shape.model_type == "gpt2" else None


@rule(
    "ADP004",
    "warning",
    fields=("lora.loraplus_lr_ratio", "train.learning_rate"),
    title="The B matrices would learn very fast",
    source="Hayou et al. 2024, LoRA+: a ratio of 16, at a rate somewhat below LoRA's own",
    fails_on=Example({"lora.loraplus_lr_ratio": 256.0}),
    passes_on=Example({"lora.loraplus_lr_ratio": 16.0}),
)
def fast_b(case: Case) -> Violation | None:
    """LoRA+ multiplies the learning rate of the B matrices. Too high a rate makes the loss rise."""
    ratio, rate = case.spec.lora.loraplus_lr_ratio, case.spec.train.learning_rate
    if not _lora(case) or ratio == 1 or ratio * rate <= 2e-2:
        return None
    fix = Fix("Ratio 16", {"lora.loraplus_lr_ratio": 16.0}, False)
    slower = Fix("A fitting rate", {"train.learning_rate": float(f"{5e-3 / ratio:.1g}")}, False)
    return Violation(f"{rate:g} x {ratio:g} is {rate * ratio:.2g}.", (fix,) if rate * 16 <= 2e-2 else (slower,))


@rule(
    "ADP005",
    "advice",
    fields=("lora.alpha", "lora.use_rslora"),
    title="An adapter with a large scale",
    source="Kalajdzievski 2023, rsLoRA: the scale is alpha / root of rank",
    fails_on=Example({"lora.use_rslora": True, "lora.r": 64, "lora.alpha": 128.0}),
    passes_on=Example({"lora.use_rslora": True, "lora.r": 64, "lora.alpha": 16.0}),
)
def large_scale(case: Case) -> Violation | None:
    """With rsLoRA an alpha of twice the rank is far more than with LoRA, and acts like a learning rate that is too
    high."""
    scale = case.spec.lora.alpha / math.sqrt(case.spec.lora.r)
    if not _lora(case) or not case.spec.lora.use_rslora or scale <= 10:
        return None
    alpha = float(round(2 * math.sqrt(case.spec.lora.r)))
    message = f"{case.spec.lora.alpha:g} / root of {case.spec.lora.r} is {scale:.3g}; about 2 is usual."
    return Violation(message, (Fix(f"Alpha {alpha:g}", {"lora.alpha": alpha}, False),))


@rule(
    "ADP006",
    "advice",
    fields=("lora.use_dora", "lora.dropout"),
    title="DoRA with dropout computes every base layer twice",
    source="peft 0.21 lora/variants.py: with dropout the base result cannot be used again",
    fixes=(Fix("Without dropout", {"lora.dropout": 0.0}, safe=False),),
    fails_on=Example({"lora.use_dora": True, "lora.dropout": 0.1}),
    passes_on=Example({"lora.use_dora": True}),
)
def dora_dropout(case: Case) -> str | None:
    """Its lengths are applied to what the base layer makes of the dropped input."""
    return (
        f"Dropout is {case.spec.lora.dropout:g}."
        if _lora(case) and case.spec.lora.use_dora and case.spec.lora.dropout
        else None
    )


NAMED = {"lora.targets": "custom"}
STACKED = registry.STACKED["qwen3_moe"]
MIXED = replace(DEMO, shape=MIXTURE, stacked=STACKED)
SHAPELESS = replace(DEMO, shape=None, stacked=STACKED, unknown="it is a mixture of experts")


@rule(
    "ADP007",
    "error",
    fields=("lora.targets", "lora.dropout", "lora.use_dora", "lora.init"),
    title="Adapters on experts are plain ones",
    source="peft 0.21 lora/layer.py, ParamWrapper: refuses dropout and DoRA, and has no weight to take a start out of",
    fixes=(
        ATTENTION,
        Fix(
            "Plain adapters",
            {"lora.dropout": 0.0, "lora.use_dora": False, "lora.init": "default"},
            safe=False,
            cost="learns a little slower",
        ),
    ),
    fails_on=Example({"lora.use_dora": True}, facts=SHAPELESS),
    passes_on=Example({"lora.use_dora": True, "lora.targets": "attention"}, facts=SHAPELESS),
)
def experts_are_plain(case: Case) -> str | None:
    """The experts of a layer are one stacked parameter. An adapter on it is added to the weights before they are used,
    so that there is no input to drop from, and no row to measure."""
    asked = case.spec.adapts_experts(case.facts.stacked) and not case.spec.lora.is_plain
    return "The model is a mixture of experts, and they would carry adapters." if asked else None


@rule(
    "ADP008",
    "error",
    fields=("lora.target_modules",),
    title="Two layers of an expert are one weight",
    source="peft 0.21 utils/transformers_weight_conversion.py: Cannot convert PEFT target(s) without also targeting",
    fails_on=Example({**NAMED, "lora.target_modules": ("q_proj", STACKED[0])}, facts=SHAPELESS),
    passes_on=Example({**NAMED, "lora.target_modules": STACKED}, facts=SHAPELESS),
)
def half_a_weight(case: Case) -> Violation | None:
    """The experts of a layer are kept as one weight, in which two of their linear layers lie side by side. An adapter
    lies on both or on none."""
    pair = case.facts.stacked[:2]
    asked = case.spec.lora.target_modules if _lora(case) and case.spec.lora.targets == "custom" else ()
    there = [name for name in pair if name in asked]
    if len(there) != 1:
        return None
    (other,) = set(pair) - set(there)
    kept = tuple(name for name in asked if name not in pair)
    field = "lora.target_modules"
    both = Fix(f"Name {other} too", {field: (*asked, other)}, safe=False, cost="a larger adapter")
    less = Fix(f"Leave out {there[0]}", {field: kept}, safe=False, cost="a smaller adapter")
    return Violation(f"{there[0]} is named, and {other} is not.", (both, less) if kept else (both,))


@rule(
    "ADP009",
    "advice",
    fields=("lora.targets", "lora.r"),
    title="Adapters on every expert",
    source="peft 0.21 lora/layer.py ParamWrapper: a rank for each expert; weights and adapter are added at each pass",
    fixes=(ATTENTION,),
    fails_on=Example({}, H100, MIXED),
    passes_on=Example({"lora.targets": "attention"}, H100, MIXED),
)
def on_every_expert(case: Case) -> str | None:
    """An adapter on stacked experts has its rank once for each of them, and is added to a copy of their weights before
    they are used: many trained weights, the memory of a second model without checkpointing, and slow steps."""
    shape = case.shape
    if shape is None or not shape.experts or not case.spec.adapts_experts(case.facts.stacked):
        return None
    return f"{shape.experts} experts a layer; {trainable(case.spec, shape):,} weights are trained."
