"""Data files: which ones a run reads, and reading of them, example by example."""

from __future__ import annotations

import csv
import fnmatch
import importlib.util
import json
import os
import pickle
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import IO, Any, TextIO

from backend.config import Source
from backend.data import json_problems, parquet_rows
from backend.data.chat import Example, shorten, type_name
from backend.data.compression import (
    DOCUMENTS,
    ERRORS,
    TEXT,
    DamagedFile,
    data_suffix,
    is_compressed,
    open_bytes,
    open_text,
)
from backend.data.patterns import TooManyEntries, is_pattern, matches
from backend.paths import ASSETS

BINARY = (".parquet", ".arrow")
SUFFIXES = (*TEXT, *BINARY)
ICONV = "convert it, for example with iconv -f {} -t utf-8"
# The first bytes of files that often have the wrong suffix, or are not the data at all.
CONTENTS: tuple[tuple[tuple[bytes, ...], str], ...] = (
    ((b"version https://git-lfs.github.com/spec/",), "is a Git LFS pointer, not the file itself; run git lfs pull"),
    ((b"\x1f\x8b",), "is compressed with gzip; rename it, for example to train.jsonl.gz"),
    ((b"\x28\xb5\x2f\xfd",), "is compressed with zstd; rename it, for example to train.jsonl.zst"),
    ((b"\xfd7zXZ\x00",), "is compressed with xz; rename it, for example to train.jsonl.xz"),
    ((b"PK\x03\x04",), "is a zip archive or an Excel workbook; extract it, or export it as CSV"),
    (tuple(bytes([0x80, version]) for version in range(2, 6)), "is a Python pickle; save it as .jsonl or .parquet"),
    ((b"\xff\xfe", b"\xfe\xff"), f"is UTF-16 text; {ICONV.format('utf-16')}"),
)
MIB = 2**20
MAX_LINE = 64 * MIB  # characters of one example; the longest sequences have a few MB
MAX_BLANK_LINES = 1_000_000  # consecutive ones; a compressed file of a few MB could have billions
MAX_JSON = 2 * 1024 * MIB  # characters: a .json file is parsed as a whole
PARQUET_SECONDS = 60.0  # starting Python and reading what a check needs takes 0.5 s
LENGTH_BYTES = 8
MAX_FILES = 10_000  # in a folder
# Files about a dataset in a folder that `datasets` has saved, or that was downloaded from the Hub; and what the library
# keeps next to the data when it computes something of it, such as a copy of all examples.
ABOUT_DATASETS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
CACHED_BY_DATASETS = "cache-*.arrow"
ABOUT_FOLDERS = ("readme", "license")  # documents with these names, such as README.md
SUPPORTED = f"{', '.join(TEXT)} (also compressed, such as .jsonl.gz), .parquet and .arrow"
HTML = (b"<!doctype html", b"<html")
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs"}  # separator of columns -> its name


ROW, LINE = ", row ", ", line "  # between a file and the number of an example


def place(path: str | Path, line: int) -> str:
    """Where an example is; `line` counts from 1, 0 is the whole file. The rows of binary files are not lines."""
    return f"{path}{ROW if str(path).lower().endswith(BINARY) else LINE}{line}" if line else str(path)


def file_of(place: str) -> str:
    """The file of a place."""
    return re.split(f"{ROW}|{LINE}", place)[0]


class DataFileError(ValueError):
    """A data file that cannot be read, or, with `is_example`, one invalid example, after which the next can be read.
    `line` counts from 1, 0 is the whole file. The message completes "FILE, line N: "."""

    def __init__(self, path: str | Path, line: int, message: str) -> None:
        super().__init__(f"{place(path, line)}: {message}")
        self.path, self.line, self.message, self.is_example = str(path), line, message, False


Skip = Callable[[DataFileError], None]  # what happens with an example that cannot be read


