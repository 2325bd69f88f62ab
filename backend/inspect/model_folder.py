"""Inspection of a model: its config.json, weight files and chat template."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from backend import registry
from backend.config import Model, RunSpec
from backend.inspect.architecture import await_architecture, read_architecture
from backend.inspect.hub_download import download_config, download_problem, has_just_failed
from backend.inspect.json_files import read_json_object
from backend.inspect.weights import INDEX, WeightsError, pointer_problem, weight_shapes, weights_mismatch
from backend.inspect.worker import Show, no_show
from backend.modelspec.config_limits import MAX_PARAMETERS, config_problem
from backend.paths import model_folder

# The names that from_pretrained looks for; transformers 5.23 modeling_utils.py, _get_resolved_checkpoint_files.
WEIGHT_FILES = {"model.safetensors", INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json"}
CONFIGS = ("config.json", "tokenizer_config.json")
GENERATE = Path("custom_generate", "generate.py")  # transformers 5.23 generation/utils.py, load_custom_generate
TOKENIZER_FILES = {"tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json", "spiece.model"}


def inspect_model(spec: RunSpec, base: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """The InputFacts about the model, with the scalar head that a reward model has."""
    facts = _model_facts(spec, base, environment)
    folder = local_folder(spec, base, environment)
    if shape := facts.get("shape"):
        is_reward_model = registry.STAGES[spec.train.stage].is_reward_model
        facts = {**facts, "shape": shape.with_score_head if is_reward_model else shape}
    if spec.model.source == "path" and folder and not facts.get("model_problem") and shape:
        facts = {**facts, "weights_problem": _weights_problem(folder, facts)}
    return facts


def _model_facts(spec: RunSpec, base: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    facts = dict(_file_facts(spec, base, environment))
    config = facts.pop("config", None)
    if not config:
        return facts
    architecture = read_architecture(config, environment, spec.model.trust_remote_code)
    shape = architecture.get("shape")
    if shape and shape.parameters > MAX_PARAMETERS:
        count = f"{shape.parameters:,} parameters; at most {MAX_PARAMETERS:,} are supported"
        reason = f"config.json describes a model of {count}"
        return {**facts, "shape_unknown_reason": reason, "config_problem": f"{reason}."}
    return {
        "model_type": str(config.get("model_type") or ""),
        "layerdrop": _layerdrop(config),
        "unused_modules": _unused_modules(config),
        **architecture,
        **facts,
    }


def _layerdrop(config: Mapping[str, Any]) -> float:
    """Of a decoder: TrOCR and Blenderbot Small have a key for each half of an encoder-decoder model."""
    text = config.get("text_config") or config
    value = text.get("decoder_layerdrop", text.get("layerdrop"))
    return float(value) if isinstance(value, int | float) else 0.0


def _unused_modules(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Gemma 3n has a parameter of its AltUp modules also where the forward pass leaves it out."""
    return ("altup",) if (config.get("text_config") or config).get("altup_correct_scale") is False else ()


def local_folder(spec: RunSpec, base: Path, environment: Mapping[str, str]) -> Path | None:
    """The folder that the model's files are in, or None if they are not on this machine."""
    model = spec.model
    if model.source == "hub":
        return _hub_cache_folder(model.hub_id, model.revision, environment)
    if model.source == "builtin":
        return model_folder(model.builtin, environment)
    return base / Path(model.path).expanduser() if model.path else None


def wait_for_architecture(
    spec: RunSpec,
    base: Path,
    environment: Mapping[str, str] = os.environ,
    seconds: float = 60.0,
    show: Show = no_show,
) -> None:
    """Wait until the architecture of the model of `spec` has been read, at most `seconds`, so that `inspect_inputs`
    knows it. For callers that can wait: the command line and Start."""
    if config := _file_facts(spec, base, environment).get("config"):
        await_architecture(config, environment, seconds, show)


def wait_for_config(
    spec: RunSpec, base: Path, environment: Mapping[str, str] = os.environ, show: Show = no_show
) -> None:
    """Download config.json of a model of the Hub of which nothing is known, unless that has just failed. Takes up to a
    minute; for callers that can wait, as `wait_for_architecture`."""
    model = spec.model
    if model.source != "hub" or not model.hub_id or has_just_failed(model.hub_id, model.revision):
        return
    if model.hub_id.lower() not in registry.HUB_CONFIGS and local_folder(spec, base, environment) is None:
        show(f"Downloading config.json of {model.hub_id}")
        download_config(model.hub_id, model.revision)


def _file_facts(spec: RunSpec, base: Path, environment: Mapping[str, str]) -> Mapping[str, Any]:
    """The InputFacts that follow from the model's files, and under `config` its config.json if there is one."""
    model, folder = spec.model, local_folder(spec, base, environment)
    if model.source == "builtin":
        builtin = registry.BUILTIN_MODELS[model.builtin]
        is_downloaded = bool(folder and (folder / "config.json").is_file()) or not builtin.download_bytes
        return {"config": builtin.config, "has_chat_template": True, "is_downloaded": is_downloaded}
    if model.source == "hub":
        if folder is None:
            config = registry.HUB_CONFIGS.get(model.hub_id.lower())
            template = registry.has_chat_template(model.hub_id)
            known = {"config": config} if config else _unknown_model(model)
            return {**known, "has_chat_template": template, "is_downloaded": False}
        facts = _folder_facts(folder)  # the run downloads files that the cache does not have
        return {**facts, "model_problem": "", "is_downloaded": not facts.get("model_problem")}
    if folder is None:
        return {
            "shape_unknown_reason": "model.path is empty",
            "model_problem": "model.path is empty: set the folder that contains the model's config.json.",
        }
    return _folder_facts(folder)


