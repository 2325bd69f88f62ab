"""Rules about which parameters are trained: LoRA targets, modules_to_save, frozen layers, learning rate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from backend import registry
from backend.modelspec import (
    ModelShape,
    adaptable_names,
    existing_names,
    lora_modules,
    matches,
    trainable_parameters,
)
from backend.rules.base import Case, Example, Fix, Violation, advice, error, names, warning
from backend.rules.common_fixes import ZERO3, unusual_rate
from backend.rules.examples import DEMO, H100, LLAMA_8B
from backend.wording import counted

ALL_LINEAR = Fix(
    "Adapt all linear layers", {"lora.targets": "all-linear"}, safe=False, cost="more trainable parameters"
)
CUSTOM_TARGETS = {"lora.targets": "custom"}
EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in", "embeddings")  # names of the input embeddings
FREEZE = {"method.kind": "freeze"}


def _lora_shape(case: Case) -> ModelShape | None:
    """The model's shape, if LoRA is used and the shape is known."""
    return case.shape if case.spec.method.kind == "lora" else None


def _names_patch(option: str, kept: Iterable[str]) -> dict[str, Any]:
    return {option: tuple(kept)}


@error(
    "MTH001",
    fields=("lora.target_modules",),
    title="No LoRA target modules are set",
    source="peft 0.21 tuners_utils.py: target modules must match at least one module",
    fixes=(ALL_LINEAR,),
    fails_on=Example(CUSTOM_TARGETS),
    passes_on=Example({**CUSTOM_TARGETS, "lora.target_modules": ("q_proj", "v_proj")}),
    proof="launch",
)
def missing_lora_targets(case: Case) -> Violation | None:
    """PEFT adds adapters only to the modules in lora.target_modules. Without any there is nothing to train, and PEFT
    raises an error."""
    method, shape = case.spec.method, case.shape
    if method.kind != "lora" or case.spec.lora.targets != "custom" or case.spec.lora.target_modules:
        return None
    message = "lora.targets is custom and lora.target_modules is empty."
    if shape is None:
        return Violation(f"{message} Each entry is the end of a module name, such as q_proj.")
    every = Fix(
        f"Target {names(shape.lora_target_names)}", _names_patch("lora.target_modules", shape.lora_target_names), False
    )
    return Violation(
        f"{message} The linear layers of {shape.architecture} are {names(shape.lora_target_names)}.", (every,)
    )


@error(
    "MTH002",
    fields=("lora.target_modules",),
    title="A LoRA target is not a linear layer of the model",
    source="peft 0.21 tuners_utils.py: Target modules not found in the base model",
    fixes=(ALL_LINEAR,),
    fails_on=Example({**CUSTOM_TARGETS, "lora.target_modules": ("q_proj", "c_attn")}),
    passes_on=Example({**CUSTOM_TARGETS, "lora.target_modules": ("q_proj", "self_attn.v_proj")}),
    proof="launch",
)
def unknown_lora_target(case: Case) -> Violation | None:
    """Module names differ between architectures. PEFT raises an error if no target matches a module, and silently
    skips a single target that matches none. Adapters on embeddings are not supported: many models tie the embeddings to
    the output head, and an adapter on only one of them would break the tie. lora.modules_to_save trains the embeddings
    in full."""
    shape, method = case.shape, case.spec.method
    if method.kind != "lora" or case.spec.lora.targets != "custom":
        return None
    targets = [name for name in case.spec.lora.target_modules if shape is None or not _is_lm_head(shape, name)]
    unknown = _without_adapter(case, targets)
    if not unknown:
        return None
    kept = [name for name in targets if name not in unknown]
    fixes = (_remove_fix(unknown, "lora.target_modules", kept),) if kept else ()
    if shape is None:
        return Violation(_missing_modules(case, "lora.target_modules", unknown), fixes)
    message = (
        f"lora.target_modules has {names(unknown)}, which matches no layer of {shape.architecture} that can be "
        f"adapted; its linear layers are {names(shape.lora_target_names)}."
    )
    return Violation(message, (*_train_in_full(case, unknown, kept), *fixes))


def _train_in_full(case: Case, unknown: Sequence[str], kept: Sequence[str]) -> tuple[Fix, ...]:
    """Embeddings can be trained in full instead, next to the adapters of other layers."""
    embeddings = [name for name in unknown if name.rpartition(".")[2] in EMBEDDINGS]
    if not kept or embeddings != list(unknown):
        return ()
    saved = [*case.spec.lora.modules_to_save, *(n for n in embeddings if n not in case.spec.lora.modules_to_save)]
    patch = {**_names_patch("lora.target_modules", kept), **_names_patch("lora.modules_to_save", saved)}
    return (Fix(f"Train {names(embeddings)} in full", patch, False, "more memory; the adapter file becomes larger"),)


