"""LLaMA-Factory's datasets: names in its configuration file, described in dataset_info.json."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from backend.config.options import Problem, SpecError
from backend.config.sources import key_of
from backend.importers import datasets
from backend.importers.datasets import Dataset, set_files
from backend.importers.foreign import Import, Table, words

MAX_BYTES = 8 * 2**20  # of dataset_info.json
COLUMNS = {
    "prompt": "prompt_column", "response": "completion_column", "messages": "messages_column",
    "system": "system_column", "chosen": "chosen_column", "rejected": "rejected_column", "kto_tag": "label_column",
}  # fmt: skip
# Without replacement, each example is in the mixture once, as with concat.
MIXING = {
    "concat": "concatenate",
    "interleave_under": "interleave_first_exhausted",
    "interleave_over": "interleave_all_exhausted",
    "interleave_once": "concatenate",
}
INFO = "dataset_info.json"
ONLINE = "ONLINE"  # a dataset_dir: names are IDs on the Hub
REMOTE = "REMOTE:"  # begins a dataset_dir that is a repository on the Hub
BY_NAME = {"query": "input", "history": "history", "tools": "tools"}  # Footplate reads them by these names
PLACE = {
    "file_name", "hf_hub_url", "subset", "split", "formatting", "columns", "tags", "ranking", "ms_hub_url",
    "om_hub_url", "folder", "num_samples", "script_url", "cloud_file_name",
}  # fmt: skip
NAMES = {"user_tag": ("human", "user"), "assistant_tag": ("gpt", "assistant"), "system_tag": ("system",)}


def take_datasets(found: Import) -> None:
    """Set all datasets, their mixture and their validation sets."""
    info = _dataset_info(found)
    given = _listed(found, info, "dataset") or [Dataset("dataset", {}, {"source": "files", "files": []})]
    tests = [each for each in _listed(found, info, "eval_dataset") if each.options]
    _mix(found, given)
    share = found.number("val_size")
    datasets.set_validation(found, given, tests, share)
    if share and not 0 < share < 1:
        found.missing.append(f"val_size: {share} (a number of examples; data.validation_split is a fraction)")
    most = found.patch.get("data.max_samples")
    for dataset in given:
        number = dataset.options.get("max_samples")
        if isinstance(most, int) and isinstance(number, int) and 0 < most < number:
            dataset.options["max_samples"] = most
    datasets.put(found, given)


def _mix(found: Import, given: Sequence[Dataset]) -> None:
    """How the datasets are put together, and their weights."""
    name, shares = str(found.get("mix_strategy", "concat")), words(found.get("interleave_probs"))
    if name not in MIXING:
        raise found.fail("mix_strategy", name, f"supported values are {', '.join(MIXING)}")
    if len(given) == 1:
        return
    found.patch["data.mixing"] = MIXING[name]
    if not shares:
        return
    if not MIXING[name].startswith("interleave"):
        found.missing.append(f"interleave_probs: {','.join(shares)} (the mixture has each example once)")
        return
    if len(shares) != len(given):
        text = f"interleave_probs must have a number for each of the {len(given)} datasets, but has {len(shares)}"
        raise SpecError([Problem("", text)])
    for dataset, share in zip(given, shares, strict=True):
        dataset.options["weight"], dataset.keys["weight"] = share, "interleave_probs"


def _listed(found: Import, info: Table, key: str) -> list[Dataset]:
    """The datasets of `dataset` or `eval_dataset`. Those without a description keep their place in the list, so that
    their files can be added."""
    folder, names = str(found.get("dataset_dir", "data")), words(found.get(key))
    return [_described(found, key, name, index, info.get(name), folder) for index, name in enumerate(names)]


def _described(found: Import, key: str, name: str, index: int, entry: Any, folder: str) -> Dataset:
    """A dataset with its entry in dataset_info.json."""
    dataset = Dataset(f"{key}: {name}", entry if isinstance(entry, Mapping) else {})
    entry = dataset.table
    if folder == ONLINE:
        dataset.options |= {"source": "hub", "hub_id": name}
    elif entry.get("hf_hub_url"):
        dataset.options |= {"source": "hub", "hub_id": str(entry["hf_hub_url"])}
        dataset.options["hub_config"] = str(entry.get("subset") or "")
        dataset.options["hub_split"] = str(entry.get("split") or "train")
        _name_left(found, dataset, "folder")
    elif entry.get("file_name"):
        set_files(found, dataset, [str(Path(folder) / str(entry["file_name"]))])
        _name_left(found, dataset, "subset", *(["split"] if entry.get("split") != "train" else []))
    elif key == "eval_dataset":
        place = f"{_no_file(found, folder)}; add its file to data.validation_files"
        found.missing.append(f"{dataset.place} ({place})")
        return dataset
    else:
        option = key_of(index, "files")
        found.missing.append(f"{dataset.place} ({_no_file(found, folder)}; add its file to {option})")
        dataset.options |= {"source": "files", "files": []}
    dataset.options |= _layout(found, entry, dataset.place)
    if (number := entry.get("num_samples")) and key == "eval_dataset":
        found.missing.append(f"{dataset.place}: num_samples: {number} (all of its examples are used)")
    elif number:
        dataset.options["max_samples"] = number
        dataset.keys["max_samples"] = f"{dataset.place}: num_samples"
        text = "if the dataset has fewer examples, LLaMA-Factory repeats some; Footplate does not"
        found.different.append(f"{dataset.place}: num_samples: {number}: {text}")
    return dataset


def _no_file(found: Import, folder: str) -> str:
    """Why the file of a dataset is not known."""
    if folder.startswith(REMOTE):
        return f"{folder} is a repository on the Hub, whose {INFO} is not read"
    path = os.path.join(found.base, folder, INFO)
    return f"{folder}/{INFO} gives no file_name for it" if os.path.isfile(path) else f"there is no file {path}"


def _name_left(found: Import, dataset: Dataset, *keys: str) -> None:
    """Note the keys without a counterpart that say which part of a dataset is used."""
    found.missing += [f"{dataset.place}: {key}: {dataset.table[key]}" for key in keys if dataset.table.get(key)]


def _dataset_info(found: Import) -> Table:
    """The content of dataset_info.json; empty if there is none."""
    path = found.base / str(found.get("dataset_dir", "data")) / INFO
    try:
        if path.stat().st_size > MAX_BYTES:
            return {}
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return table if isinstance(table, dict) else {}


def _layout(found: Import, entry: Table, name: str) -> dict[str, Any]:
    """The format and the columns of an entry; nothing where LLaMA-Factory's usual columns are detected as well."""
    if not any(entry.get(key) for key in ("formatting", "columns", "tags", "ranking")):
        return {}
    columns, tags = (_table(entry.get(key)) for key in ("columns", "tags"))
    found.missing += [f"{name}: {key}: {entry[key]}" for key in entry if key not in PLACE and entry[key]]
    has_turns = entry.get("formatting") in ("sharegpt", "openai")
    usual = {"messages": "conversations"} if has_turns else {"prompt": "instruction", "response": "output"}
    columns = {key: str(column) for key, column in {**usual, **columns}.items() if column}
    patch = {COLUMNS[key]: column for key, column in columns.items() if key in COLUMNS} | {
        "format": _format(found, entry, columns, has_turns),
        "system_column": columns.get("system", ""),
    }
    if patch["format"] == "text":
        patch = {"format": "text", "text_column": columns["prompt"]}
    if has_turns and patch["format"] in ("pairs", "labels"):  # the conversation before the completion
        patch["prompt_column"] = patch.pop("messages_column")
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