def _unknown_model(model: Model) -> dict[str, Any]:
    """The facts about a model of the Hub without a config.json on this machine. Its weights, which may be large, are
    not needed for a plan."""
    if problem := download_problem(model.hub_id, model.revision):
        return {"download_problem": problem, "shape_unknown_reason": f"config.json could not be downloaded: {problem}"}
    revision = "" if model.revision == "main" else f" --revision {shlex.quote(model.revision)}"
    command = f"hf download {shlex.quote(model.hub_id)} config.json{revision}"
    reason = f"the config.json of {model.hub_id} is not on this machine ({command} downloads it)"
    return {"shape_unknown_reason": reason}


def _hub_cache_folder(hub_id: str, revision: str, environment: Mapping[str, str]) -> Path | None:
    """The snapshot folder of a Hub model that has a config.json in the Hugging Face cache of `environment`."""
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - takes 0.1 s, and most specs do not need it

    home = environment.get("HF_HOME") or os.path.join(environment.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = Path(environment.get("HF_HUB_CACHE") or os.path.join(home, "hub")).expanduser()
    with suppress(OSError, ValueError):  # an id or a revision that is not valid
        config = try_to_load_from_cache(hub_id, "config.json", cache_dir=cache, revision=revision)
        return Path(config).parent if isinstance(config, str) else None
    return None


def _folder_facts(folder: Path) -> dict[str, Any]:
    """Facts about a folder that should contain a model."""
    try:
        modified_ns = folder.stat().st_mtime_ns
        modified = {name: (folder / name).stat().st_mtime_ns for name in CONFIGS if (folder / name).is_file()}
    except OSError:
        return {"shape_unknown_reason": "the folder does not exist", "model_problem": f"{folder} does not exist."}
    facts = _cached_folder_facts(folder, modified_ns, *(modified.get(name, 0) for name in CONFIGS))
    return {**facts, "model_problem": facts["model_problem"] or _unreadable_files(folder)}


def _weights_problem(folder: Path, facts: Mapping[str, Any]) -> str:
    """How the weights differ from config.json, a sentence; '' if they do not, or if it cannot be known."""
    if facts.get("quant_method"):
        return ""  # quantized weights have other shapes
    with suppress(WeightsError, OSError):  # reported by _unreadable_files
        return weights_mismatch(folder, facts["shape"])
    return ""


def _unreadable_files(folder: Path) -> str:
    """What is wrong with the files of the weights or of the tokenizer, a sentence; '' for nothing."""
    try:
        weight_shapes(folder)
        tokenizer = (folder / name for name in sorted(TOKENIZER_FILES) if (folder / name).is_file())
        return next(filter(None, map(pointer_problem, tokenizer)), "")
    except WeightsError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename} cannot be read: {error.strerror}."


@lru_cache(maxsize=64)
def _cached_folder_facts(
    folder: Path, modified_ns: int, config_modified_ns: int, tokenizer_modified_ns: int
) -> dict[str, Any]:
    """Same as `_folder_facts`, but cached; the modification times are part of the cache key."""
    if not folder.is_dir():
        problem = f"{folder} is a file: set the folder that contains it."
        return {"shape_unknown_reason": "model.path is a file", "model_problem": problem}
    if not config_modified_ns:
        adapter = (folder / "adapter_config.json").is_file()
        merge_first = "contains only a LoRA adapter: merge it into its base model first, on the page of its run"
        content = merge_first if adapter else "has no config.json"
        return {"shape_unknown_reason": "there is no config.json", "model_problem": f"{folder} {content}."}
    try:
        config = read_json_object(folder / "config.json")
    except (OSError, ValueError) as error:
        problem = pointer_problem(folder / "config.json") or f"{folder / 'config.json'} cannot be read: {error}."
        return {"shape_unknown_reason": "config.json cannot be read", "model_problem": problem}
    if problem := config_problem(config):
        return {"shape_unknown_reason": problem.rstrip("."), "config_problem": problem, "model_problem": ""}
    return {
        "config": config,
        "quant_method": str((config.get("quantization_config") or {}).get("quant_method") or ""),
        "model_problem": _missing_files(folder),
        "has_chat_template": _has_chat_template(folder),
        "has_own_code": has_own_code(folder),
    }


def _missing_files(folder: Path) -> str:
    """Which files a model folder lacks, a sentence; '' for none."""
    names = {path.name for path in folder.iterdir()}
    if not names & WEIGHT_FILES:
        return f"{folder} contains no weights (model.safetensors, or {INDEX} and its shards)."
    if not names & TOKENIZER_FILES:
        return f"{folder} contains no tokenizer (tokenizer.json)."
    return ""


def has_own_code(folder: Path) -> bool:
    """Whether a model folder has Python code that transformers runs with trust_remote_code: a configuration file refers
    to it (auto_map), or it replaces `generate`. True if a configuration file cannot be read."""
    if (folder / GENERATE).exists():
        return True
    paths = (folder / name for name in CONFIGS if (folder / name).is_file())
    try:
        return any("auto_map" in read_json_object(path) for path in paths)
    except (OSError, ValueError):
        return True


def _has_chat_template(folder: Path) -> bool | None:
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    with suppress(OSError, ValueError):
        return bool(read_json_object(folder / "tokenizer_config.json").get("chat_template"))
    return None
