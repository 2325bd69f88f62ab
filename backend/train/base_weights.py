"""Which weights the base model had: recorded when a run starts, compared when it resumes and when its adapter is used.

An adapter is right only on the weights that it was trained on, and peft loads it onto any others of the same shapes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from backend.models.fingerprint import describe_change, fingerprint
from backend.runs import BASE, json_values
from backend.runs.files import write_json
from backend.train.context import TrainContext
from backend.train.model import ModelSource
from backend.train.run_log import TrainError

FROM_BASE = ("tokenizer.model",)  # files that transformers 5 does not write, and that converters to GGUF need


def folder_of(source: ModelSource) -> Path | None:
    """Where the files of a model are on this machine; None if they are not."""
    if Path(source.name).is_dir():
        return Path(source.name)
    config = try_to_load_from_cache(source.name, "config.json", revision=source.options.get("revision"))
    return Path(config).parent if isinstance(config, str) else None


def recorded_folder(run: Path) -> Path | None:
    """Where the base model of the run in this folder is, as the run recorded it; None if it is not there."""
    found = json_values.read_object(run / BASE)
    return folder_of(ModelSource(found["name"], {"revision": found.get("commit") or None})) if found else None


def copy_tokenizer_files(base: Path | None, folder: Path) -> None:
    """Copy the files of the base model that its tokenizer is made of and that transformers does not save."""
    for name in FROM_BASE:
        if base and (base / name).is_file():
            shutil.copyfile(base / name, folder / name)


def commit_of(source: ModelSource) -> str:
    """The commit of a model from the Hub; '' for a folder, and if the model is not on this machine."""
    folder = folder_of(source)
    return folder.name if folder and not Path(source.name).is_dir() else ""


def describe(source: ModelSource) -> dict[str, str]:
    """The model's name, the commit of one from the Hub, and the fingerprint of its weights."""
    folder = folder_of(source)
    is_local = Path(source.name).is_dir()
    return {
        "name": os.path.abspath(source.name) if is_local else source.name,
        "commit": commit_of(source),
        "fingerprint": fingerprint(folder) if folder else "",
    }


def record(context: TrainContext, source: ModelSource, start: Path | None) -> None:
    """Write which weights the base model has, once they are on this machine. Raises TrainError if the run resumes from
    a checkpoint `start` of an adapter whose base model had others; other checkpoints have all weights."""
    now = describe(source)
    is_adapter = context.spec.method.kind == "lora"
    then = json_values.read_object(start.resolve().parent.parent / BASE) if start and is_adapter else {}
    if now["fingerprint"] and then.get("fingerprint") and then["fingerprint"] != now["fingerprint"]:
        raise TrainError(
            f"{source.name} has other weights than those that {start.name if start else ''} was trained with "
            f"(fingerprint now {now['fingerprint'][:8]}, then {then['fingerprint'][:8]}). Restore the base model, or "
            "restart the run from scratch."
        )
    with contextlib.suppress(OSError):  # a full disk
        write_json(context.folder / BASE, now)


def check_adapter(run: Path, source: ModelSource, adapter: Path) -> None:
    """Raise TrainError if `run` recorded that it has trained the adapter in this folder on other base weights."""
    now, then = describe(source), json_values.read_object(run / BASE)
    if now["fingerprint"] and then.get("fingerprint") and then["fingerprint"] != now["fingerprint"]:
        raise TrainError(
            f"lora.adapter_path: the adapter in {adapter} was trained on a base model with other weights than "
            f"{source.name} (fingerprint {then['fingerprint'][:8]}, here {now['fingerprint'][:8]}). Set the base model "
            "of the adapter."
        )


def check(run: Path, source: ModelSource) -> str:
    """How the base model of the run in this folder was identified, for a reader. Raises TrainError if its weights are
    not those of the training: an adapter would generate gibberish with them."""
    now, then = describe(source), json_values.read_object(run / BASE)
    if not then.get("fingerprint") or not now["fingerprint"]:
        return "not checked: the run recorded no fingerprint of its base model"
    if now["fingerprint"] != then["fingerprint"]:
        raise TrainError(describe_change(source.name, now["fingerprint"], then["fingerprint"]))
    return "the same weights as in training"