def file_patterns(data: Source) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(training, validation) files of a dataset, as paths, folders and glob patterns. One on the Hub has no training
    files."""
    if data.source == "builtin":
        folder = ASSETS / data.builtin
        return (str(folder / "train.jsonl"),), (str(folder / "validation.jsonl"),)
    train = data.files if data.source == "files" else ()
    return train, data.validation_files if data.validation == "files" else ()


def expand(files: Iterable[str], base: Path | None = None) -> list[Path]:
    """The files that paths, folders and glob patterns match, without duplicates; relative ones are resolved against
    `base`. A folder stands for the data files in it, recognized by their names, in the order of these names; for its
    documents if it has no others."""
    found: dict[str, Path] = {}  # by its path without symbolic links
    for name in files:
        pattern = str((base or Path()) / os.path.expanduser(name))  # Path.expanduser raises for unknown users
        try:
            paths = [pattern] if Path(pattern).exists() else sorted(matches(pattern))
            paths = [*filter(_is_data, paths)] or paths  # without data, such files are meant
        except TooManyEntries as error:
            raise DataFileError(name, 0, str(error)) from None
        except OSError as error:  # such as a name that is too long, because it is the data itself
            raise DataFileError(shorten(name), 0, f"cannot be read: {error.strerror or error}") from None
        if not paths:
            raise DataFileError(name, 0, _no_file_problem(name, pattern))
        for path in map(Path, paths):
            for file in _files_in(path) if path.is_dir() else [path]:
                found.setdefault(os.path.realpath(file), file)
    return list(found.values())


def documents_left_out(folder: Path) -> list[Path]:
    """The documents in a folder that also has other data files, for which it stands. Raises DataFileError."""
    found = _data_in(folder)
    documents = [path for path in found if is_document(path)]
    return documents if len(documents) < len(found) else []


def _files_in(folder: Path) -> list[Path]:
    found = _data_in(folder)
    if not found:
        raise DataFileError(
            folder, 0, f"contains no data files (subfolders are not searched); supported are {SUPPORTED}"
        )
    return [path for path in found if not is_document(path)] or found


def _data_in(folder: Path) -> list[Path]:
    try:
        entries = [Path(entry.path) for entry in islice(os.scandir(folder), MAX_FILES + 1) if _is_file(entry)]
    except OSError as error:
        raise DataFileError(folder, 0, f"cannot be read: {error.strerror or error}") from None
    if len(entries) > MAX_FILES:
        raise DataFileError(folder, 0, f"has more than {MAX_FILES:,} files; list some of them with a pattern")
    data = (path for path in entries if data_suffix(path) in SUFFIXES and path.name[0] not in "._")
    return sorted(path for path in data if _is_data(path.name))


def is_document(path: Path) -> bool:
    """Whether the whole file is one text, and not a list of examples."""
    return data_suffix(path) in DOCUMENTS


def _is_data(path: str) -> bool:
    name = os.path.basename(path)
    if is_document(Path(name)):
        return name.lower().partition(".")[0] not in ABOUT_FOLDERS
    return name not in ABOUT_DATASETS and not fnmatch.fnmatch(name, CACHED_BY_DATASETS)


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:  # a symbolic link that leads to itself
        return False


def _no_file_problem(name: str, pattern: str) -> str:
    """Why a path or pattern, `pattern` with its base, matches nothing. For a name that looks like several paths or is
    quoted, it says how to write the path."""
    problem = "matches no file" if is_pattern(pattern) else "does not exist"
    if problem != "does not exist" and "[" in os.path.basename(pattern):
        problem += "; in a pattern, [[] stands for the character ["
    is_list = "," in name or ";" in name or name.endswith(('"', "'"))
    return f"{problem}; write each path on a separate line, without quotes or commas" if is_list else problem


def read_examples(
    path: Path, limit: int = 0, in_server: bool = False, skip: Skip | None = None
) -> Iterator[tuple[int, Example]]:
    """(line number, example) of each example, `limit` of them at most (0: all). Raises DataFileError.

    The line is the one that an example begins in; in a Parquet file, it is the number of the row, and 0 for a document,
    whose text is the only example of its file. `in_server`: a
    Parquet file is read by a process with limits, since its reader cannot be interrupted. `skip` gets the error of an
    example instead of an exception, if the next example can be read.
    """
    parquet = read_parquet_in_process if in_server else _read_parquet
    readers: Mapping[str, Callable[[Path], Iterator[tuple[int, Any]]]] = {
        ".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".tsv": _read_csv,
        ".parquet": parquet, ".arrow": parquet, **dict.fromkeys(DOCUMENTS, _read_document),
    }  # fmt: skip
    reader = readers.get(data_suffix(path))
    try:
        if path.exists() and not path.is_file():  # reading a pipe would wait for a writer
            raise DataFileError(path, 0, "is not a regular file")
        if reader is None:
            raise DataFileError(path, 0, f"has an unsupported file type; supported are {SUPPORTED}")
        if problem := _content_problem(path):
            raise DataFileError(path, 0, problem)
        yield from islice(_with_columns(path, reader(path), skip), limit or None)
    except UnicodeDecodeError as error:
        if is_compressed(path):
            raise DataFileError(path, 0, f"is damaged, or not UTF-8 text: {error.reason}") from None
        raise _encoding_error(path) from None
    except OSError as error:
        raise DataFileError(path, 0, f"cannot be read: {error.strerror or error}") from None
    except ERRORS as error:
        damage = str(error) if isinstance(error, DamagedFile) else f"cannot be decompressed: {error}"
        raise DataFileError(path, 0, damage[:1].lower() + damage[1:]) from None


def _with_columns(path: Path, rows: Iterable[tuple[int, Any]], skip: Skip | None) -> Iterator[tuple[int, Example]]:
    """The rows that are examples. An error in place of a row is raised, or given to `skip`."""
    for line, row in rows:
        if isinstance(row, Mapping):
            yield line, row
            continue
        expected = f"is {type_name(row)}; expected an object with named columns"
        error = row if isinstance(row, DataFileError) else DataFileError(path, line, expected)
        error.is_example = True
        if skip is None:
            raise error
        skip(error)


def _content_problem(path: Path) -> str:
    """What a file is, if its first bytes are not those of its suffix; '' if they may be. Raises OSError and ERRORS."""
    with open_bytes(path) as file:
        head = file.read(512)
    for starts, problem in CONTENTS:
        if head.startswith(starts):
            return problem
    suffix = data_suffix(path)
    if head.startswith(b"PAR1") and suffix != ".parquet":
        return "is a Parquet file; rename it to .parquet"
    if head.lstrip().lower().startswith(HTML):
        return "is an HTML page, not data: the download may have failed, or needs a login"
    if suffix in TEXT and len(head) > 1 and (head[0] == 0) != (head[1] == 0):
        return f"is UTF-16 text; {ICONV.format('utf-16le' if head[0] else 'utf-16be')}"
    first = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if suffix == ".jsonl" and first == b"[":
        return "contains a JSON list, and a .jsonl file has one object per line; rename it to .json"
    return ""


def _encoding_error(path: Path) -> DataFileError:
    """The first line of a file that is not UTF-8, and its first invalid byte."""
    with open_bytes(path) as file:
        for line, text in enumerate(iter(lambda: file.readline(MAX_LINE), b""), 1):
            try:
                text.decode()
            except UnicodeDecodeError as error:
                byte = f"byte {text[error.start]:#04x} in column {error.start + 1}"
                return DataFileError(path, line, f"is not UTF-8 text: {byte}; {ICONV.format('windows-1252')}")
    return DataFileError(path, 0, "is not UTF-8 text")


def _read_jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    with open_text(path) as file:
        for line, text in enumerate(_lines(path, file), 1):
            if not text.strip():
                continue
            try:
                yield line, json.loads(text)
            except (ValueError, RecursionError) as error:
                yield line, DataFileError(path, line, json_problems.describe(error, text, is_line=True))


def _read_document(path: Path) -> Iterator[tuple[int, Any]]:
    """The text of a file as one example, unless it is empty. Examples in JSON under another name are refused: they
    would be learned as text."""
    with open_text(path) as file:
        text = file.read(MAX_LINE + 1)
    if _is_object(text.lstrip().partition("\n")[0]):
        raise DataFileError(path, 0, "contains JSON, not a document; rename it to .jsonl")
    if len(text) > MAX_LINE:
        most = f"a document has at most {MAX_LINE // MIB} MiB"
        lines = 'or lines {"text": "..."} of a .jsonl file'
        raise DataFileError(path, 0, f"is too long: {most}; split it into several files, {lines}")
    if text.strip():
        yield 0, {"text": text}


def _is_object(text: str) -> bool:
    try:
        return text[:1] == "{" and isinstance(json.loads(text), Mapping)
    except (ValueError, RecursionError):
        return False


def _lines(path: Path, file: TextIO) -> Iterator[str]:
    """The lines of a text file. Raises DataFileError for one that does not fit into memory."""
    blank = 0
    for line, text in enumerate(iter(lambda: file.readline(MAX_LINE), ""), 1):
        blank = 0 if text.strip() else blank + 1
        if blank > MAX_BLANK_LINES:
            raise DataFileError(path, line, f"follows more than {MAX_BLANK_LINES:,} empty lines; remove them")
        if len(text) == MAX_LINE and not text.endswith("\n"):
            raise DataFileError(path, line, f"is longer than {MAX_LINE // MIB} MiB; one example is expected per line")
        yield text


def _read_json(path: Path) -> Iterator[tuple[int, Any]]:
    """A list of examples, or {"data": [...]}; decoded element by element, so that the line of each example is known."""
    text, is_large = "", path.stat().st_size > MAX_JSON
    if not is_large:
        with open_text(path) as file:
            text = file.read(MAX_JSON + 1)
    if is_large or len(text) > MAX_JSON:
        most = f"a .json file of more than {MAX_JSON // 2**30} GiB cannot be read"
        raise DataFileError(path, 0, f"is too large: {most}; write one object per line into a .jsonl file")
    at = _list_start(text)
    if not at:
        raise DataFileError(
            path,
            0,
            'must contain a list of examples, or {"data": [...]}; a file with one object per line must be named .jsonl',
        )
    line, counted, more = 1, 0, False
    while text[at : at + 1] != "]" or more:
        line, counted = line + text.count("\n", counted, at), at
        try:
            row, at = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            place = json_problems.locate(text, error.pos)[0] if isinstance(error, json.JSONDecodeError) else line
            raise DataFileError(path, place, json_problems.describe(error, text, is_line=False)) from None
        yield line, row
        at = _skip(text, at)
        more = text[at : at + 1] == ","
        if not more and text[at : at + 1] != "]":
            raise DataFileError(path, json_problems.locate(text, at)[0], json_problems.describe_list(text, at))
        at = _skip(text, at + 1) if more else at
    rest = _skip(text, at + 1)
    if text.lstrip()[:1] == "[" and rest < len(text):
        raise DataFileError(path, text.count("\n", 0, rest) + 1, "is not valid JSON: there is text after the list")


_BLANK = re.compile(r"\s*")
_DECODER = json.JSONDecoder()


def _list_start(text: str) -> int:
    """The position of the first element of the list of examples, which is the whole text or the value of the key data;
    0 without one."""
    at = _skip(text, 0)
    if text[at : at + 1] == "[":
        return _skip(text, at + 1)
    more = text[at : at + 1] == "{"
    try:
        while more:
            key, at = _DECODER.raw_decode(text, _skip(text, at + 1))
            at = _skip(text, at)
            value = _skip(text, at + 1)
            if text[at : at + 1] != ":":
                return 0
            if key == "data":
                return _skip(text, value + 1) if text[value : value + 1] == "[" else 0
            at = _skip(text, _DECODER.raw_decode(text, value)[1])
            more = text[at : at + 1] == ","
    except (ValueError, RecursionError):
        pass
    return 0


def _skip(text: str, at: int) -> int:
    """The position of the first character at or after `at` that is not whitespace."""
    found = _BLANK.match(text, at)
    return found.end() if found else at


def _read_csv(path: Path) -> Iterator[tuple[int, Any]]:
    csv.field_size_limit(MAX_LINE)  # the default limit of 128 KiB is shorter than some completions
    separator = column_separator(path)
    with open_text(path, newline="") as file:
        reader, line = csv.reader(_lines(path, file), strict=True, delimiter=separator), 1
        names: list[str] = []
        try:
            for fields in reader:
                if names and fields:
                    problem = _row_problem(len(fields), len(names), separator)
                    yield line, DataFileError(path, line, problem) if problem else dict(zip(names, fields, strict=True))
                elif fields:
                    names = fields
                    if problem := _header_problem(names, separator):
                        raise DataFileError(path, line, problem)
                line = reader.line_num + 1
        except csv.Error as error:
            raise DataFileError(path, line, f"is not valid CSV: {error}") from None


def column_separator(path: Path) -> str:
    """The separator of the columns: tabs in a .tsv file, commas in a .csv file, or what its header has instead. Excel
    writes semicolons where numbers have a decimal comma."""
    if data_suffix(path) == ".tsv":
        return "\t"
    with open_text(path, newline="") as file:
        header = next((line for line in _lines(path, file) if line.strip()), "")
    outside = re.sub('"[^"]*"', "", header)
    return next((each for each in SEPARATORS if each in outside), ",")


def _row_problem(fields: int, columns: int, separator: str) -> str:
    """Why a row with this many fields does not fit the header; '' if it does."""
    if fields == columns:
        return ""
    wrong, cause = ("more", SEPARATORS[separator]) if fields > columns else ("fewer", "line breaks")
    return f"has {wrong} fields ({fields}) than the header has columns ({columns}); quote fields that contain {cause}"


def _header_problem(names: list[str], separator: str) -> str:
    """Why these column names are not a header; '' if they are."""
    other = next((each for each in SEPARATORS if len(names) == 1 and each in names[0]), separator)
    if other != separator and separator == "\t":
        found, expected = SEPARATORS[other], SEPARATORS[separator]
        return f"has columns that are separated by {found}, but {expected} are expected"
    return _duplicate_problem(names)


def _duplicate_problem(names: Iterable[str]) -> str:
    twice = next((name for name, count in Counter(names).items() if count > 1 and name), "")
    return f"has two columns {shorten(twice)}" if twice else ""


def _read_parquet(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        arrow = importlib.import_module("pyarrow")  # imported here: 0.2 s, and most data is not Parquet
    except ImportError:
        raise DataFileError(path, 0, "cannot be read without pyarrow: pip install pyarrow") from None
    try:
        number = 0
        names, batches = parquet_rows.open_batches(str(path), 256)
        if problem := _duplicate_problem(names):
            raise DataFileError(path, 0, problem)
        for batch in batches:
            for row in batch.to_pylist():
                number += 1
                yield number, without_padding(row)
    except DataFileError:
        raise
    except UnicodeDecodeError:
        raise DataFileError(path, 0, "contains text that is not UTF-8") from None
    except (arrow.ArrowException, SystemError) as error:
        raise DataFileError(path, 0, parquet_rows.invalid(str(path), error)) from None
    except (ValueError, OverflowError) as error:  # such as a time after the year 9999
        raise DataFileError(path, 0, f"contains a value that Python cannot represent: {error}") from None


def read_parquet_in_process(path: Path) -> Iterator[tuple[int, Any]]:
    """Same as `_read_parquet`, in a process with a memory limit and a deadline (parquet_rows.py)."""
    if importlib.util.find_spec("pyarrow") is None:
        raise DataFileError(path, 0, "cannot be read without pyarrow: pip install pyarrow")
    command = [sys.executable, "-P", parquet_rows.__file__, str(path)]
    environment = {**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
    deadline = threading.Timer(PARQUET_SECONDS, process.kill)
    deadline.start()
    try:
        assert process.stdout
        names = _message(path, process.stdout)
        if isinstance(names, list) and (problem := _duplicate_problem(names)):
            raise DataFileError(path, 0, problem)
        number, row = 0, names if isinstance(names, str) else _message(path, process.stdout)
        while not isinstance(row, str):
            number += 1
            yield number, without_padding(row)
            row = _message(path, process.stdout)
        if row:
            raise DataFileError(path, 0, row)
    finally:
        deadline.cancel()
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


def without_padding(row: Example) -> dict[str, Any]:
    """A row of Parquet or Arrow without the nulls inside its columns: each struct has the keys of all rows."""
    return {name: _unpadded(value) for name, value in row.items()}


def _unpadded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _unpadded(part) for key, part in value.items() if part is not None}
    return [_unpadded(part) for part in value] if isinstance(value, list) else value


def _message(path: Path, stream: IO[bytes]) -> Any:
    """The next message of parquet_rows.py. Raises DataFileError if the process ends first."""
    length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
    data = stream.read(length) if length <= MAX_LINE else b""
    if not data or len(data) < length:
        raise DataFileError(path, 0, "takes too much memory or time to read; write it again, with smaller row groups")
    return pickle.loads(data)  # written by Footplate's own process
