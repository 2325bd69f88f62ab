"""LLaMA-Factory's datasets: names in its configuration file, described in dataset_info.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backend.importers.foreign import Import, Table, words

MAX_BYTES = 8 * 2**20  # of dataset_info.json
COLUMNS = {
    "prompt": "data.prompt_column", "response": "data.completion_column", "messages": "data.messages_column",
    "system": "data.system_column", "chosen": "data.chosen_column", "rejected": "data.rejected_column",
    "kto_tag": "data.label_column",
}  # fmt: skip
BY_NAME = {"query": "input", "history": "history", "tools": "tools"}  # read by these names here
PLACE = {
    "file_name", "hf_hub_url", "subset", "split", "formatting", "columns", "tags", "ranking", "ms_hub_url",
    "om_hub_url", "folder", "num_samples", "script_url", "cloud_file_name",
}  # fmt: skip
NAMES = {"user_tag": ("human", "user"), "assistant_tag": ("gpt", "assistant"), "system_tag": ("system",)}


def take_datasets(found: Import) -> list[str]:
    """Set the data source, format and columns; the files of `eval_dataset`."""
    info = _dataset_info(found)
    found.patch["data.source"] = "files"
    names = words(found.get("dataset"))
    entries = [entry for name in names if isinstance(entry := info.get(name), Mapping)]
    if len(names) == 1 and entries and entries[0].get("hf_hub_url") and not entries[0].get("file_name"):
        _take_hub(found, entries[0])
    else:
        found.patch["data.files"] = _files(found, info, "dataset")
    if entries:
        found.patch |= _layout(found, entries[0], f"dataset: {names[0]}")
    others = [name for name in names[1:] if _described(info.get(name)) != _described(info.get(names[0]))]
    found.different += [f"dataset: {name}: all files are read in the format of {names[0]}" for name in others]
    return _files(found, info, "eval_dataset")


def _dataset_info(found: Import) -> Table:
    """The content of dataset_info.json; empty if there is none."""
    path = found.base / str(found.get("dataset_dir", "data")) / "dataset_info.json"
    try:
        if path.stat().st_size > MAX_BYTES:
            return {}
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return table if isinstance(table, dict) else {}


def _take_hub(found: Import, entry: Table) -> None:
    found.patch |= {"data.source": "hub", "data.hub_id": str(entry["hf_hub_url"])}
    found.patch["data.hub_config"] = str(entry.get("subset") or "")
    found.patch["data.hub_split"] = str(entry.get("split") or "train")


def _files(found: Import, info: Table, key: str) -> list[str]:
    """The files of the datasets in `dataset` or `eval_dataset`."""
    files = []
    for name in words(found.get(key)):
        entry = info.get(name)
        if isinstance(entry, Mapping) and entry.get("file_name"):
            files.append(str(Path(str(found.get("dataset_dir", "data"))) / str(entry["file_name"])))
            if entry.get("num_samples"):
                found.missing.append(f"{key}: {name}: num_samples: {entry['num_samples']} (all examples are read)")
        else:
            place = f"{found.get('dataset_dir', 'data')}/dataset_info.json"
            option = "data.validation_files" if key == "eval_dataset" else "data.files"
            found.missing.append(f"{key}: {name} ({place} gives no file_name for it; add its file to {option})")
    return files


def _described(entry: Any) -> list[Any]:
    """What decides how examples are read."""
    keys = ("formatting", "columns", "tags", "ranking")
    return [entry.get(key) for key in keys] if isinstance(entry, Mapping) else []


def _layout(found: Import, entry: Table, name: str) -> dict[str, Any]:
    """The format and the columns of an entry; nothing where LLaMA-Factory's usual columns are detected as well."""
    if not any(_described(entry)):
        return {}
    columns, tags = (_table(entry.get(key)) for key in ("columns", "tags"))
    found.missing += [f"{name}: {key}: {entry[key]}" for key in entry if key not in PLACE and entry[key]]
    has_turns = entry.get("formatting") in ("sharegpt", "openai")
    usual = {"messages": "conversations"} if has_turns else {"prompt": "instruction", "response": "output"}
    columns = {key: str(column) for key, column in {**usual, **columns}.items() if column}
    patch = {COLUMNS[key]: column for key, column in columns.items() if key in COLUMNS} | {
        "data.format": _format(found, entry, columns, has_turns),
        "data.system_column": columns.get("system", ""),
    }
    if patch["data.format"] == "text":
        patch = {"data.format": "text", "data.text_column": columns["prompt"]}
    if has_turns and patch["data.format"] in ("pairs", "labels"):  # the conversation before the completion
        patch["data.prompt_column"] = patch.pop("data.messages_column")
    for key, column in columns.items():
        if key in BY_NAME and column != BY_NAME[key]:
            text = f"rename the column {column} to {BY_NAME[key]}; Footplate reads it only under that name"
            found.different.append(f"{name}: columns.{key}: {text}")
        elif key not in COLUMNS and key not in BY_NAME:
            found.missing.append(f"{name}: columns.{key}: {column}")
    wrong = [f"{key}: {tags[key]}" for key, known in NAMES.items() if tags.get(key, known[0]) not in known]
    found.different += [f"{name}: tags.{each}: Footplate does not recognize this role name" for each in wrong]
    return patch


def _table(value: Any) -> Table:
    return value if isinstance(value, Mapping) else {}


def _format(found: Import, entry: Table, columns: Table, has_turns: bool) -> str:
    if entry.get("ranking"):
        return "pairs"
    if columns.get("kto_tag"):
        return "labels"
    if has_turns:
        has_roles = entry["formatting"] == "openai" or _table(entry.get("tags")).get("role_tag") == "role"
        return "messages" if has_roles else "sharegpt"
    return "text" if found.patch["train.stage"] == "pretraining" else "alpaca"
