"""The architecture that a config.json describes: closed formulas where Footplate has them, else a module table.

Floor 2. Imports catalog, paths, shape. The closed formulas answer at once. The table of any other architecture is built
by a worker process with transformers; it is started here and not waited for, so that a check stays quick.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from backend import registry
from backend.modelspec import SCORE, ModelShape, Unknown, from_config
from backend.modelspec.from_table import shape_from_table
from backend.modelspec.worker import ModuleTables, Table
from backend.paths import cache_folder

SWITCH = "FOOTPLATE_MODEL_TABLES"  # "off": no worker process is started
Config = Mapping[str, Any]


def read_architecture(config: Config, environment: Mapping[str, str], trusted: bool = False) -> dict[str, Any]:
    """The fields of a InputFacts that follow from a config.json. Returns at once. `trusted`: code of the model's own folder
    builds it (trust_remote_code), which nothing is known of."""
    kind = str(config.get("model_type"))
    stacked = registry.STACKED.get(kind, ())
    own = "auto_map" in config
    try:
        shape = from_config(config)
    except Unknown as error:
        if own and trusted:
            return {"unknown": str(error)}
        return {"stacked": stacked, **_read_table(config, environment, str(error), own)}
    table = _tables(cache_folder(environment)).get(config, start=_composite(config) and _may_start(environment))
    if not isinstance(table, Mapping) or not _built(table):
        return {"shape": shape, "unknown": "", "classes": _classes(kind), "stacked": stacked}
    if _composite(config):
        with suppress(Unknown):
            shape = _shape(table, config)
    return {"shape": shape, "unknown": "", "classes": tuple(table["class_names"]), "stacked": stacked}


def await_architecture(config: Config, environment: Mapping[str, str], seconds: float) -> None:
    """Wait until `read_architecture` knows this config, at most so many seconds."""
    with suppress(Unknown):
        from_config(config)
        if not _composite(config):
            return
    if _may_start(environment):
        _tables(cache_folder(environment)).wait(config, seconds)


def _read_table(config: Config, environment: Mapping[str, str], reason: str, own: bool) -> dict[str, Any]:
    """As `read_architecture`, by transformers; `reason` is why the closed formulas do not know it."""
    kind = str(config.get("model_type"))
    table = _tables(cache_folder(environment)).get(config, start=_may_start(environment))
    if table is None:
        unknown = f"the architecture {kind} is being read; check again in some seconds"
        read = {} if own else {"classes": _classes(kind), "attributes": _attributes(kind)}
        return {"unknown": unknown if _may_start(environment) else reason, **read}
    if isinstance(table, str):
        read = {} if own else {"classes": _classes(kind), "attributes": _attributes(kind)}
        return {"unknown": table, **read}
    known: dict[str, Any] = {}
    if _built(table):
        known = {"classes": tuple(table["class_names"]), "attributes": frozenset({*table["attributes"], SCORE})}
        if table["expert_fused"]:
            known["stacked"] = _stacked(table)
    try:
        return {"shape": _shape(table, config), "unknown": "", **known}
    except Unknown as error:
        return {"unknown": str(error), **known}


def _composite(config: Config) -> bool:
    """Whether the closed formulas count a part of the model alone: its language model, and no vision tower."""
    return "text_config" in config


def _built(table: Table) -> bool:
    """Whether transformers could build the model: of an encoder-decoder, for one, the table says no more than that."""
    return "class_names" in table


def _stacked(table: Table) -> tuple[str, ...]:
    """Names by which peft adapts the experts: those that are fused first, the router last (registry.STACKED)."""
    targets, fused = table["expert_targets"], [name for names in table["expert_fused"].values() for name in names]
    rest = sorted((name for name in targets if name not in fused), key=lambda name: targets[name].endswith(".weight"))
    return (*fused, *rest)


def _shape(table: Table, config: Config) -> ModelShape:
    """One object a model: what counts trainable parameters is cached by it. Raises Unknown."""
    key = json.dumps(config, sort_keys=True, default=str)
    found = _SHAPES.get(key) or shape_from_table(table, config)
    if len(_SHAPES) >= KEPT:
        _SHAPES.clear()
    return _SHAPES.setdefault(key, found)


KEPT = 64
_SHAPES: dict[str, ModelShape] = {}


def _may_start(environment: Mapping[str, str]) -> bool:
    return environment.get(SWITCH, os.environ.get(SWITCH)) != "off"


@lru_cache(maxsize=8)
def _tables(folder: Path) -> ModuleTables:
    return ModuleTables(folder)


# Until a table is there: names in the source of transformers, which is read and not loaded.


def _code(kind: str) -> str:
    """The code of this model type: read in the installed library, not loaded. '' if it is not there."""
    found = importlib.util.find_spec("transformers")
    if found is None or found.origin is None or not kind.isidentifier():
        return ""
    with suppress(OSError):
        return (Path(found.origin).parent / "models" / kind / f"modeling_{kind}.py").read_text(encoding="utf-8")
    return ""


@lru_cache(maxsize=64)
def _classes(kind: str) -> tuple[str, ...]:
    """Classes of the modules of this model type, its layers first."""
    code = _code(kind)
    layers = re.findall(r"(?m)^class (\w+)\(GradientCheckpointingLayer\)", code)
    return (*layers, *re.findall(r"(?m)^class (\w+)\(nn\.Module\)", code))


@lru_cache(maxsize=64)
def _attributes(kind: str) -> frozenset[str]:
    """What the classes of this model type call their parts; nothing where parts are another model's."""
    code = _code(kind)
    if re.search(r"(?m)^from \.\.\w+\.modeling_", code):
        return frozenset()
    found = re.findall(r"(?m)^ +self\.(\w+)(?:: [^=\n]+)? = ", code)
    return frozenset({*found, SCORE}) if found else frozenset()
