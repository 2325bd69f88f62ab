"""Data files: which ones a run reads, and reading of .jsonl, .json, .csv and .parquet files, example by example.

Imports config, paths.
"""

from __future__ import annotations

import csv
import glob
import importlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from backend.config import Data
from backend.data.chat import Example, type_name
from backend.paths import ASSETS

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")


class DataFileError(ValueError):
    """A data file that cannot be read, or one invalid example: `line` counts from 1, 0 is the whole file. The message
    completes "FILE, line N: "."""

    def __init__(self, path: str | Path, line: int, message: str) -> None:
        super().__init__(f"{path}, line {line}: {message}" if line else f"{path}: {message}")
        self.path, self.line, self.message = str(path), line, message


def file_patterns(data: Data) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(training, validation) files of a run, as paths and glob patterns. A dataset on the Hub has no training files."""
    if data.source == "builtin":
        folder = ASSETS / data.builtin
        return (str(folder / "train.jsonl"),), (str(folder / "validation.jsonl"),)
    train = data.files if data.source == "files" else ()
    return train, data.validation_files if data.validation == "files" else ()


def expand(files: Iterable[str], base: Path | None = None) -> list[Path]:
    """The files that paths and glob patterns match, without duplicates; relative ones are resolved against `base`."""
    found: dict[Path, None] = {}
    for name in files:
        pattern = str((base or Path()) / Path(name).expanduser())
        paths = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))
        if not paths:
            raise DataFileError(name, 0, "matches no file" if glob.has_magic(name) else "does not exist")
        found.update(dict.fromkeys(map(Path, paths)))
    return list(found)


def read_examples(path: Path, limit: int = 0) -> Iterator[tuple[int, Example]]:
    """(line number, example) of each example, `limit` of them at most (0: all). Raises DataFileError.

    The line is the one that an example begins in; of a Parquet file, the number of the row.
    """
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise DataFileError(path, 0, f"has an unsupported file type; supported are {', '.join(SUFFIXES)}")
    try:
        for count, (line, example) in enumerate(reader(path), 1):
            if not isinstance(example, Mapping):
                raise DataFileError(path, line, f"is {type_name(example)}; expected an object with named columns")
            yield line, example
            if count == limit:
                return
    except UnicodeDecodeError:
        raise DataFileError(path, 0, "is not UTF-8 text; convert it with iconv -t utf-8") from None
    except OSError as error:
        raise DataFileError(path, 0, f"cannot be read: {error.strerror or error}") from None


def _read_jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open(encoding="utf-8-sig") as file:
        for line, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                yield line, json.loads(text)
            except ValueError as error:
                raise DataFileError(path, line, f"is not valid JSON: {_reason(error)}") from None


def _read_json(path: Path) -> Iterator[tuple[int, Any]]:
    """A list of examples, or {"data": [...]}; decoded element by element, so that the line of each example is known."""
    text = path.read_text(encoding="utf-8-sig")
    begin = _LIST.match(text)
    if begin is None:
        raise DataFileError(
            path, 0, 'must contain a list of examples, or {"data": [...]}; one object per line is a .jsonl file'
        )
    at, line, counted, more = begin.end(), 1, 0, False
    while text[at : at + 1] != "]" or more:
        line, counted = line + text.count("\n", counted, at), at
        try:
            row, at = _DECODER.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise DataFileError(path, error.lineno, f"is not valid JSON: {_reason(error)}") from None
        yield line, row
        at = _skip(text, at)
        more = text[at : at + 1] == ","
        if not more and text[at : at + 1] != "]":
            raise DataFileError(path, text.count("\n", 0, at) + 1, "is not valid JSON: a comma or ] is missing")
        at = _skip(text, at + 1) if more else at
    rest = _skip(text, at + 1)
    if "{" not in begin.group() and rest < len(text):
        raise DataFileError(path, text.count("\n", 0, rest) + 1, "is not valid JSON: there is text after the list")


_LIST = re.compile(r'\s*(\{\s*"data"\s*:\s*)?\[\s*')
_BLANK = re.compile(r"\s*")
_DECODER = json.JSONDecoder()


def _skip(text: str, at: int) -> int:
    """The position of the first character at or after `at` that is not whitespace."""
    found = _BLANK.match(text, at)
    return found.end() if found else at


def _read_csv(path: Path) -> Iterator[tuple[int, Any]]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # the default limit of 128 KiB is shorter than some completions
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        line = 2
        try:
            for row in reader:
                if None in row:
                    columns = len(reader.fieldnames or ())
                    message = f"has more fields than the {columns} columns of line 1; quote fields that contain commas"
                    raise DataFileError(path, line, message)
                yield line, row
                line = reader.line_num + 1
        except csv.Error as error:
            raise DataFileError(path, line, f"is not valid CSV: {error}") from None


def _read_parquet(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")  # imported here: 0.2 s, and most data is not Parquet
    except ImportError:
        raise DataFileError(path, 0, "cannot be read without pyarrow: pip install pyarrow") from None
    try:
        number = 0
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except ValueError as error:  # pyarrow's errors are ValueErrors
        raise DataFileError(path, 0, f"is not a valid Parquet file: {error}") from None


def _reason(error: ValueError) -> str:
    """The message of the json module with the column only: the location already has the line."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg[:1].lower()}{error.msg[1:]} (column {error.colno})"
    return str(error)
