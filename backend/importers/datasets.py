"""The datasets of another tool's file, as the list data.sources."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backend.config import Source
from backend.config.sources import key_of
from backend.data.compression import data_suffix
from backend.data.reading import SUFFIXES, is_document
from backend.importers.foreign import NO_EFFECT, Import, Table, is_path, words

# Of the datasets library: a file can name one of them in place of a dataset.
BUILDERS = ("json", "parquet", "csv", "text", "arrow")

_VALIDATION = re.compile(r"data\.(sources\[\d+\]\.)?validation")


@dataclass
class Dataset:
    """A dataset of a file: its `place` there, such as datasets[1], its table, and its options without the section."""

    place: str
    table: Table
    options: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)  # option -> the key of the file that has set it
    fits_all: bool = False  # validation files without a format: they take that of any dataset

    def set(self, key: str, option: str, value: Any) -> None:
        """Set an option because of a key."""
        self.options[option] = value
        self.keys[option] = f"{self.place}.{key}"

    def take_columns(self, columns: Mapping[str, str]) -> None:
        """Options whose value is the name of a column: key of the table -> option."""
        for key, option in columns.items():
            if name := self.table.get(key):
                self.set(key, option, str(name))

    @property
    def layout(self) -> dict[str, Any]:
        """The options that decide how examples are read."""
        return {name: value for name, value in self.options.items() if name == "format" or name.endswith("_column")}

    @property
    def name(self) -> str:
        """The files, or the ID on the Hub."""
        return ", ".join(self.options.get("files", ())) or str(self.options.get("hub_id", ""))


def listed(found: Import, key: str) -> list[Dataset]:
    """The datasets of a list, or of a single path."""
    return read_list(found, key, found.get(key))


def read_list(found: Import, name: str, given: Any) -> list[Dataset]:
    """The datasets of a list, or of a single path. Those without a path are named as missing."""
    parts = given if isinstance(given, list) else [given] if given else []
    datasets = []
    for index, part in enumerate(parts):
        place = f"{name}[{index}]" if isinstance(given, list) else name
        table = part if isinstance(part, Mapping) else {"path": part}
        if isinstance(path := table.get("path"), str) and path:
            datasets.append(Dataset(place, table))
        else:
            found.missing.append(f"{place}: {part} (a dataset needs a path)")
    return datasets


def locate(found: Import, dataset: Dataset) -> None:
    """Set where a dataset is: local files, or the Hugging Face Hub."""
    table = dataset.table
    name, split = table.get("name"), str(table.get("split") or "train")
    if files := local_files(found.base, table):
        set_files(found, dataset, files)
        left = {"name": name, "split": split if split != "train" else None}
        found.missing += [
            f"{dataset.place}.{key}: {value} (no effect on local files)" for key, value in left.items() if value
        ]
        return
    dataset.options |= {"source": "hub", "hub_id": str(table["path"]), "hub_split": split}
    dataset.options["hub_config"] = str(name or "")
    if names := table.get("data_files"):
        found.missing.append(f"{dataset.place}.data_files: {names} (all files of the split are read)")


def set_files(found: Import, dataset: Dataset, files: list[str]) -> None:
    """Set the local files of a dataset, and note which of them have other examples than with the datasets library."""
    dataset.options |= {"source": "files", "files": files}
    text = "Footplate reads a text file as one example; the datasets library reads each line as one"
    found.different += [f"{dataset.place}: {file}: {text}" for file in files if is_document(Path(file))]


def local_files(base: Path, table: Table) -> list[str]:
    """The local files of a dataset; none if it is on the Hugging Face Hub."""
    path, given = str(table["path"]), table.get("data_files")
    names = words(given.get(str(table.get("split") or "train")) if isinstance(given, Mapping) else given)
    if path in BUILDERS:
        return names
    if data_suffix(Path(path)) in SUFFIXES or (base / path).is_file():
        return [path]
    return ([str(Path(path) / name) for name in names] or [path]) if is_path(path) or (base / path).is_dir() else []


def name_unread(found: Import, dataset: Dataset, known: Collection[str]) -> None:
    """Note the keys of a dataset that have no counterpart."""
    found.missing += [
        f"{dataset.place}.{key}: {value}"
        for key, value in dataset.table.items()
        if key not in known and value not in NO_EFFECT
    ]


def set_share(found: Import, dataset: Dataset, key: str, value: Any, share: Any, is_alone: bool) -> None:
    """Use a share of a dataset's examples. A single dataset has no weight."""
    if is_alone:
        found.missing.append(f"{key}: {value} (all examples are used; data.max_samples sets their number)")
        return
    dataset.options["weight"], dataset.keys["weight"] = share, key
    found.different.append(f"{key}: {value}: Footplate draws its own random sample, so the examples differ")


def set_validation(found: Import, datasets: Sequence[Dataset], tests: Sequence[Dataset], share: float) -> None:
    """A validation set from the files of `tests`, each with a training dataset that is read in the same way, or split
    off each dataset."""
    for dataset in datasets:
        is_split = not tests and 0 < share < 1
        dataset.options |= {"validation": "split", "validation_split": share} if is_split else {"validation": "none"}
    for test in tests:
        same = [each for each in datasets if test.fits_all or each.layout == test.layout]
        if not (files := test.options.get("files")):
            found.missing.append(f"{test.place}: {test.name} (validation files must be local)")
        elif not same:
            text = "no training dataset has the same format and columns, which validation files require"
            found.missing.append(f"{test.place}: {test.name} ({text})")
        else:
            before = same[0].options.get("validation_files", [])
            same[0].options |= {"validation": "files", "validation_files": [*before, *files]}


def has_validation(found: Import) -> bool:
    """Whether one of the datasets has a validation set."""
    return any(value != "none" for name, value in found.patch.items() if _VALIDATION.fullmatch(name))


def put(found: Import, datasets: Sequence[Dataset]) -> None:
    """Set the options of all datasets. What the file sets for all of them, such as a system prompt, is part of each."""
    names = [name for name in Source.model_fields if f"data.{name}" in found.patch]
    shared = {name: found.patch.pop(f"data.{name}") for name in names}
    for index, dataset in enumerate(datasets):
        for name, value in {**shared, **dataset.options}.items():
            option = key_of(index, name)
            found.patch[option] = value
            if key := dataset.keys.get(name) or found.keys.get(f"data.{name}"):
                found.keys[option] = key