def _remove_fix(removed: Iterable[str], option: str, kept: Iterable[str]) -> Fix:
    return Fix(f"Remove {names(list(removed))}", _names_patch(option, kept), False)


def _without_adapter(case: Case, targets: list[str]) -> list[str]:
    """The names that match no module that LoRA can adapt; without a shape, as far as the model's code shows this."""
    if case.shape:
        known = adaptable_names(case.shape, tuple(targets))
        return [name for name in targets if name not in known]
    return _missing(case, [name for name in targets if name not in case.facts.stacked_modules])


def _is_lm_head(shape: ModelShape, name: str) -> bool:
    return bool(name) and f".{shape.head}".endswith(f".{name}")


@error(
    "MTH003",
    fields=("lora.target_modules",),
    title="The output layer cannot be a LoRA target",
    source="trl 1.16 sft_trainer.py: the loss multiplies by lm_head.weight directly, so the adapter is never trained",
    fails_on=Example({**CUSTOM_TARGETS, "lora.target_modules": ("q_proj", "lm_head")}),
    passes_on=Example({**CUSTOM_TARGETS, "lora.target_modules": ("q_proj",)}),
    proof="launch",
)
def lora_on_output_layer(case: Case) -> Violation | None:
    """TRL's loss multiplies the hidden states by the weight of the output layer and never calls the module, so an
    adapter on it would get no gradient. If the weight is tied to the input embeddings, merging the adapter would also
    silently change the embeddings."""
    shape, targets = _lora_shape(case), case.spec.lora.target_modules
    if shape is None or case.spec.lora.targets != "custom":
        return None
    if not any(_is_lm_head(shape, name) for name in targets):
        return None
    known = adaptable_names(shape, targets)
    kept = [name for name in targets if not _is_lm_head(shape, name) and name in known]
    fix = _remove_fix([shape.head], "lora.target_modules", kept) if kept else ALL_LINEAR
    message = f"lora.target_modules includes {shape.head}. Add it to lora.modules_to_save to train it in full."
    return Violation(message, (fix,))


@error(
    "MTH004",
    fields=("lora.modules_to_save",),
    title="A module in modules_to_save does not exist in the model",
    source="peft 0.21: a name that matches nothing is skipped without a warning",
    fails_on=Example({"lora.modules_to_save": ("embeddings",)}),
    passes_on=Example({"lora.modules_to_save": ("norm",)}),
    proof="launch",
)
def unknown_module_to_save(case: Case) -> Violation | None:
    """PEFT silently skips a name that matches no module, so the intended module would not be trained."""
    modules = case.spec.lora.modules_to_save if case.spec.method.kind == "lora" else ()
    unknown = _missing(case, modules)
    if not unknown:
        return None
    fix = _remove_fix(unknown, "lora.modules_to_save", (name for name in modules if name not in unknown))
    return Violation(_missing_modules(case, "lora.modules_to_save", unknown), (fix,))


def _missing(case: Case, listed: Sequence[str]) -> list[str]:
    """The names that no module has or may have. Without a shape the attribute names in the model's code decide; without
    those every name may exist."""
    if case.shape:
        existing = existing_names(case.shape, tuple(listed))
        return [name for name in listed if name not in existing]
    known = case.facts.module_attributes
    parts = {name: name.split(".") for name in listed} if known else {}
    return [name for name in parts if not all(part in known or part.isdigit() for part in parts[name])]


def _missing_modules(case: Case, option: str, unknown: list[str]) -> str:
    if case.shape is None:
        return f"{option} has {names(unknown)}, which is not an attribute name in the code of this model."
    return (
        f"{option} has {names(unknown)}, which matches no module of this model ({case.shape.model_type}); its modules "
        f"are {names(case.shape.module_names)}."
    )


