"""The architecture that a config.json describes: closed formulas where Footplate has them, else a module table.

The closed formulas take no time. The module table of any other architecture is built by a worker process with
transformers; it is started here and not waited for, so that a check stays fast.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from backend import registry
from backend.inspect.worker import Result, Show, WorkerCache, installed_versions, may_start, no_show
from backend.modelspec import (
    NO_SEQUENCE_CLASSIFICATION,
    SCORE,
    ModelShape,
    NotCausalLM,
    UnknownArchitecture,
    check_causal,
    from_config,
)
from backend.modelspec.from_table import shape_from_table
from backend.paths import cache_folder

FORMAT = 9  # raise it when the table of backend.train.describe_model changes: it is part of the cache key
OWN_CODE = "the model's own code (auto_map) is not run"  # the end of the reason why there is no module table
# Keys of config.json that change neither the modules nor the facts of a table.
IRRELEVANT = ("_name_or_path", "_commit_hash", "transformers_version", "quantization_config", "dtype", "torch_dtype")
Config = Mapping[str, Any]


class ModuleTables(WorkerCache):
    """The module table of a config, which the worker gets from the model that transformers builds of it."""

    name, task, format = "modeltables", "building the model", FORMAT

    def get(self, config: Config, start: bool = True) -> Result | str | None:
        """The table, or the reason why there is none, or None while it is being built."""
        return self.find(cache_key(config), {"architecture": config}, start)

    def wait(self, config: Config, timeout: float = 60.0, show: Show = no_show) -> Result | str:
        """Same as `get`, but waits for at most `timeout` seconds."""
        request = {"architecture": config}
        return self.wait_for(cache_key(config), request, timeout, lambda _: show("Reading the model's architecture"))


def cache_key(config: Config) -> str:
    """Name of a config's table on disk: a hash of the config and of the library versions."""
    kept = {name: value for name, value in config.items() if name not in IRRELEVANT}
    versions = installed_versions("transformers", "peft", "torch")
    return hashlib.sha256(json.dumps([FORMAT, versions, kept], sort_keys=True, default=str).encode()).hexdigest()


def read_architecture(config: Config, environment: Mapping[str, str], trusted: bool = False) -> dict[str, Any]:
    """The InputFacts that follow from a config.json. Returns immediately. `trusted`: trust_remote_code is set, so a
    model with custom code is built by that code and not by transformers."""
    has_custom_code = "auto_map" in config
    try:
        if not (has_custom_code and trusted):
            check_causal(config)
    except NotCausalLM as error:
        return {"shape_unknown_reason": str(error), "architecture_problem": _not_supported(error)}
    return _read_causal(config, environment, trusted, has_custom_code)


def _read_causal(
    config: Config, environment: Mapping[str, str], trusted: bool, has_custom_code: bool
) -> dict[str, Any]:
    """Same as `read_architecture`, for a config without keys that make the attention bidirectional."""
    model_type = str(config.get("model_type"))
    stacked = registry.STACKED_EXPERTS.get(model_type, ())
    try:
        shape = from_config(config)
    except UnknownArchitecture as error:
        if has_custom_code and trusted:
            return {"shape_unknown_reason": str(error)}
        return {"stacked_modules": stacked, **_read_table(config, environment, str(error), has_custom_code)}
    facts = {
        "shape_unknown_reason": "",
        "stacked_modules": stacked,
        "has_sequence_classification": shape.model_type not in NO_SEQUENCE_CLASSIFICATION,
    }
    table = _tables(cache_folder(environment)).get(config, start=_composite(config) and may_start(environment))
    if isinstance(table, Mapping) and _composite(config):
        try:
            shape = _shape(table, config)
        except NotCausalLM as error:  # also for a model that the worker has not built: image-text models of llama
            if not (has_custom_code and trusted):
                return {**facts, "shape_unknown_reason": str(error), "architecture_problem": _not_supported(error)}
        except UnknownArchitecture:
            pass  # the formulas still describe its language model
    if not isinstance(table, Mapping) or not _built(table):
        return {**facts, "shape": shape, "module_classes": _classes(model_type)}
    if _composite(config):
        facts["has_sequence_classification"] = bool(table["sequence_classification"])
    return {**facts, "shape": shape, "module_classes": tuple(table["class_names"])}


def await_architecture(config: Config, environment: Mapping[str, str], seconds: float, show: Show = no_show) -> None:
    """Wait until `read_architecture` knows this config, at most `seconds`."""
    with suppress(UnknownArchitecture):
        from_config(config)
        if not _composite(config):
            return
    if may_start(environment):
        _tables(cache_folder(environment)).wait(config, seconds, show)


