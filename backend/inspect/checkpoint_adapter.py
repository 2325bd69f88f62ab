"""Whether the adapter of a run fits the checkpoint that the run resumes from, or the adapter that it continues, by the
adapter_config.json there."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeGuard

from backend import presets, registry
from backend.config import Lora, Model, RunSpec
from backend.config.options import by_name, effective, get, text
from backend.modelspec import SCORE, ModelShape, lora_modules, matches_any
from backend.runs import CHECKPOINTS, MODEL, SPEC, files
from backend.wording import counted

# peft's keys that decide what the weights mean, and the option of each.
OPTION_OF = {"r": "lora.r", "lora_alpha": "lora.alpha", "use_dora": "lora.use_dora", "use_rslora": "lora.use_rslora"}
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
# Features of peft's LoRA that no option sets: the weights would not fit, or mean something else.
NOT_IN_LORA = (
    "rank_pattern", "alpha_pattern", "layers_to_transform", "layer_replication", "lora_bias",
    "exclude_modules", "arrow_config", "corda_config", "eva_config",
)  # fmt: skip
FUSED_EXPERTS = r".*\.gate_up_proj"
ADDED_TOKENS = ("data.add_special_tokens", "data.add_tokens")
TARGETS, NAMES = "lora.targets", "lora.target_modules"
MERGE = "Merge it into its base model with peft (merge_and_unload), and set the merged model as model.path."
HEADS = {SCORE, "classifier"}  # names of reward models' heads, which peft adds to modules_to_save


def adapter_facts(spec: RunSpec, saved: RunSpec | None, folder: Path, shape: ModelShape | None) -> dict[str, Any]:
    """The InputFacts about the adapter in `folder`, a checkpoint of the run `saved` if that is known: how its options
    differ from those of `spec`, so that its weights would not fit, or be scaled differently. Empty if they do not."""
    config = _config(folder)
    if config is None:
        return {}
    found = {option: config[key] for key, option in OPTION_OF.items() if isinstance(config.get(key), int | float)}
    found |= _initialization(spec, config) | _added_tokens(spec, saved, config)
    if shape:
        found |= _targets(spec.lora, saved, config, shape) | _copies(spec.lora, config, shape)
    differing = {name: value for name, value in found.items() if value != get(spec, name)}
    if not differing:
        return {}
    has, sets = _listed(differing), _listed({name: get(effective(spec), name) for name in differing})
    problem = f"The adapter in {folder} was trained with {has}, but this run sets {sets}."
    return {"checkpoint_problem": problem, "checkpoint_options": tuple(differing.items())}


def continued_adapter_facts(spec: RunSpec, base: Path, shape: ModelShape | None) -> dict[str, Any]:
    """The InputFacts about lora.adapter_path: why the run cannot continue this adapter, and its options if they are the
    reason. Empty if nothing is wrong, or the run trains a new adapter."""
    if spec.method.kind != "lora" or not spec.lora.adapter_path:
        return {}
    folder = base / Path(spec.lora.adapter_path).expanduser()
    saved = saved_spec(folder)
    tokens = len({*spec.data.added_tokens}) if saved is None else None
    if problem := _unusable_adapter(folder, registry.STAGES[spec.train.stage].is_reward_model, tokens):
        return {"adapter_problem": problem}
    if saved and has_other_name(saved.model, spec.model):
        problem = f"The adapter in {folder} was trained on {saved.model.name}, and this run uses {spec.model.name}."
        return {"adapter_problem": f"{problem} Set the base model of the adapter."}
    if saved is None and shape and (names := _unadaptable(folder, shape)):
        problem = f"The adapter in {folder} has weights for {', '.join(names)}, on which Footplate puts no adapter."
        return {"adapter_problem": f"{problem} {MERGE}"}
    found = adapter_facts(spec, saved, folder, shape)
    return {name.replace("checkpoint", "adapter"): value for name, value in found.items()}


def has_other_name(before: Model, now: Model) -> bool:
    """Whether the name of a base model tells that it is another one. The trainer compares the fingerprints of all: a
    folder may have been moved, and a repository on the Hub may be a copy, or now belong to another account."""
    is_named = now.source in ("hub", "builtin") and before.source == now.source
    return is_named and before.name.lower() != now.name.lower()


def _config(folder: Path) -> dict[str, Any] | None:
    """The adapter_config.json in `folder`; None if it cannot be read."""
    config: Any = None
    with suppress(OSError, ValueError):
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    return config if isinstance(config, dict) else None


def _unusable_adapter(folder: Path, for_reward: bool, tokens: int | None) -> str:
    """Why the adapter in `folder` cannot be continued whatever its options are, a sentence; '' if it can. `for_reward`:
    to train a reward model; `tokens`: how many added tokens the spec names, None if the run of the adapter names
    them."""
    if not folder.is_dir():
        return f"The folder {folder} does not exist: set the folder of a saved LoRA adapter, such as runs/ID/model."
    if not any((folder / name).is_file() for name in WEIGHTS):
        return (
            f"{folder} has no {WEIGHTS[0]}: set the folder of a saved LoRA adapter, such as the folder runs/ID/model."
        )
    config = _config(folder)
    if config is None:
        return f"{folder} has no adapter_config.json that can be read: set the folder of a saved LoRA adapter."
    kind = str(config.get("peft_type", ""))
    if kind != "LORA":
        return f"The adapter in {folder} is of the kind {kind or 'unknown'}, and only LoRA adapters can be continued."
    is_reward = config.get("task_type") == "SEQ_CLS"
    if is_reward != for_reward and config.get("task_type"):
        kinds = ("a reward model", "a causal language model")
        return (
            f"The adapter in {folder} was trained for {kinds[not is_reward]}, but this run trains {kinds[is_reward]}, "
            "which has a different output layer. Merge the adapter first, and set the merged model as model.path."
        )
    known = ("rank_pattern", "alpha_pattern") if _has_fused_experts(config) else ()
    other = [name for name in NOT_IN_LORA if config.get(name) and name not in known]
    if other := other + ["bias"] * (config.get("bias") not in (None, "none")):
        return f"The adapter in {folder} uses {', '.join(other)}, which Footplate does not support. {MERGE}"
    if (rows := _token_rows(config)) and tokens not in (None, rows):
        return (
            f"The adapter in {folder} has embeddings of {counted(rows, 'added token')}, but this run names "
            f"{tokens or 'none'}. The folder does not belong to a run whose "
            f"options name these tokens: set {' and '.join(ADDED_TOKENS)} to the tokens, in the order of their ids."
        )
    init = config.get("init_lora_weights")
    if registry.is_residual(init):
        return (
            f"The adapter in {folder} comes from a checkpoint of a run with {init} initialization, and fits only the "
            "base weights that this run modified. Use the final model of that run: its adapter fits the base model."
        )
    return ""


def _unadaptable(folder: Path, shape: ModelShape) -> list[str]:
    """The targets of the adapter in `folder` that no option selects: embeddings, the output layer, and linear layers of
    which peft finds or applies no adapter."""
    targets = (_config(folder) or {}).get("target_modules")
    if not targets or not _is_names(targets):
        return []
    ends = {shape.embedding, shape.head}
    leaves = (
        leaf
        for leaf in shape.all_modules()
        if leaf.path in ends or (leaf.is_linear and not leaf.supports_lora and not leaf.target_names)
    )
    return sorted({leaf.path.rpartition(".")[2] for leaf in leaves if matches_any(leaf.path, frozenset(targets))})


def _has_fused_experts(config: Mapping[str, Any]) -> bool:
    """Whether the patterns are those that peft 0.21 (transformers_weight_conversion.py) adds to an adapter on stacked
    experts: the gate and up projections are one parameter, with both ranks."""
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float):
        return False
    patterns = {FUSED_EXPERTS: 2 * rank}, {FUSED_EXPERTS: 2 * alpha}
    return (config.get("rank_pattern"), config.get("alpha_pattern")) == patterns


def saved_spec(folder: Path) -> RunSpec | None:
    """The spec of the run that saved a model or a checkpoint in this folder; None if it is not known."""
    run = folder.parent if folder.name == MODEL else folder.parent.parent
    with suppress(OSError, ValueError):
        if folder.name == MODEL or folder.parent.name == CHECKPOINTS:
            return effective(presets.load(files.read_text(run / SPEC)))
    return None


def _initialization(spec: RunSpec, config: Mapping[str, Any]) -> dict[str, Any]:
    """The adapter's initialization, if it belongs to other base weights than that of `spec`."""
    own = registry.LORA_INITS[spec.lora.init].init_lora_weights
    init = config.get("init_lora_weights", own)
    if init == own or registry.same_base_weights(init, own):
        return {}
    names = (name for name, row in registry.LORA_INITS.items() if row.init_lora_weights == init)
    return {"lora.init": next(names, str(init))}