@advice(
    "MTH005",
    fields=("lora.modules_to_save",),
    title="Tied input and output embeddings become two weights",
    source="verified with peft 0.21: only the copy in modules_to_save is trained, and a merged and reloaded model has "
    "both weights and computes the same logits",
    fails_on=Example({"lora.modules_to_save": ("embed_tokens",)}),
    passes_on=Example({"lora.modules_to_save": ("embed_tokens",)}, H100, replace(DEMO, shape=LLAMA_8B)),
)
def tied_embeddings_in_modules_to_save(case: Case) -> Violation | None:
    """The input embeddings and the output layer of this model are one tied weight. PEFT trains a copy for one of the
    two, and the other one keeps the base weight. A merged model computes the same logits, but has both weights, with
    tie_word_embeddings off: it is larger by one embedding matrix."""
    tied = _tied_modules(case)
    if not tied:
        return None
    message = f"lora.modules_to_save has {names(tied)}, and the model has tie_word_embeddings set."
    return Violation(message, (_without_tied(case, tied),))


def _tied_modules(case: Case) -> list[str]:
    """The modules to save whose weight is shared by the input embeddings and the output layer."""
    shape = _lora_shape(case)
    if not shape or not shape.tied:
        return []
    embeddings = shape.non_layer_modules[0].path
    return [name for name in case.spec.lora.modules_to_save if _is_lm_head(shape, name) or matches(embeddings, name)]


def _without_tied(case: Case, tied: list[str]) -> Fix:
    return _remove_fix(
        tied, "lora.modules_to_save", (name for name in case.spec.lora.modules_to_save if name not in tied)
    )


@error(
    "MTH011",
    fields=("lora.modules_to_save", "parallel.strategy"),
    title="FSDP2 cannot shard a trainable copy of a tied weight",
    source="torch 2.13 distributed/fsdp/_fully_shard/_fsdp_state.py: shared with a parameter of another group; peft "
    "0.21 copies one of the two",
    fails_on=Example({"lora.modules_to_save": ("embed_tokens",), "parallel.strategy": "fsdp2"}),
    passes_on=Example({"lora.modules_to_save": ("embed_tokens",), "parallel.strategy": "zero3"}),
    proof="launch",
)
def tied_module_copy_with_fsdp2(case: Case) -> Violation | None:
    """FSDP2 puts modules that share a weight into one group. PEFT replaces one of the two modules by a trainable copy.
    The frozen original then belongs to two groups, and fully_shard raises an error."""
    tied = _tied_modules(case)
    if not tied or not case.run.fsdp_version:
        return None
    message = (
        f"lora.modules_to_save has {names(tied)}, the model has tie_word_embeddings set, and the strategy is "
        f"{case.strategy.label}."
    )
    return Violation(message, (ZERO3, replace(_without_tied(case, tied), cost="the tied embeddings are not trained")))


@error(
    "MTH006",
    fields=("method.freeze_trainable_layers",),
    title="freeze_trainable_layers exceeds the number of layers",
    source="arithmetic: config.json",
    fails_on=Example({**FREEZE, "method.freeze_trainable_layers": 99}),
    passes_on=Example({**FREEZE, "method.freeze_trainable_layers": -2}),
    proof="launch",
)
def too_many_trainable_layers(case: Case) -> Violation | None:
    """A positive value trains that many of the last layers, a negative value that many of the first layers. Its
    absolute value cannot exceed num_hidden_layers."""
    shape, count = case.shape, case.spec.method.freeze_trainable_layers
    if shape is None or case.spec.method.kind != "freeze" or abs(count) <= shape.layers:
        return None
    every = shape.layers if count > 0 else -shape.layers
    fixes = (Fix(f"Train all {shape.layers} layers", {"method.freeze_trainable_layers": every}, False),)
    message = f"method.freeze_trainable_layers is {count}, and the model has {counted(shape.layers, 'layer')}."
    return Violation(message, fixes)


@error(
    "MTH007",
    fields=("method.freeze_trainable_layers", "method.freeze_extra_modules"),
    title="The model would have no trainable parameters",
    source="arithmetic: no parameter is left to train",
    fixes=(Fix("Train the last two layers", {"method.freeze_trainable_layers": 2}, safe=False),),
    fails_on=Example({**FREEZE, "method.freeze_trainable_layers": 0}),
    passes_on=Example({**FREEZE, "method.freeze_trainable_layers": 0, "method.freeze_extra_modules": ("norm",)}),
    proof="launch",
)
def no_trainable_parameters(case: Case) -> str | None:
    """PyTorch raises an error for an optimizer without parameters. Some modules have none, such as norms of OLMo."""
    method, shape = case.spec.method, case.shape
    if method.kind != "freeze" or method.freeze_trainable_layers:
        return None
    if not method.freeze_extra_modules:
        return "method.freeze_trainable_layers is 0 and method.freeze_extra_modules is empty."
    if shape is None or _missing(case, method.freeze_extra_modules):
        return None
    if trainable_parameters(case.spec, shape):
        return None
    modules = names(method.freeze_extra_modules)
    return f"method.freeze_trainable_layers is 0, and {modules} in method.freeze_extra_modules has no parameters."