def _read_table(config: Config, environment: Mapping[str, str], reason: str, has_custom_code: bool) -> dict[str, Any]:
    """Same as `read_architecture`, but from a module table; `reason` is why the closed formulas do not cover the
    config."""
    model_type = str(config.get("model_type"))
    table = _tables(cache_folder(environment)).get(config, start=may_start(environment))
    if table is None or isinstance(table, str):
        names = {"module_classes": _classes(model_type), "module_attributes": _attributes(model_type)}
        pending = table is None and may_start(environment)
        message = f"the architecture {model_type} is being read, which takes a few seconds"
        unknown = message if pending else table or reason
        known_names = {} if has_custom_code else names
        needs_code = has_custom_code and isinstance(table, str) and OWN_CODE in table
        return {
            "shape_unknown_reason": unknown,
            "architecture_pending": pending,
            "needs_remote_code": needs_code,
            **known_names,
        }
    known: dict[str, Any] = {}
    if _built(table):
        known = {
            "module_classes": tuple(table["class_names"]),
            "module_attributes": frozenset({*table["attributes"], SCORE}),
        }
        if table["expert_fused"]:
            known["stacked_modules"] = _stacked(table)
        known["has_sequence_classification"] = bool(table["sequence_classification"])
        known["lora_refused"] = tuple(table["lora_refused"])
        prefix = f"{table['layers']['path']}."
        known["has_shared_layers"] = any(sum(n.startswith(prefix) for n in names) > 1 for names in table["tied"])
        known["has_shared_head"] = has_shared_head(table)
    try:
        return {"shape": _shape(table, config), "shape_unknown_reason": "", **known}
    except NotCausalLM as error:
        return {"shape_unknown_reason": str(error), "architecture_problem": _not_supported(error), **known}
    except UnknownArchitecture as error:
        return {"shape_unknown_reason": str(error), **known}


def _not_supported(error: NotCausalLM) -> str:
    return f"The model type of config.json is not supported: {error}."


def _composite(config: Config) -> bool:
    """Whether the closed formulas count only the language model of a larger model, without its vision tower."""
    return "text_config" in config


def has_shared_head(table: Result) -> bool:
    """Whether the output layer and a module other than the embedding have the same parameter."""
    owners = ({name.rpartition(".")[0] for name in names} for names in table["tied"])
    return any(table["head"] in each and each - {table["head"], table["embeddings"]} for each in owners)


def _built(table: Result) -> bool:
    """Whether transformers could build the model on the meta device. Otherwise the table contains only the reason."""
    return "class_names" in table


def _stacked(table: Result) -> tuple[str, ...]:
    """Names by which peft adapts the experts: the fused ones first, the router last, as in registry.STACKED_EXPERTS."""
    targets, fused = table["expert_targets"], [name for names in table["expert_fused"].values() for name in names]
    rest = sorted((name for name in targets if name not in fused), key=lambda name: targets[name].endswith(".weight"))
    return (*fused, *rest)


def _shape(table: Result, config: Config) -> ModelShape:
    """One ModelShape object per config: the counts of trainable parameters are cached by object. Raises
    UnknownArchitecture."""
    key = json.dumps(config, sort_keys=True, default=str)
    found = _SHAPES.get(key) or shape_from_table(table, config)
    if len(_SHAPES) >= KEPT:
        _SHAPES.clear()
    return _SHAPES.setdefault(key, found)


KEPT = 64
_SHAPES: dict[str, ModelShape] = {}


@lru_cache(maxsize=8)
def _tables(folder: Path) -> ModuleTables:
    return ModuleTables(folder)


# Names from the source files of transformers, which are read but not imported, until the module table exists.


SPECIAL_MODULES = "SPECIAL_MODEL_TYPE_TO_MODULE_NAME"  # model types whose source has another name: gemma3_text, gemma3


def _source(model_type: str) -> str:
    """The modeling source of this model type in the installed transformers; '' if there is none."""
    found = importlib.util.find_spec("transformers")
    if found is None or found.origin is None or not model_type.isidentifier():
        return ""
    models = Path(found.origin).parent / "models"
    with suppress(OSError):
        mapping = (models / "auto/auto_mappings.py").read_text(encoding="utf-8").partition(SPECIAL_MODULES)[2]
        special = re.search(rf'\("{model_type}", "(\w+)"\)', mapping)
        name = special.group(1) if special else model_type
        return (models / name / f"modeling_{name}.py").read_text(encoding="utf-8")
    return ""


@lru_cache(maxsize=64)
def _classes(model_type: str) -> tuple[str, ...]:
    """Names of the module classes of this model type, its layers first."""
    code = _source(model_type)
    layers = re.findall(r"(?m)^class (\w+)\(GradientCheckpointingLayer\)", code)
    return (*layers, *re.findall(r"(?m)^class (\w+)\(nn\.Module\)", code))


@lru_cache(maxsize=64)
def _attributes(model_type: str) -> frozenset[str]:
    """Attribute names of the module classes; empty where the source imports classes of another model type."""
    code = _source(model_type)
    if re.search(r"(?m)^from \.\.\w+\.modeling_", code):
        return frozenset()
    found = re.findall(r"(?m)^ +self\.(\w+)(?:: [^=\n]+)? = ", code)
    return frozenset({*found, SCORE}) if found else frozenset()