def _added_tokens(spec: RunSpec, saved: RunSpec | None, config: Mapping[str, Any]) -> dict[str, Any]:
    """The added tokens of the adapter, if they are known and others than those of `spec`. Their order decides which
    rows of the embeddings they have. An adapter of an unknown run has none if it trained neither rows nor modules."""
    if saved is None:
        is_known = not _token_rows(config) and not {*(config.get("modules_to_save") or [])} - HEADS
        return dict.fromkeys(ADDED_TOKENS, ()) if is_known else {}
    if saved.data.added_tokens == spec.data.added_tokens:
        return {}
    return {name: get(saved, name) for name in ADDED_TOKENS}


def _token_rows(config: Mapping[str, Any]) -> int:
    """Of how many tokens the adapter has embeddings: peft's trainable_token_indices has a list of ids, or one for each
    layer."""
    ids = config.get("trainable_token_indices") or ()
    lists = ids.values() if isinstance(ids, Mapping) else [ids]
    return max((len(each) for each in lists if isinstance(each, list)), default=0)


def _targets(lora: Lora, saved: RunSpec | None, config: Mapping[str, Any], shape: ModelShape) -> dict[str, Any]:
    """The target modules of the adapter, if they are others than those of `lora`."""
    names = config.get("target_modules")
    if saved and saved.method.kind == "lora":
        before = {TARGETS: saved.lora.targets, NAMES: saved.lora.target_modules}
    elif names and _is_names(names) and not config.get("target_parameters"):  # stacked experts have other names there
        before = {TARGETS: "custom", NAMES: tuple(sorted(names))}
    else:
        return {}
    then = lora.model_copy(update={"targets": before[TARGETS], "target_modules": before[NAMES]})
    return before if _adapted(then, shape) != _adapted(lora, shape) else {}


def _copies(lora: Lora, config: Mapping[str, Any], shape: ModelShape) -> dict[str, Any]:
    """The modules that the checkpoint has copies of, if they are others than those of `lora`."""
    names = config.get("modules_to_save") or []
    if not _is_names(names):
        return {}
    before = tuple(name for name in names if name not in HEADS)
    return {"lora.modules_to_save": before} if _copied(before, shape) != _copied(lora.modules_to_save, shape) else {}


def _is_names(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _adapted(lora: Lora, shape: ModelShape) -> set[str]:
    return {leaf.path for leaf in lora_modules(lora, shape, each_layer=True)}


def _copied(names: Collection[str], shape: ModelShape) -> set[str]:
    known = frozenset(names) - HEADS
    return {leaf.path for leaf in shape.modules(known) if matches_any(leaf.path, known)}


def _listed(values: Mapping[str, Any]) -> str:
    """'lora.r 8, lora.targets all-linear'; an empty list is left out, unless there is nothing else."""
    words = [f"{name} {text(by_name()[name], value)}" for name, value in values.items() if value != ()]
    return ", ".join(words) or f"no {next(iter(values))}"
