"""A look at data files: format, columns, rows, lengths, wrongs. Floor 2. Imports catalog, paths, rows, spec, facts.

A look is bounded (64 MB and 0.2 s of rows, the rest is counted or estimated) and remembered as long as a file's time
and size stay.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from backend import registry
from backend.config import Data, RunSpec
from backend.data import RowError, Unfit, convert, expand, read_rows, recognise
from backend.inspect.facts import DataIssue
from backend.paths import ASSETS

MOST_BYTES = 64 * 2**20
MOST_SECONDS = 0.2
MOST_TROUBLES = 3  # a file
MOST_LENGTHS = 2000  # a file
MARKS = 3  # tokens by which a template opens and closes a turn, beside those that _tokens counts
SINGLE = re.compile(r"[^\sA-Za-z]")


@dataclass(frozen=True)
class Asked:
    """What rows are read as: the formats that the stage takes, the one that is named, the columns, a system prompt."""

    wanted: tuple[str, ...]
    format: str
    columns: tuple[str, ...]
    system: str


@dataclass(frozen=True)
class _Seen:
    """What was seen of one file."""

    rows: int
    exact: bool
    format: str
    columns: tuple[str, ...]
    lengths: tuple[int, ...]
    min_prompt_tokens: int
    labels: tuple[int, int]
    issues: tuple[tuple[str, str, bool], ...]  # where, sentence, row


COLUMNS = tuple(name for name in Data.model_fields if name.endswith("_column"))


def look_at_data(spec: RunSpec, base: Path) -> dict[str, Any]:
    """The fields of a Glance that speak of rows."""
    data, wanted = spec.data, registry.STAGES[spec.train.stage].formats
    if data.source == "hub":
        return {}
    until = time.monotonic() + MOST_SECONDS
    if data.source == "builtin":
        folder, plain = ASSETS / data.builtin, Data()
        train = _files((str(folder / "train.jsonl"),), "data.builtin", plain, wanted, base, until)
        held = _files((str(folder / "validation.jsonl"),), "data.builtin", plain, wanted, base, until)
    else:
        train = _files(data.files, "data.files", data, wanted, base, until)
        names = data.validation_files if data.validation == "files" else ()
        held = _files(names, "data.validation_files", data, wanted, base, until)
    first = next((seen for seen in train[0] if seen.columns), None)
    format = next((seen.format for seen in train[0] if seen.format), "")
    each = 2 if spec.train.stage == "kto" and format == "pairs" else 1  # two labelled answers
    lengths = sorted(length for seen in train[0] for length in seen.lengths)
    return {
        "issues": (*train[1], *held[1]),
        "format": format,
        "columns": first.columns if first else (),
        "rows": each * sum(seen.rows for seen in train[0]) if train[0] else None,
        "held": each * sum(seen.rows for seen in held[0]) if held[0] else None,
        "exact": all(seen.exact for seen in (*train[0], *held[0])),
        "lengths": tuple(lengths),
        "min_prompt_tokens": min((seen.min_prompt_tokens for seen in train[0]), default=0),
        "labels": tuple(map(sum, zip(*(seen.labels for seen in train[0]), strict=True))) if train[0] else None,
    }


def _files(
    names: tuple[str, ...], field: str, data: Data, wanted: tuple[str, ...], base: Path, until: float
) -> tuple[list[_Seen], list[DataIssue]]:
    """What was seen of the files that paths and patterns name, and what is wrong with them."""
    seen: list[_Seen] = []
    issues: list[DataIssue] = []
    asked = Asked(wanted, data.format, tuple(getattr(data, name) for name in COLUMNS), data.system_prompt)
    for name in names:
        try:
            for path in expand([name], base):
                stat = path.stat()
                if path.is_dir():
                    issues.append(DataIssue(field, name, "is a folder: name its files, such as folder/*.jsonl"))
                    continue
                found = _file(path, stat.st_mtime_ns, stat.st_size, asked, until)
                seen.append(found)
                issues += [DataIssue(field, where, sentence, row) for where, sentence, row in found.issues]
        except RowError as error:
            issues.append(DataIssue(field, name, error.sentence))
        except OSError as error:
            issues.append(DataIssue(field, name, f"cannot be read: {error.strerror or error}"))
    return seen, issues


_SEEN: dict[tuple[Any, ...], _Seen] = {}


def _file(path: Path, stamp: int, size: int, asked: Asked, until: float) -> _Seen:
    """What a look at one file shows; remembered for as long as its time and size stay."""
    key = (path, stamp, size, asked)
    if key not in _SEEN:
        if len(_SEEN) >= 256:
            _SEEN.clear()
        _SEEN[key] = _look_into(path, size, asked, until)
    return _SEEN[key]


def _look_into(path: Path, size: int, asked: Asked, until: float) -> _Seen:
    if path.suffix.lower() == ".json" and size > MOST_BYTES:
        return _Seen(0, False, "", (), (), 0, (0, 0), ())  # it could only be read as a whole
    data = Data().model_copy(update={**dict(zip(COLUMNS, asked.columns, strict=True)), "system_prompt": asked.system})
    look = _Look(path, data, asked.wanted, "" if asked.format == "auto" else asked.format)
    exact = True
    try:
        for line, row in read_rows(path):
            if not look.at(line, row):
                break
            if look.count >= 50 and (time.monotonic() > until or look.characters > MOST_BYTES):
                exact = False
                break
    except RowError as error:
        where = f"{path}, line {error.line}" if error.line else str(path)
        look.issues.append((where, error.sentence, bool(error.line)))
    count = look.count if exact else _count(path, size, look.count, look.characters)
    if not count and not look.issues:
        look.issues.append((str(path), "holds no rows", False))
    labels, lengths = (look.passes_on, look.fails_on), tuple(look.lengths)
    return _Seen(count, exact, look.format, look.columns, lengths, look.min_prompt_tokens, labels, tuple(look.issues))


@dataclass
class _Look:
    """What one file has shown so far."""

    path: Path
    data: Data
    wanted: tuple[str, ...]
    format: str
    columns: tuple[str, ...] = ()
    count: int = 0
    characters: int = 0
    passes_on: int = 0
    fails_on: int = 0
    lengths: list[int] = field(default_factory=list)
    min_prompt_tokens: int = 0  # the least
    issues: list[tuple[str, str, bool]] = field(default_factory=list)

    def at(self, line: int, row: Mapping[str, Any]) -> bool:
        """Take one row in; False if the others need not be read."""
        self.count += 1
        self.columns = self.columns or tuple(str(name) for name in row)
        self.format = self.format or recognise(row, self.wanted) or ""
        if not self.format:
            said = f"no known format has the columns {', '.join(self.columns)}"
            self.issues.append((str(self.path), said, False))
            return False
        texts = _texts(row)
        self.characters += sum(map(len, texts))
        try:
            found = convert(row, self.format, self.data)
        except Unfit as error:
            if len(self.issues) < MOST_TROUBLES:
                self.issues.append((f"{self.path}, line {line}", str(error), True))
            return True
        if len(self.lengths) < MOST_LENGTHS:
            length, prompt_tokens = self._length(found, texts)
            self.lengths.append(length)
            self.min_prompt_tokens = min(prompt_tokens, self.min_prompt_tokens or prompt_tokens)
        return True

    def _length(self, found: Mapping[str, Any], texts: list[str]) -> tuple[int, int]:
        """Tokens of a converted row, and of what stands before its first answer, about; of two answers the longer one
        counts, and labels are counted."""
        if "text" in found:
            return _tokens(texts), 0
        if "label" in found:
            self.passes_on, self.fails_on = self.passes_on + found["label"], self.fails_on + (not found["label"])
        if "messages" in found:
            return _said(found["messages"]), _said(_before(found["messages"])) + MARKS
        answers = [found[name] for name in ("chosen", "rejected", "completion") if name in found]
        return max(_said([*found["prompt"], *answer]) for answer in answers), _said(found["prompt"]) + MARKS


def _said(turns: list[dict[str, Any]]) -> int:
    """Tokens of turns in a template, about."""
    return _tokens(_texts([turn["content"] for turn in turns])) + MARKS * len(turns)


def _before(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The turns until the first answer."""
    return list(takewhile(lambda turn: turn["role"] != "assistant", turns))


def _count(path: Path, size: int, seen: int, read: int) -> int:
    """Rows of a file that was not read to the end: lines where they are rows and few enough, else by proportion."""
    if path.suffix.lower() == ".jsonl" and size <= 4 * MOST_BYTES:
        with suppress(OSError), path.open("rb") as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
    return max(seen, round(seen * size / max(1, read)))


def _tokens(texts: list[str]) -> int:
    """Tokens of a row, about: one for each digit, sign and letter beyond ASCII, one for five others, and the marks of
    the chat template. Within 15 % of real tokenizers on English prose, code and JSON."""
    text = "".join(texts)
    single = len(SINGLE.findall(text))
    return single + (len(text) - single) // 5 + 2 * len(texts)


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for part in value.values() for text in _texts(part)]
    if isinstance(value, list | tuple):
        return [text for part in value for text in _texts(part)]
    return []
