"""Rules of what is trained: the model's folder, adapters, layers, learning rate.

Floor 3. Imports: below.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from backend.modelspec import ModelShape, adapted, matches, trainable
from backend.rules.base import Case, Example, Fix, Violation, counted, names, rule
from backend.rules.common_fixes import ZERO3
from backend.rules.examples import DEMO, H100, LLAMA_8B, PATH

BUILTIN = Fix("The built-in model", {"model.source": "builtin"}, safe=False, cost="another, small model")
ALL = Fix("All linear layers", {"lora.targets": "all-linear"}, safe=False, cost="more is trained")
CUSTOM = {"lora.targets": "custom"}
FREEZE = {"method.kind": "freeze"}


@rule(
    "MDL001",
    "error",
    fields=("model.path",),
    title="The model's folder cannot be used",
    source="transformers: what save_pretrained writes",
    fixes=(BUILTIN,),
    fails_on=Example(
        PATH, facts=replace(DEMO, shape=None, unknown="there is no config.json", model="x has no config.json.")
    ),
    passes_on=Example(PATH),
    proof="launch",
)
def model_folder(case: Case) -> str | None:
    """A model is a folder with config.json, weights (*.safetensors) and a tokenizer."""
    return case.facts.model if case.spec.model.source == "path" and case.facts.model else None


@rule(
    "MDL002",
    "error",
    fields=("model.hub_id",),
    title="No hub id is named",
    source="arithmetic: nothing to download",
    fixes=(BUILTIN,),
    fails_on=Example({"model.source": "hub"}),
    passes_on=Example({"model.source": "hub", "model.hub_id": "HuggingFaceTB/SmolLM2-135M"}),
    proof="launch",
)
def empty_hub_id(case: Case) -> str | None:
    """A model of the hub is named as organisation/name."""
    model = case.spec.model
    return "Write organisation/name." if model.source == "hub" and not model.hub_id.strip() else None


@rule(
    "MDL003",
    "error",
    fields=("data.chat_template", "model.path"),
    title="The model has no chat template",
    source="transformers 5.23: apply_chat_template refuses a tokenizer without one",
    fixes=(Fix("ChatML", {"data.chat_template": "chatml"}, safe=False),),
    fails_on=Example(PATH, facts=replace(DEMO, has_template=False)),
    passes_on=Example({**PATH, "data.chat_template": "chatml"}, facts=replace(DEMO, has_template=False)),
    proof="launch",
)
def no_template(case: Case) -> Violation | None:
    """A base model's tokenizer does not know how a conversation is written. ChatML is a good choice for one; it is
    saved with the trained model."""
    data, facts = case.spec.data, case.facts
    if case.spec.train.stage == "pretraining" or data.chat_template != "model" or facts.has_template is not False:
        return None
    if facts.format == "text":
        return None
    plain = Fix("Learn it as plain text", {"train.stage": "pretraining"}, safe=False, cost="no chat")
    fixes = (plain,) if case.spec.train.stage == "sft" else ()
    return Violation("Its tokenizer brings none, and the rows are conversations.", fixes)


@rule(
    "MDL004",
    "error",
    fields=("data.chat_template_file",),
    title="The template file cannot be used",
    source="transformers: a chat template is a Jinja text over messages",
    fixes=(Fix("The model's own template", {"data.chat_template": "model"}, safe=False),),
    fails_on=Example({"data.chat_template": "file"}, facts=replace(DEMO, template="No template file is named.")),
    passes_on=Example({"data.chat_template": "file", "data.chat_template_file": "t.jinja"}),
    proof="launch",
)
def template_file(case: Case) -> str | None:
    """The file must be readable and write the conversation, which it knows as messages."""
    return case.facts.template if case.spec.data.chat_template == "file" and case.facts.template else None


def _lora(case: Case) -> ModelShape | None:
    return case.shape if case.spec.method.kind == "lora" else None


def _listed(name: str, kept: Iterable[str]) -> dict[str, Any]:
    return {name: tuple(kept)}


@rule(
    "MTH001",
    "error",
    fields=("lora.target_modules",),
    title="No module is named for the adapter",
    source="peft 0.21 tuners_utils.py: target modules must match something",
    fixes=(ALL,),
    fails_on=Example(CUSTOM),
    passes_on=Example({**CUSTOM, "lora.target_modules": ("q_proj", "v_proj")}),
    proof="launch",
)
def no_targets(case: Case) -> Violation | None:
    """Adapters go where they are told. Without a name there is nothing to train."""
    method, shape = case.spec.method, case.shape
    if method.kind != "lora" or case.spec.lora.targets != "custom" or case.spec.lora.target_modules:
        return None
    if shape is None:
        return Violation("Name the ends of module names.")
    every = Fix(f"Name {names(shape.linear)}", _listed("lora.target_modules", shape.linear), False)
    return Violation(f"The model has {names(shape.linear)}.", (every,))


@rule(
    "MTH002",
    "error",
    fields=("lora.target_modules",),
    title="The model has no such module",
    source="peft 0.21 tuners_utils.py: Target modules not found in the base model",
    fixes=(ALL,),
    fails_on=Example({**CUSTOM, "lora.target_modules": ("q_proj", "c_attn")}),
    passes_on=Example({**CUSTOM, "lora.target_modules": ("q_proj", "self_attn.v_proj")}),
    proof="launch",
)
def unknown_targets(case: Case) -> Violation | None:
    """Module names differ from one architecture to the next."""
    shape, method = case.shape, case.spec.method
    if method.kind != "lora" or case.spec.lora.targets != "custom":
        return None
    wanted = [name for name in case.spec.lora.target_modules if shape is None or not _is_head(shape, name)]
    unknown = [name for name in wanted if not _can_carry(case, name)]
    if not unknown:
        return None
    kept = [name for name in wanted if name not in unknown]
    fixes = (Fix(f"Leave out {names(unknown)}", _listed("lora.target_modules", kept), False),) if kept else ()
    found = f"{shape.architecture} has no {names(unknown)}; it has {names(shape.linear)}." if shape else ""
    return Violation(found or _lacks(case, unknown), fixes)


def _can_carry(case: Case, name: str) -> bool:
    """Whether an adapter can lie there: of a model without a shape as far as its code tells."""
    if case.shape:
        return _carries(case.shape, name)
    return name in case.facts.stacked or _there(case, name)


def _carries(shape: ModelShape, name: str) -> bool:
    """Whether an adapter for this name lies on one of its modules."""
    return any(leaf.carries(name) for leaf in shape.leaves())


def _is_head(shape: ModelShape, name: str) -> bool:
    return bool(name) and f".{shape.head}".endswith(f".{name}")


@rule(
    "MTH003",
    "error",
    fields=("lora.target_modules",),
    title="An adapter on the output layer",
    source="trl 1.16 sft_trainer.py: the loss multiplies with lm_head.weight directly, the adapter is never trained",
    fails_on=Example({**CUSTOM, "lora.target_modules": ("q_proj", "lm_head")}),
    passes_on=Example({**CUSTOM, "lora.target_modules": ("q_proj",)}),
    proof="launch",
)
def head_as_target(case: Case) -> Violation | None:
    """The loss uses the weights of the output layer by themselves and would never see an adapter there."""
    shape, wanted = _lora(case), case.spec.lora.target_modules
    if shape is None or case.spec.lora.targets != "custom":
        return None
    if not any(_is_head(shape, name) for name in wanted):
        return None
    kept = [name for name in wanted if not _is_head(shape, name) and _carries(shape, name)]
    fix = Fix(f"Leave out {shape.head}", _listed("lora.target_modules", kept), False) if kept else ALL
    return Violation(f"{shape.head} cannot carry an adapter; it can be trained in full.", (fix,))


@rule(
    "MTH004",
    "error",
    fields=("lora.modules_to_save",),
    title="The model has no such module to train in full",
    source="peft 0.21: a name that matches nothing is passed over, and nothing is trained there",
    fails_on=Example({"lora.modules_to_save": ("embeddings",)}),
    passes_on=Example({"lora.modules_to_save": ("norm",)}),
    proof="launch",
)
def unknown_saved(case: Case) -> Violation | None:
    """A name that matches no module would silently train nothing."""
    wanted = case.spec.lora.modules_to_save if case.spec.method.kind == "lora" else ()
    unknown = [name for name in wanted if not _there(case, name)]
    if not unknown:
        return None
    kept = _listed("lora.modules_to_save", (name for name in wanted if name not in unknown))
    fixes = (Fix(f"Leave out {names(unknown)}", kept, False),)
    return Violation(_lacks(case, unknown), fixes)


def _there(case: Case, name: str) -> bool:
    """Whether a module is, or may be, called so: of a model without a shape its code is known, or nothing."""
    if case.shape:
        return bool(name) and any(matches(leaf.path, name) for leaf in case.shape.leaves())
    known = case.facts.attributes
    return not known or all(part in known or part.isdigit() for part in name.split("."))


def _lacks(case: Case, unknown: list[str]) -> str:
    if case.shape is None:
        return f"In the code of this model nothing is called {names(unknown)}."
    return f"{case.shape.architecture} has no {names(unknown)}; it has {names(case.shape.modules)}."


@rule(
    "MTH005",
    "warning",
    fields=("lora.modules_to_save",),
    title="Tied weights drift apart",
    source="peft 0.21 tuners_utils.py and issue 2777: only one of two tied weights is trained",
    fails_on=Example({"lora.modules_to_save": ("embed_tokens",)}),
    passes_on=Example({"lora.modules_to_save": ("embed_tokens",)}, H100, replace(DEMO, shape=LLAMA_8B)),
)
def tied_drift(case: Case) -> Violation | None:
    """This model uses one matrix to read words and to write them. Training a copy of one side makes the two
    differ, and a merged model then loads with only one of them."""
    found, fix = _tied(case)
    return Violation(f"{names(found)} shares its weights.", (fix,)) if found else None


def _tied(case: Case) -> tuple[list[str], Fix]:
    """The modules to save whose matrix reads words and writes them, and the way without them."""
    shape, wanted = _lora(case), case.spec.lora.modules_to_save
    found: list[str] = []
    if shape and shape.tied:
        found = [name for name in wanted if _is_head(shape, name) or matches(shape.outside[0].path, name)]
    kept = _listed("lora.modules_to_save", (name for name in wanted if name not in found))
    return found, Fix(f"Leave out {names(found)}", kept, False)


@rule(
    "MTH011",
    "error",
    fields=("lora.modules_to_save", "parallel.strategy"),
    title="A trained copy of a tied weight cannot be spread by FSDP2",
    source="torch 2.13 distributed/fsdp/_fully_shard/_fsdp_state.py: shared with a parameter of another group; peft "
    "0.21 copies one of the two",
    fails_on=Example({"lora.modules_to_save": ("embed_tokens",), "parallel.strategy": "fsdp2"}),
    passes_on=Example({"lora.modules_to_save": ("embed_tokens",), "parallel.strategy": "zero3"}),
    proof="launch",
)
def tied_copy(case: Case) -> Violation | None:
    """FSDP2 spreads what two names share as one weight. An adapter that trains a copy under one of the names is no
    such pair any more."""
    found, fix = _tied(case)
    zero = ZERO3
    spread = case.strategy.engine == "fsdp"
    return Violation(f"{names(found)} shares its weights.", (zero, fix)) if found and spread else None


@rule(
    "MTH006",
    "error",
    fields=("method.freeze_trainable_layers",),
    title="More layers than the model has",
    source="arithmetic: config.json",
    fails_on=Example({**FREEZE, "method.freeze_trainable_layers": 99}),
    passes_on=Example({**FREEZE, "method.freeze_trainable_layers": -2}),
    proof="launch",
)
def too_many_layers(case: Case) -> Violation | None:
    """The count goes from the last layer back, a negative one from the first on."""
    shape, wanted = case.shape, case.spec.method.freeze_trainable_layers
    if shape is None or case.spec.method.kind != "freeze" or abs(wanted) <= shape.layers:
        return None
    every = shape.layers if wanted > 0 else -shape.layers
    fixes = (Fix(f"All {shape.layers}", {"method.freeze_trainable_layers": every}, False),)
    return Violation(f"{counted(abs(wanted), 'layer')} asked for; the model has {shape.layers}.", fixes)


@rule(
    "MTH007",
    "error",
    fields=("method.freeze_trainable_layers", "method.freeze_extra_modules"),
    title="Nothing would be trained",
    source="arithmetic: no weight is left to train",
    fixes=(Fix("The last two layers", {"method.freeze_trainable_layers": 2}, safe=False),),
    fails_on=Example({**FREEZE, "method.freeze_trainable_layers": 0}),
    passes_on=Example({**FREEZE, "method.freeze_trainable_layers": 0, "method.freeze_extra_modules": ("norm",)}),
    proof="launch",
)
def nothing_trained(case: Case) -> str | None:
    """An optimizer without weights stops at once. An output layer that shares its weights with the embedding is
    trained by naming the embedding."""
    method, shape = case.spec.method, case.shape
    if method.kind != "freeze" or method.freeze_trainable_layers:
        return None
    if not method.freeze_extra_modules:
        return "No layer and no module is chosen."
    known = shape is not None and all(_there(case, name) for name in method.freeze_extra_modules)
    return "What is named has no weights of its own." if known and shape and not trainable(case.spec, shape) else None


@rule(
    "MTH008",
    "error",
    fields=("method.freeze_extra_modules",),
    title="The model has no such module to train",
    source="arithmetic: the model's module names",
    fails_on=Example({**FREEZE, "method.freeze_extra_modules": ("wte",)}),
    passes_on=Example({**FREEZE, "method.freeze_extra_modules": ("embed_tokens",)}),
    proof="launch",
)
def unknown_also(case: Case) -> Violation | None:
    """A name that matches no module would silently train nothing."""
    method = case.spec.method
    if method.kind != "freeze":
        return None
    unknown = [name for name in method.freeze_extra_modules if not _there(case, name)]
    if not unknown:
        return None
    patch = _listed(
        "method.freeze_extra_modules", (name for name in method.freeze_extra_modules if name not in unknown)
    )
    if not method.freeze_trainable_layers and not patch["method.freeze_extra_modules"]:
        patch["method.freeze_trainable_layers"] = 2
    return Violation(_lacks(case, unknown), (Fix(f"Leave out {names(unknown)}", patch, False),))


@rule(
    "MTH009",
    "advice",
    fields=("lora.r",),
    title="An adapter as wide as the model",
    source="Hu et al. 2021, LoRA: the rank is meant to be far below the width",
    fixes=(Fix("Rank 16", {"lora.r": 16, "lora.alpha": 32.0}, safe=False),),
    fails_on=Example({"lora.r": 1024}),
    passes_on=Example({"lora.r": 64}),
)
def wide_adapter(case: Case) -> str | None:
    """Beyond the width of a layer an adapter holds more numbers than the layer itself."""
    shape = _lora(case)
    if shape is None:
        return None
    widths = [min(leaf.inputs, leaf.outputs) for leaf in adapted(case.spec.lora, shape) if leaf.linear]
    rank, narrow = case.spec.lora.r, min(widths, default=0)
    return f"Rank {rank}, in layers {narrow} wide." if rank > narrow > 0 else None


RATES = {"lora": (1e-6, 5e-3, 2e-4), "freeze": (1e-7, 1e-3, 5e-5), "full": (1e-7, 5e-4, 2e-5)}


@rule(
    "MTH010",
    "warning",
    fields=("train.learning_rate", "method.kind"),
    title="An unusual learning rate",
    source="peft's and trl's examples; Biderman et al. 2024, LoRA Learns Less and Forgets Less",
    fails_on=Example({"method.kind": "full", "train.learning_rate": 1e-3}),
    passes_on=Example({"method.kind": "full", "train.learning_rate": 2e-5}),
)
def unusual_rate(case: Case) -> Violation | None:
    """Too high a rate makes the loss rise or turn into no number at all; too low a one leaves the model as it was.
    Full training wants about a tenth of what adapters take."""
    rate, kind = case.spec.train.learning_rate, case.spec.method.kind
    low, high, usual = RATES[kind]
    if case.spec.train.optim == "sgd" or case.spec.train.stage not in ("sft", "reward") or low <= rate <= high:
        return None
    message = f"{rate:g} is {'high' if rate > high else 'low'} for this method; {low:g} to {high:g} is usual."
    return Violation(message, (Fix(f"{usual:g}", {"train.learning_rate": usual}, False),))
