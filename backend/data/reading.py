"""Files of rows: found, and read line by line. Floor 1. Imports turns."""

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

from backend.data.chat import Row, kind

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")


class RowError(ValueError):
    """What is wrong with a file, or with one row of it: `line` counts from 1, 0 means the whole file."""

    def __init__(self, path: str | Path, line: int, sentence: str) -> None:
        super().__init__(f"{path}, line {line}: {sentence}" if line else f"{path}: {sentence}")
        self.path, self.line, self.sentence = str(path), line, sentence


def expand(files: Iterable[str], base: Path | None = None) -> list[Path]:
    """The files that paths and shell patterns name, each once; relative ones lie below `base`."""
    found: dict[Path, None] = {}
    for name in files:
        pattern = str((base or Path()) / Path(name).expanduser())
        paths = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))
        if not paths:
            raise RowError(name, 0, "no file matches" if glob.has_magic(name) else "no such file")
        found.update(dict.fromkeys(map(Path, paths)))
    return list(found)


def read_rows(path: Path, limit: int = 0) -> Iterator[tuple[int, Row]]:
    """(line number, row) of each row, at most `limit` of them (0: all). Raises RowError naming file and line.

    A row's line is the one it begins in; Parquet has no lines, there it is the row's number.
    """
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise RowError(path, 0, f"is of no kind that can be read; those are {', '.join(SUFFIXES)}")
    try:
        for count, (line, row) in enumerate(reader(path), 1):
            if not isinstance(row, Mapping):
                raise RowError(path, line, f"is {kind(row)} and no row: a row is an object with named columns")
            yield line, row
            if count == limit:
                return
    except UnicodeDecodeError as error:
        raise RowError(path, 0, f"is not UTF-8 text (byte {error.start} of a part of it)") from None
    except OSError as error:
        raise RowError(path, 0, f"cannot be read: {error.strerror or error}") from None


def _read_jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open(encoding="utf-8-sig") as file:
        for line, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                yield line, json.loads(text)
            except ValueError as error:
                raise RowError(path, line, f"is no JSON: {_reason(error)}") from None


def _read_json(path: Path) -> Iterator[tuple[int, Any]]:
    """A list of rows, or {"data": [rows]}; walked element by element, so that each row's line is known."""
    text = path.read_text(encoding="utf-8-sig")
    begin = _LIST.match(text)
    if begin is None:
        raise RowError(path, 0, 'must hold a list of rows, or {"data": [rows]} (one object a line is .jsonl)')
    at, line, counted, more = begin.end(), 1, 0, False
    while text[at : at + 1] != "]" or more:
        line, counted = line + text.count("\n", counted, at), at
        try:
            row, at = _DECODER.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise RowError(path, error.lineno, f"is no JSON: {_reason(error)}") from None
        yield line, row
        at = _skip(text, at)
        more = text[at : at + 1] == ","
        if not more and text[at : at + 1] != "]":
            raise RowError(path, text.count("\n", 0, at) + 1, "is no JSON: a comma or ] is missing")
        at = _skip(text, at + 1) if more else at
    rest = _skip(text, at + 1)
    if "{" not in begin.group() and rest < len(text):
        raise RowError(path, text.count("\n", 0, rest) + 1, "is no JSON: something stands after the list")


_LIST = re.compile(r'\s*(\{\s*"data"\s*:\s*)?\[\s*')
_BLANK = re.compile(r"\s*")
_DECODER = json.JSONDecoder()


def _skip(text: str, at: int) -> int:
    """Where the blanks from `at` on end."""
    found = _BLANK.match(text, at)
    return found.end() if found else at


def _read_csv(path: Path) -> Iterator[tuple[int, Any]]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # the usual limit of 128 kB is shorter than some answers
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        line = 2
        try:
            for row in reader:
                if None in row:
                    raise RowError(
                        path,
                        line,
                        f"has more cells than the {len(reader.fieldnames or ())} columns of line 1",
                    )
                yield line, row
                line = reader.line_num + 1
        except csv.Error as error:
            raise RowError(path, line, f"is no CSV: {error}") from None


def _read_parquet(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")  # only who reads such a file pays for it
    except ImportError:
        raise RowError(path, 0, "needs the package pyarrow: pip install pyarrow") from None
    try:
        number = 0
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except ValueError as error:  # pyarrow's errors are ValueErrors
        raise RowError(path, 0, f"is no Parquet file: {error}") from None


def _reason(error: ValueError) -> str:
    """json's own words without the position, which stands before them already."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg[:1].lower()}{error.msg[1:]} (column {error.colno})"
    return str(error)
