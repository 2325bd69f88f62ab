"""Rules about LoRA and its variants: initialization, scaling, DoRA, LoRA+, and adapters on experts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from backend import registry, wording
from backend.modelspec import ModuleSpec, is_attention, lora_modules, trainable_parameters
from backend.rules.base import Case, Example, Fix, Violation, advice, error, names, set_to, warning
from backend.rules.common_fixes import ATTENTION_ONLY
from backend.rules.examples import DEMO, EQUIPPED, GPT2, H100, MOE

DEFAULT_INIT = Fix("Use the default initialization", {"lora.init": "default"}, safe=False, cost="slower convergence")
INITS_FROM_WEIGHTS = tuple(name for name, row in registry.LORA_INITS.items() if row.changes_base_weights)
MAX_LORA_B_RATE = 2e-2  # learning rate of LoRA+'s B matrices
MAX_RSLORA_SCALE = 10
PAIRS = {"data.builtin": "train-pairs"}
PRECOMPUTED = {"preference.precompute_ref_log_probs": True}


def _uses_lora(case: Case) -> bool:
    return case.spec.method.kind == "lora"


def _init_label(case: Case) -> str:
    return registry.LORA_INITS[case.spec.lora.init].label


@error(
    "ADP001",
    fields=("lora.r", "lora.init"),
    title="Orthogonal LoRA initialization needs an even rank",
    source="peft 0.21 lora/layer.py: orthogonal_init rejects an odd rank",
    fails_on=Example({"lora.init": "orthogonal", "lora.r": 5}),
    passes_on=Example({"lora.init": "orthogonal", "lora.r": 6}),
    proof="launch",
)
def orthogonal_init_with_odd_rank(case: Case) -> Violation | None:
    """Orthogonal initialization gives one half of an orthonormal basis to A and the other half to B, so that B(A(x)) is
    zero at the first step. PEFT raises an error if the rank cannot be halved."""
    rank = case.spec.lora.r
    if not _uses_lora(case) or case.spec.lora.init != "orthogonal" or rank % 2 == 0:
        return None
    even = Fix(f"Set the LoRA rank to {rank + 1}", {"lora.r": rank + 1}, False, "slightly more trainable parameters")
    return Violation(f"lora.init is orthogonal and lora.r is {rank}, which is odd.", (even, DEFAULT_INIT))


@error(
    "ADP002",
    fields=("lora.r", "lora.init"),
    title="LoRA rank exceeds the rank of an adapted layer",
    source="verified with peft 0.21: the adapter silently gets a smaller rank than its configuration says, and cannot "
    "be loaded again",
    fails_on=Example({"lora.init": "pissa", "lora.r": 1024, "lora.alpha": 1024.0}),
    passes_on=Example({"lora.init": "pissa", "lora.r": 64}),
    proof="launch",
)
def init_rank_exceeds_layer(case: Case) -> Violation | None:
    """PiSSA and OLoRA take A and B from a decomposition of the base weight, whose rank is at most the smaller dimension
    of the layer. For a higher lora.r, PEFT silently creates an adapter of lower rank than adapter_config.json states,
    and the saved adapter cannot be loaded."""
    shape, rank = case.shape, case.spec.lora.r
    if not _uses_lora(case) or case.spec.lora.init not in INITS_FROM_WEIGHTS or shape is None:
        return None
    smallest = min(
        (min(leaf.in_features, leaf.out_features) for leaf in lora_modules(case.spec.lora, shape)), default=rank
    )
    if rank <= smallest:
        return None
    message = (
        f"lora.r is {rank}, but the smallest adapted layer has only {smallest} input or output features: "
        f"{_init_label(case)} cannot provide {rank} components."
    )
    fix = Fix(f"Set the LoRA rank to {smallest}", {"lora.r": smallest}, False, "fewer trainable parameters")
    return Violation(message, (fix, DEFAULT_INIT))


@error(
    "ADP003",
    fields=("lora.init",),
    title="OLoRA does not support Conv1D layers",
    source="peft 0.21 lora/layer.py: olora_init does not transpose the weights of a Conv1D",
    fixes=(DEFAULT_INIT, Fix("Use PiSSA", {"lora.init": "pissa"}, safe=False, cost="an SVD of each weight at startup")),
    fails_on=Example({"lora.init": "olora"}, facts=replace(DEMO, shape=GPT2)),
    passes_on=Example({"lora.init": "pissa"}, facts=replace(DEMO, shape=GPT2)),
)
def olora_with_conv1d(case: Case) -> str | None:
    """OpenAI GPT and GPT-2 store their weights transposed, as Conv1D. peft's olora_init decomposes them without
    transposing them, and the first forward pass fails because the shapes of A and B do not match the layer."""
    if not _uses_lora(case) or case.spec.lora.init != "olora" or case.shape is None:
        return None
    if case.shape.model_type not in registry.CONV1D_MODELS:
        return None
    return f"lora.init is olora, and the linear layers of {case.shape.architecture} are Conv1D modules."


@warning(
    "ADP004",
    fields=("lora.loraplus_lr_ratio", "train.learning_rate"),
    title="LoRA+ learning rate of the B matrices is very high",
    source="Hayou et al. 2024, LoRA+: recommends a ratio of 16 and a learning rate somewhat below LoRA's",
    fails_on=Example({"lora.loraplus_lr_ratio": 256.0}),
    passes_on=Example({"lora.loraplus_lr_ratio": 16.0}),
)
def loraplus_rate_too_high(case: Case) -> Violation | None:
    """LoRA+ multiplies the learning rate of the B matrices by loraplus_lr_ratio. If the product is too high, the loss
    diverges. SGD, whose steps depend on the size of the gradients, needs higher rates."""
    ratio, rate = case.spec.lora.loraplus_lr_ratio, case.spec.train.learning_rate
    if not _uses_lora(case) or ratio == 1 or ratio * rate <= MAX_LORA_B_RATE or not case.optimizer.is_adaptive:
        return None
    lower = float(f"{5e-3 / ratio:.1g}")
    if rate * 16 <= MAX_LORA_B_RATE:
        fix = Fix("Set the LoRA+ learning rate ratio to 16", {"lora.loraplus_lr_ratio": 16.0}, False)
    else:
        fix = Fix(f"Set the learning rate to {wording.learning_rate(lower)}", {"train.learning_rate": lower}, False)
    message = (
        f"A learning rate of {wording.learning_rate(rate)} and a loraplus_lr_ratio of {ratio:g} give the B matrices a "
        f"learning rate of {wording.learning_rate(rate * ratio)}; values above "
        f"{wording.learning_rate(MAX_LORA_B_RATE)} usually diverge."
    )
    return Violation(message, (fix,))


@advice(
    "ADP005",
    fields=("lora.alpha", "lora.use_rslora"),
    title="rsLoRA scaling factor is very large",
    source="Kalajdzievski 2023, rsLoRA: the scaling factor is alpha / sqrt(rank)",
    fails_on=Example({"lora.use_rslora": True, "lora.r": 64, "lora.alpha": 128.0}),
    passes_on=Example({"lora.use_rslora": True, "lora.r": 64, "lora.alpha": 16.0}),
)
def rslora_scale_too_large(case: Case) -> Violation | None:
    """With rsLoRA, alpha is divided by the square root of the rank, not by the rank. The usual alpha of twice the rank
    then scales the adapter far more than in LoRA and acts like a learning rate that is too high."""
    alpha, rank = case.spec.lora.alpha, case.spec.lora.r
    scale = alpha / math.sqrt(rank)
    if not _uses_lora(case) or not case.spec.lora.use_rslora or scale <= MAX_RSLORA_SCALE:
        return None
    usual = float(round(2 * math.sqrt(rank)))
    message = f"The scaling factor is {alpha:g} / sqrt({rank}) = {scale:.3g}; about 2 is usual."
    return Violation(message, (Fix(set_to("lora.alpha", f"{usual:g}"), {"lora.alpha": usual}, False),))


@advice(
    "ADP006",
    fields=("lora.use_dora", "lora.dropout"),
    title="DoRA with dropout computes each base layer twice",
    source="peft 0.21 lora/variants.py: with dropout the output of the base layer cannot be reused",
    fixes=(Fix("Turn off LoRA dropout", {"lora.dropout": 0.0}, safe=False),),
    fails_on=Example({"lora.use_dora": True, "lora.dropout": 0.1}),
    passes_on=Example({"lora.use_dora": True}),
)
def dora_with_dropout(case: Case) -> str | None:
    """DoRA needs the base layer's output for the same input that the adapter gets. Without dropout, PEFT reuses the
    output of the base layer's forward pass; with dropout, it multiplies the input after dropout by the base weight a
    second time."""
    dropout = case.spec.lora.dropout
    if not _uses_lora(case) or not case.spec.lora.use_dora or not dropout:
        return None
    return f"lora.use_dora is set and lora.dropout is {dropout:g}, so every training step is slower."


CUSTOM_TARGETS = {"lora.targets": "custom"}
EXPERT_LAYERS = registry.STACKED_EXPERTS["qwen3_moe"]
MLP_ONLY = (ModuleSpec("mixer.in_proj", 64 * 64, 64, 64),)
ROUTER = 1  # ModuleSpec.stacked
ATTENTION = ModuleSpec("self_attn.q_proj", 64 * 64, 64, 64)
GATED = ModuleSpec("mlp.shared_expert.gate_proj", 64 * 64, 64, 64, supports_lora=False)
KNOWN_MOE = replace(DEMO, shape=MOE, stacked_modules=EXPERT_LAYERS)
UNKNOWN_MOE = replace(
    DEMO, shape=None, stacked_modules=EXPERT_LAYERS, shape_unknown_reason="it is a mixture of experts"
)


@error(
    "ADP007",
    fields=("lora.targets", "lora.dropout", "lora.use_dora", "lora.init"),
    title="LoRA on experts supports neither dropout, DoRA nor weight-based initialization",
    source="peft 0.21 lora/layer.py, ParamWrapper: rejects dropout and DoRA, and has no weight attribute to initialize "
    "from",
    fixes=(
        ATTENTION_ONLY,
        Fix(
            "Use plain LoRA",
            {"lora.dropout": 0.0, "lora.use_dora": False, "lora.init": "default"},
            safe=False,
            cost="no dropout or DoRA; slower convergence",
        ),
    ),
    fails_on=Example({"lora.use_dora": True}, facts=UNKNOWN_MOE),
    passes_on=Example({"lora.use_dora": True, "lora.targets": "attention"}, facts=UNKNOWN_MOE),
)
def lora_variant_on_experts(case: Case) -> str | None:
    """The experts of a layer are one stacked parameter, not linear modules. PEFT adds the adapter to that parameter
    before the forward pass, so it has no layer input for dropout and no weight matrix for DoRA, PiSSA or OLoRA."""
    lora = case.spec.lora
    if not case.spec.adapts_experts(case.facts.stacked_modules) or lora.is_plain:
        return None
    used = [name for name, on in (("dropout", lora.dropout), ("DoRA", lora.use_dora)) if on]
    if lora.init not in ("default", "gaussian"):
        used.append(f"the {_init_label(case)} initialization")
    return f"LoRA would be applied to the experts of this mixture-of-experts model together with {names(used)}."


@error(
    "ADP008",
    fields=("lora.target_modules",),
    title="Only one of two fused expert projections is a LoRA target",
    source="peft 0.21 utils/transformers_weight_conversion.py: Cannot convert PEFT target(s) without also targeting",
    fails_on=Example({**CUSTOM_TARGETS, "lora.target_modules": ("q_proj", EXPERT_LAYERS[0])}, facts=UNKNOWN_MOE),
    passes_on=Example({**CUSTOM_TARGETS, "lora.target_modules": EXPERT_LAYERS}, facts=UNKNOWN_MOE),
)
def lora_on_half_of_fused_experts(case: Case) -> Violation | None:
    """The gate and up projections of all experts are stored as one fused parameter. PEFT can adapt that parameter only
    as a whole, so both projections must be targets, or neither."""
    fused = case.facts.stacked_modules[:2]
    targets = case.spec.lora.target_modules if _uses_lora(case) and case.spec.lora.targets == "custom" else ()
    named = [name for name in fused if any(target.rpartition(".")[2] == name for target in targets)]
    if len(named) != 1:
        return None
    (missing,) = set(fused) - set(named)
    kept = tuple(target for target in targets if target.rpartition(".")[2] not in fused)
    field = "lora.target_modules"
    both = Fix(f"Add {missing}", {field: (*targets, missing)}, safe=False, cost="a larger adapter")
    neither = Fix(f"Remove {named[0]}", {field: kept}, safe=False, cost="a smaller adapter")
    message = f"lora.target_modules has {named[0]} but not {missing}, and the model stores them as one parameter."
    return Violation(message, (both, neither) if kept else (both,))


@advice(
    "ADP009",
    fields=("lora.targets", "lora.r"),
    title="LoRA on every expert trains many parameters and is slow",
    source="peft 0.21 lora/layer.py ParamWrapper: A and B for each expert; base weight and adapter are added in every "
    "forward pass",
    fixes=(ATTENTION_ONLY,),
    fails_on=Example({}, H100, KNOWN_MOE),
    passes_on=Example({"lora.targets": "attention"}, H100, KNOWN_MOE),
)
def lora_on_every_expert(case: Case) -> str | None:
    """An adapter on stacked experts has an A and a B matrix of the full rank for every expert. PEFT adds it to a copy
    of the expert weights in every forward pass, which slows down each step and, without activation checkpointing, takes
    as much memory as a second copy of the experts."""
    shape = case.shape
    if shape is None or not shape.most_experts or not case.spec.adapts_experts(case.facts.stacked_modules):
        return None
    count = trainable_parameters(case.spec, shape)
    experts = f"{shape.most_experts} experts in each layer that has experts"
    return f"The adapters cover {experts}: {count:,} trainable parameters."


@error(
    "ADP010",
    fields=("lora.targets", "lora.target_modules"),
    title="Some linear layers of this architecture cannot have a LoRA adapter",
    source="peft 0.21 tuners_utils.py, _check_lora_target_modules_mamba: out_proj and conv1d of Mamba layers; "
    "tuners/lora/layer.py, Linear.forward: the output of the layer must be a tensor; "
    "utils/transformers_weight_conversion.py: renames layers when an adapter is loaded, and takes every target that is "
    "named like an expert projection for the experts",
    fails_on=Example(facts=replace(DEMO, lora_refused=("out_proj",))),
    passes_on=Example(
        {"lora.targets": "custom", "lora.target_modules": ("q_proj",)}, facts=replace(DEMO, lora_refused=("out_proj",))
    ),
)
def lora_on_unsupported_layers(case: Case) -> Violation | None:
    """An adapter adds its output to the output of a linear layer. Mamba layers read the weights of out_proj and dt_proj
    without calling these layers, and routers that are linear layers return several tensors. PEFT raises an error, or
    the adapter has no effect. When PEFT loads the trained adapter, it gives some other layers names that the model does
    not have, and ignores their adapters. PEFT mistakes an attention layer with the name of an expert projection, such
    as gate_proj, for the experts. lora.targets: all-linear and attention include these layers. DPO and
    KTO add a reference adapter, which PEFT 0.21 cannot put on a quantized router."""
    lora = case.spec.lora
    if not _uses_lora(case):
        return None
    refused = (*case.facts.lora_refused, *_quantized_routers(case))
    if lora.targets == "attention":
        refused = targeted = _ends(leaf for leaf in _attention(case) if not leaf.accepts_lora)
        wanted = _ends(_attention(case))
    elif lora.targets == "all-linear":
        targeted, wanted = refused, case.shape.lora_target_names if case.shape else ()
    else:
        targeted, wanted = tuple(n for n in lora.target_modules if n in refused), lora.target_modules
    if not targeted:
        return None
    kept = tuple(name for name in wanted if name not in refused)
    others = "attention" if lora.targets == "attention" else "linear"
    fixes = (_other_layers(others, kept, "fewer adapted layers"),) if kept else ()
    message = f"Adapters on {names(targeted)} fail, have no effect or cannot be loaded in this architecture."
    return Violation(message, fixes)


def _quantized_routers(case: Case) -> tuple[str, ...]:
    """Routers on which the reference adapter of DPO and KTO cannot be put, measured with peft 0.21.2."""
    has_reference = case.spec.train.stage in ("dpo", "kto") and case.spec.method.quantization != "none"
    return ("gate",) if has_reference and case.facts.model_type == "afmoe" else ()


def _other_layers(kind: str, kept: tuple[str, ...], cost: str) -> Fix:
    """The fix that adapts the layers of a kind except those that cannot have an adapter."""
    patch = {"lora.targets": "custom", "lora.target_modules": kept}
    return Fix(f"Adapt all other {kind} layers", patch, safe=False, cost=cost)


def _attention(case: Case) -> list[ModuleSpec]:
    """The linear layers that lora.targets: attention selects; empty if the architecture is not known."""
    leaves = case.shape.modules() if case.shape else ()
    return [leaf for leaf in leaves if leaf.is_linear and is_attention(leaf.path)]


def _ends(leaves: Iterable[ModuleSpec]) -> tuple[str, ...]:
    """The last names of these modules, each once."""
    return tuple(dict.fromkeys(leaf.path.rpartition(".")[2] for leaf in leaves))


@error(
    "ADP011",
    fields=("lora.targets",),
    title="The model has no layers that are named attention",
    source="backend/train/adapters.py: lora.targets: attention selects the linear layers with attn or attention in "
    "their name; transformers 5.23 models/mamba, nemotron_h and recurrent_gemma have none",
    fails_on=Example({"lora.targets": "attention"}, facts=replace(DEMO, shape=replace(MOE, layer=MLP_ONLY))),
    passes_on=Example({"lora.targets": "attention"}),
)
def lora_on_missing_attention(case: Case) -> Violation | None:
    """lora.targets: attention adapts the linear layers that have attn or attention in their name. State-space models
    such as Mamba have no such layers, and some hybrid models give their attention layers other names."""
    if not _uses_lora(case) or case.spec.lora.targets != "attention" or case.shape is None or _attention(case):
        return None
    refused = case.facts.lora_refused
    kept = tuple(name for name in case.shape.lora_target_names if name not in refused)
    all_linear = Fix("Adapt all linear layers", {"lora.targets": "all-linear"}, False, "a larger adapter")
    fixes = (_other_layers("linear", kept, "a larger adapter"),) if refused and kept else (all_linear,)
    message = f"lora.targets is attention, but no linear layer of {case.shape.architecture} has attention in its name."
    return Violation(message, fixes)


@advice(
    "ADP012",
    fields=("lora.targets",),
    title="LoRA on all linear layers leaves out some of them",
    source="peft 0.21 utils/transformers_weight_conversion.py, _convert_peft_config_moe: targets that are named like "
    "an expert projection select the stacked experts only",
    manual_fix="To train these layers too, train all parameters.",
    fails_on=Example(facts=replace(DEMO, shape=replace(MOE, layer=(ATTENTION, GATED)))),
    passes_on=Example(facts=replace(DEMO, shape=replace(MOE, layer=(ATTENTION,)))),
)
def lora_leaves_out_linear_layers(case: Case) -> str | None:
    """In a mixture of experts, PEFT takes names such as gate_proj for names of the stacked experts. Dense MLPs, shared
    experts and gates with these names get no adapter and stay as in the base model, and so do stacked experts whose
    names PEFT does not know."""
    if not _uses_lora(case) or case.spec.lora.targets != "all-linear" or case.shape is None:
        return None
    without = [
        ".".join(leaf.path.rsplit(".", 2)[-2:])
        for leaf in case.shape.modules()
        if leaf.in_features and leaf.stacked != ROUTER and leaf.path != case.shape.head and not leaf.accepts_lora
    ]
    left_out = [path for path in dict.fromkeys(without) if path.rpartition(".")[2] not in case.facts.lora_refused]
    if not left_out:
        return None
    return f"lora.targets is all-linear, but PEFT puts no adapter on {names(left_out)} of {case.shape.architecture}."


ONE_RATE = ("lomo", "adalomo", "badam")  # optimizers that step with one learning rate for all parameters


@error(
    "ADP013",
    fields=("lora.loraplus_lr_ratio", "train.optim"),
    title="LoRA+ has no effect with this optimizer",
    source="lomo_optim 0.1 lomo.py: fused_backward takes one learning rate; badam 1.4 block_optim.py: _update_lr uses "
    "the rate of the first group",
    fixes=(
        Fix("Turn off LoRA+", {"lora.loraplus_lr_ratio": 1.0}, False),
        Fix("Use AdamW", {"train.optim": "adamw_torch"}, False, "more memory for the optimizer state"),
    ),
    fails_on=Example({"lora.loraplus_lr_ratio": 8.0, "train.optim": "badam"}, EQUIPPED),
    passes_on=Example({"lora.loraplus_lr_ratio": 8.0}),
)
def loraplus_without_groups(case: Case) -> str | None:
    """LoRA+ trains the B matrices with a higher learning rate. LOMO, AdaLOMO and BAdam have one learning rate for all
    parameters."""
    ratio, optimizer = case.spec.lora.loraplus_lr_ratio, case.spec.train.optim
    if not _uses_lora(case) or ratio == 1 or optimizer not in ONE_RATE:
        return None
    return f"lora.loraplus_lr_ratio is {ratio:g}, and train.optim is {optimizer}."


@error(
    "ADP014",
    fields=("lora.init", "save.merge_adapter"),
    title="Several adapters would change the same shared weights",
    source="peft 0.21 tuners/lora: each adapted layer subtracts its initial adapter from the shared weight, and "
    "merging adds each adapter to it; verified with Zamba2",
    fails_on=Example({"save.merge_adapter": True}, facts=replace(DEMO, has_shared_layers=True, model_type="zamba2")),
    passes_on=Example(facts=replace(DEMO, has_shared_layers=True, model_type="zamba2")),
)
def adapters_of_shared_layers(case: Case) -> Violation | None:
    """In this architecture several decoder layers contain the same weights, and PEFT gives each layer an adapter of its
    own. PiSSA and OLoRA subtract every adapter from the shared weight, and merging adds every adapter to it, but each
    layer is trained with its own adapter only."""
    if not _uses_lora(case) or not case.facts.has_shared_layers:
        return None
    found: dict[str, dict[str, object]] = {}  # what changes the weights -> the options without it
    if case.spec.lora.init in INITS_FROM_WEIGHTS:
        found[_init_label(case)] = {"lora.init": "default"}
    if case.spec.save.merge_adapter and case.spec.save.final_model:
        found["merging the adapter"] = {"save.merge_adapter": False}
    if not found:
        return None
    patch = {name: value for options in found.values() for name, value in options.items()}
    new, whole = "lora.init" in patch, "save.merge_adapter" in patch
    label = "Use the default initialization" if new else "Do not merge the adapter"
    label += ", without merging" if new and whole else ""
    fix = Fix(label, patch, False, "only the adapter is saved" if whole else "slower convergence")
    kind = case.facts.model_type
    message = f"Several decoder layers of {kind} share weights, which {names(list(found))} would change twice."
    return Violation(message, (fix,))


@error(
    "ADP015",
    fields=("lora.adapter_path",),
    title="The adapter to continue cannot be used",
    source="the folder itself; peft 0.21 peft_model.py: what does not fit is ignored with a warning, and the scale of "
    "an adapter follows from the options of the run",
    fixes=(Fix("Train a new adapter", {"lora.adapter_path": ""}, False, "the trained adapter is not used"),),
    fails_on=Example(
        {"lora.adapter_path": "/nowhere/model"},
        facts=replace(DEMO, adapter_problem="/nowhere/model has no adapter_model.safetensors."),
    ),
    passes_on=Example({"lora.adapter_path": "runs/a/model"}),
    proof="launch",
)
def unusable_adapter(case: Case) -> Violation | None:
    """A LoRA adapter can be continued only with the base model and the adapter options that it was trained with (rank,
    alpha, target modules, DoRA, rsLoRA, modules_to_save): with others, its weights do not fit or are scaled
    differently."""
    problem = case.facts.adapter_problem
    if not _uses_lora(case) or not case.spec.lora.adapter_path or not problem:
        return None
    options = dict(case.facts.adapter_options)
    fix = Fix("Use the options of this adapter", options, False, "those of this run are not used")
    return Violation(problem, (fix,) if options else (), ("lora.adapter_path", *options))


@error(
    "ADP016",
    fields=("lora.adapter_path", "train.stage"),
    title="The reference model would not have the continued adapter",
    source="TRL 1.16 trainer/dpo_trainer.py: log-probs are precomputed when the trainer is created, before the adapter "
    "is loaded; llamafactory 0.9.5 train/trainer_utils.py: create_ref_model takes the model without its adapter",
    manual_fix="To start from the trained model, merge the adapter into its base model, and set the merged model as "
    "model.path.",
    fails_on=Example({**PAIRS, "train.stage": "dpo", "lora.adapter_path": "runs/a/model", **PRECOMPUTED}),
    passes_on=Example({**PAIRS, "train.stage": "dpo", "lora.adapter_path": "runs/a/model"}),
)
def adapter_in_preference_stage(case: Case) -> Violation | None:
    """DPO and KTO keep a model close to its reference, which has to be the model that training starts with. With
    precomputed log-probs of the reference, and with LLaMA-Factory, the reference is the base model without an adapter,
    so the loss would pull a continued adapter back toward the base model."""
    spec = case.spec
    if not _uses_lora(case) or not spec.lora.adapter_path or not registry.STAGES[spec.train.stage].uses_reference_model:
        return None
    label, new = registry.STAGES[spec.train.stage].label, {"lora.adapter_path": ""}
    fixes = (Fix("Train a new adapter", new, False, "the trained adapter is not used"),)
    if spec.launch.trainer == "llamafactory":
        return Violation(
            f"In LLaMA-Factory, the reference model of {label} is the base model without an adapter.", fixes
        )
    if not spec.preference.precompute_ref_log_probs:
        return None
    off = Fix("Compute the reference during training", {"preference.precompute_ref_log_probs": False}, False, "slower")
    message = f"The precomputed log-probs of {label} would be those of the base model without the continued adapter."
    return Violation(message, (off, *fixes))
