"""A look at a model's folder: its config.json, weights and chat template. Floor 2. Imports paths, spec and
architecture."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from backend import registry
from backend.config import RunSpec
from backend.inspect.architecture import await_architecture, read_architecture
from backend.paths import model_folder

# Of these AutoModelForCausalLM makes the whole; transformers 5.23 models/auto/modeling_auto.py.
TOWERS = ("gemma3", "gemma3n", "gemma4", "gemma4_unified", "got_ocr2", "phi4_multimodal")


def look_at_model(spec: RunSpec, base: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a Glance that speak of the model, as the stage has it."""
    found = _look(spec, base, environment)
    if registry.STAGES[spec.train.stage].scores and found.get("shape"):
        found = {**found, "shape": found["shape"].scoring}
    return found


def _look(spec: RunSpec, base: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    found = dict(_files(spec, base, environment))
    config = found.pop("config", None)
    return {**read_architecture(config, environment, spec.model.trust_remote_code), **found} if config else found


def wait_for_architecture(
    spec: RunSpec, base: Path, environment: Mapping[str, str] = os.environ, seconds: float = 30.0
) -> None:
    """Wait until the architecture of the model of `spec` has been read, so that `look` knows it; for callers that may
    take the time."""
    if config := _files(spec, base, environment).get("config"):
        await_architecture(config, environment, seconds)


def _files(spec: RunSpec, base: Path, environment: Mapping[str, str]) -> Mapping[str, Any]:
    """What the model's files show: fields of a Glance, and under `config` its config.json, if there is one."""
    model = spec.model
    if model.source == "builtin":
        row = registry.MODELS[model.builtin]
        there = (model_folder(model.builtin, environment) / "config.json").is_file()
        return {"config": row.config, "has_template": True, "is_downloaded": there or not row.download_bytes}
    if model.source == "hub":
        folder = _cached(model.hub_id, model.revision, environment)
        if folder is None:
            known = registry.HUB.get(model.hub_id.lower())
            told = {"config": known} if known else {"unknown": "the model was not downloaded yet"}
            return {**told, "is_downloaded": False}
        found = _folder(folder)
        return {
            **found,
            "model": "",
            "is_downloaded": not found.get("model"),
        }  # what is missing is downloaded by the run
    if not model.path:
        return {"unknown": "no model folder is named", "model": "No model folder is named."}
    return _folder(base / Path(model.path).expanduser())


def _cached(hub_id: str, revision: str, environment: Mapping[str, str]) -> Path | None:
    """The folder of a hub's model in the library's cache, if it is there."""
    home = environment.get("HF_HOME") or os.path.join(environment.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    hub = Path(environment.get("HF_HUB_CACHE") or os.path.join(home, "hub")).expanduser()
    store = hub / f"models--{hub_id.replace('/', '--')}"
    with suppress(OSError):
        name = (store / "refs" / revision).read_text().strip() if (store / "refs" / revision).is_file() else revision
        if (store / "snapshots" / name / "config.json").is_file():
            return store / "snapshots" / name
    return None


def _folder(folder: Path) -> dict[str, Any]:
    """Facts about a folder that should hold a model."""
    try:
        stamp = folder.stat().st_mtime_ns
        config = (folder / "config.json").stat() if (folder / "config.json").is_file() else None
    except OSError:
        return {"unknown": "there is no such folder", "model": f"There is no folder {folder}."}
    return _folder_seen(folder, stamp, config.st_mtime_ns if config else 0)


@lru_cache(maxsize=64)
def _folder_seen(folder: Path, stamp: int, config_stamp: int) -> dict[str, Any]:
    """`stamp` and `config_stamp` make the answer current: they change with the folder."""
    if not folder.is_dir():
        return {"unknown": "it is no folder", "model": f"{folder} is a file: name the folder that it lies in."}
    if not config_stamp:
        adapter = (folder / "adapter_config.json").is_file()
        what = "holds an adapter alone: merge it into its model first" if adapter else "has no config.json"
        return {"unknown": "there is no config.json", "model": f"{folder} {what}."}
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it holds no table")
    except (OSError, ValueError) as error:
        said = f"{folder / 'config.json'} cannot be read: {error}."
        return {"unknown": "config.json cannot be read", "model": said}
    towers = config.get("model_type") in TOWERS and bool({"vision_config", "audio_config"} & config.keys())
    packed = str((config.get("quantization_config") or {}).get("quant_method") or "")
    found = {"config": config, "packed": packed, "is_multimodal": towers}
    return {**found, "model": _missing(folder), "has_template": _has_template(folder)}


def _missing(folder: Path) -> str:
    """What a model's folder lacks, in a sentence."""
    names = {path.name for path in folder.iterdir()}
    if not any(name.endswith((".safetensors", ".bin")) and "adapter" not in name for name in names):
        return f"{folder} holds no weights (*.safetensors)."
    if not names & {"tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json", "spiece.model"}:
        return f"{folder} holds no tokenizer (tokenizer.json)."
    return ""


def _has_template(folder: Path) -> bool | None:
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    with suppress(OSError, ValueError):
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        return bool(config.get("chat_template"))
    return None