@error(
    "MTH008",
    fields=("method.freeze_extra_modules",),
    title="A module in freeze_extra_modules does not exist in the model",
    source="arithmetic: the model's module names",
    fails_on=Example({**FREEZE, "method.freeze_extra_modules": ("wte",)}),
    passes_on=Example({**FREEZE, "method.freeze_extra_modules": ("embed_tokens",)}),
    proof="launch",
)
def unknown_extra_module(case: Case) -> Violation | None:
    """A name that matches no module selects no parameters, so the intended module would stay frozen."""
    method, option = case.spec.method, "method.freeze_extra_modules"
    if method.kind != "freeze":
        return None
    unknown = _missing(case, method.freeze_extra_modules)
    if not unknown:
        return None
    kept = [name for name in method.freeze_extra_modules if name not in unknown]
    patch = _names_patch(option, kept)
    if not method.freeze_trainable_layers and not kept:
        patch["method.freeze_trainable_layers"] = 2
    return Violation(_missing_modules(case, option, unknown), (Fix(f"Remove {names(unknown)}", patch, False),))


USUAL_RANK = 16


@advice(
    "MTH009",
    fields=("lora.r",),
    title="LoRA rank exceeds the size of an adapted layer",
    source="Hu et al. 2021, LoRA: the rank is meant to be far below the layer's dimensions",
    fixes=(
        Fix(f"Set the LoRA rank to {USUAL_RANK}", {"lora.r": USUAL_RANK, "lora.alpha": 2.0 * USUAL_RANK}, safe=False),
    ),
    fails_on=Example({"lora.r": 1024}),
    passes_on=Example({"lora.r": 64}),
)
def lora_rank_exceeds_layer(case: Case) -> str | None:
    """With a rank above the smaller dimension of a layer, A and B have more parameters than the layer's own weight, but
    cannot express more changes than training that weight itself. Layers below the usual rank, such as the gate of a
    shared expert with one output, do not count: their adapters are tiny anyway."""
    shape = _lora_shape(case)
    if shape is None:
        return None
    sizes = [min(leaf.in_features, leaf.out_features) for leaf in lora_modules(case.spec.lora, shape) if leaf.is_linear]
    rank, smallest = case.spec.lora.r, min((size for size in sizes if size >= USUAL_RANK), default=0)
    if not rank > smallest > 0:
        return None
    return f"lora.r is {rank}, and an adapted layer has only {smallest} input or output features."


METHOD_NAMES = {"lora": "LoRA", "freeze": "training some of the layers", "full": "full fine-tuning"}


@warning(
    "MTH010",
    fields=("train.learning_rate", "method.kind"),
    title="Unusual learning rate for this method",
    source="peft's and trl's examples; Biderman et al. 2024, LoRA Learns Less and Forgets Less",
    fails_on=Example({"method.kind": "full", "train.learning_rate": 1e-3}),
    passes_on=Example({"method.kind": "full", "train.learning_rate": 2e-5}),
)
def unusual_learning_rate(case: Case) -> Violation | None:
    """A learning rate that is too high makes the loss diverge or become NaN; one that is too low leaves the model
    almost unchanged. Full fine-tuning usually needs about a tenth of LoRA's learning rate, and large models need less
    than small ones; an adapter that is trained further may need less, too."""
    rate, kind = case.spec.train.learning_rate, case.spec.method.kind
    rates, method = registry.SFT_RATES[kind], METHOD_NAMES[kind]
    highest, lowest = rates.highest, 0.0 if case.spec.lora.adapter_path else rates.lowest
    if kind == "full" and case.shape is not None and case.shape.parameters >= registry.LARGE:
        highest, method = registry.HIGHEST_OF_LARGE, f"{method} of a model of this size"
    if case.spec.train.stage == "pretraining":
        rates, method = registry.PRETRAINING_RATES._replace(first=rates.first), "pretraining"
        lowest, highest = rates.lowest, rates.highest
    if case.spec.train.stage in registry.LOW_RATE_STAGES or lowest <= rate <= highest or not case.optimizer.is_adaptive:
        return None
    return unusual_rate(rate, rates, method)
