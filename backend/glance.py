"""Glance: what a quick look at the files of a spec shows, before anything is loaded.

Floor 2. Imports: catalog, paths, rows, shape, spec, options. Rules read a Glance and never a file. A look is bounded
(64 MB and 0.2 s of rows, the rest is counted or estimated) and remembered as long as a file's time and size stay.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from backend import catalog, rows
from backend.options import edit
from backend.paths import ASSETS, model_folder
from backend.shape import ModelShape, Unknown, from_config
from backend.spec import Data, RunSpec

MOST_BYTES = 64 * 2**20
MOST_SECONDS = 0.2
MOST_TROUBLES = 3  # a file
MOST_LENGTHS = 2000  # a file


@dataclass(frozen=True)
class Trouble:
    """Something wrong with a file: the option that names it, the file and line, and a sentence about it."""

    field: str
    where: str
    sentence: str
    row: bool = False  # one row of a file that can be read

    def __str__(self) -> str:
        return f"{self.where}: {self.sentence}"


@dataclass(frozen=True)
class Glance:
    """Facts about the files. None or '' means that nobody can know before the run."""

    shape: ModelShape | None = None
    unknown: str = "the model was not looked at"  # why there is no shape, as the end of a sentence
    model: str = ""  # what is wrong with the model's folder
    has_template: bool | None = None  # the tokenizer brings a chat template
    fetched: bool = True  # nothing has to be downloaded
    troubles: tuple[Trouble, ...] = ()  # of data files
    format: str = ""  # of the rows: the one asked for, or recognised
    columns: tuple[str, ...] = ()
    rows: int | None = None  # in the data files, before a part is kept back
    held: int | None = None  # in the validation files
    exact: bool = True  # rows and held were counted to the end
    lengths: tuple[int, ...] = ()  # tokens of rows that were seen, about, ascending
    template: str = ""  # what is wrong with the template file
    checkpoint: str = ""  # what is wrong with the checkpoint folder

    @property
    def longest(self) -> int:
        """Tokens of the longest row seen, about; 0 if none was."""
        return self.lengths[-1] if self.lengths else 0

    def training_rows(self, data: Data) -> int | None:
        """Rows that are trained on."""
        if self.rows is None:
            return None
        kept = self.rows - (self.validation_rows(data) or 0 if _splits(data) else 0)
        return min(kept, data.max_samples) if data.max_samples else kept

    def validation_rows(self, data: Data) -> int | None:
        """Rows that are kept back or named for validation."""
        if data.source != "builtin" and data.validation == "none":
            return 0
        if _splits(data):
            if self.rows is None or self.rows < 2:
                return None if self.rows is None else 0
            return min(self.rows - 1, max(1, round(self.rows * data.validation_split)))
        return self.held


def _splits(data: Data) -> bool:
    return data.source != "builtin" and data.validation == "split"


def settle(spec: RunSpec, base: Path) -> RunSpec:
    """`spec` with every path made absolute, starting at `base`: a run works in its own folder."""

    def absolute(text: str) -> str:
        return os.path.normpath(base / Path(text).expanduser()) if text else text

    patch: dict[str, Any] = {
        name: absolute(value)
        for name, value in (
            ("model.path", spec.model.path),
            ("data.template_file", spec.data.template_file),
            ("checkpoint.path", spec.checkpoint.path),
        )
        if value and absolute(value) != value
    }
    for name, files in (("data.files", spec.data.files), ("data.validation_files", spec.data.validation_files)):
        settled = tuple(absolute(file) for file in files)
        if settled != files:
            patch[name] = settled
    return edit(spec, patch) if patch else spec


def look(spec: RunSpec, base: Path, environment: Mapping[str, str] = os.environ) -> Glance:
    """Look at every file that `spec` names; relative paths start at `base`. Never raises."""
    return Glance(
        **_model(spec, base, environment),
        **_data(spec.data, base),
        template=_template(spec.data, base),
        checkpoint=_checkpoint(spec, base),
    )


# --- The model ---


def _model(spec: RunSpec, base: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    model = spec.model
    if model.source == "builtin":
        row = catalog.MODELS[model.builtin]
        there = (model_folder(model.builtin, environment) / "config.json").is_file()
        return {**_shape(row.config), "has_template": True, "fetched": there or not row.download_bytes}
    if model.source == "hub":
        folder = _cached(model.hub_id, model.revision, environment)
        if folder is None:
            return {"unknown": "the model was not downloaded yet", "fetched": False}
        return _folder(folder)
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
    return {**_shape(config), "model": _missing(folder), "has_template": _has_template(folder)}


def _shape(config: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {"shape": from_config(config), "unknown": ""}
    except Unknown as error:
        return {"unknown": str(error)}


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


# --- The data ---


@dataclass(frozen=True)
class _Seen:
    """What was seen of one file."""

    rows: int
    exact: bool
    format: str
    columns: tuple[str, ...]
    lengths: tuple[int, ...]
    troubles: tuple[tuple[str, str, bool], ...]  # where, sentence, row


def _data(data: Data, base: Path) -> dict[str, Any]:
    if data.source == "hub":
        return {}
    until = time.monotonic() + MOST_SECONDS
    if data.source == "builtin":
        folder, plain = ASSETS / data.builtin, Data()
        train = _files((str(folder / "train.jsonl"),), "data.builtin", plain, base, until)
        held = _files((str(folder / "validation.jsonl"),), "data.builtin", plain, base, until)
    else:
        train = _files(data.files, "data.files", data, base, until)
        names = data.validation_files if data.validation == "files" else ()
        held = _files(names, "data.validation_files", data, base, until)
    first = next((seen for seen in train[0] if seen.columns), None)
    lengths = sorted(length for seen in train[0] for length in seen.lengths)
    return {
        "troubles": (*train[1], *held[1]),
        "format": next((seen.format for seen in train[0] if seen.format), ""),
        "columns": first.columns if first else (),
        "rows": sum(seen.rows for seen in train[0]) if train[0] else None,
        "held": sum(seen.rows for seen in held[0]) if held[0] else None,
        "exact": all(seen.exact for seen in (*train[0], *held[0])),
        "lengths": tuple(lengths),
    }


def _files(
    names: tuple[str, ...], field: str, data: Data, base: Path, until: float
) -> tuple[list[_Seen], list[Trouble]]:
    """What was seen of the files that paths and patterns name, and what is wrong with them."""
    seen: list[_Seen] = []
    troubles: list[Trouble] = []
    asked = (data.format, data.messages_column, data.prompt_column, data.completion_column, data.text_column)
    for name in names:
        try:
            for path in rows.expand([name], base):
                stat = path.stat()
                if path.is_dir():
                    troubles.append(Trouble(field, name, "is a folder: name its files, such as folder/*.jsonl"))
                    continue
                found = _file(path, stat.st_mtime_ns, stat.st_size, asked, until)
                seen.append(found)
                troubles += [Trouble(field, where, sentence, row) for where, sentence, row in found.troubles]
        except rows.RowError as error:
            troubles.append(Trouble(field, name, error.sentence))
        except OSError as error:
            troubles.append(Trouble(field, name, f"cannot be read: {error.strerror or error}"))
    return seen, troubles


_SEEN: dict[tuple[Any, ...], _Seen] = {}


def _file(path: Path, stamp: int, size: int, asked: tuple[str, ...], until: float) -> _Seen:
    """What a look at one file shows; remembered for as long as its time and size stay."""
    key = (path, stamp, size, asked)
    if key not in _SEEN:
        if len(_SEEN) >= 256:
            _SEEN.clear()
        _SEEN[key] = _look_into(path, size, asked, until)
    return _SEEN[key]


def _look_into(path: Path, size: int, asked: tuple[str, ...], until: float) -> _Seen:
    if path.suffix.lower() == ".json" and size > MOST_BYTES:
        return _Seen(0, False, "", (), (), ())  # it could only be read as a whole
    format, messages, prompt, completion, text = asked
    data = Data(messages_column=messages, prompt_column=prompt, completion_column=completion, text_column=text)
    look = _Look(path, data, "" if format == "auto" else format)
    exact = True
    try:
        for line, row in rows.read_rows(path):
            if not look.at(line, row):
                break
            if look.count >= 50 and (time.monotonic() > until or look.characters > MOST_BYTES):
                exact = False
                break
    except rows.RowError as error:
        where = f"{path}, line {error.line}" if error.line else str(path)
        look.troubles.append((where, error.sentence, bool(error.line)))
    count = look.count if exact else _count(path, size, look.count, look.characters)
    if not count and not look.troubles:
        look.troubles.append((str(path), "holds no rows", False))
    return _Seen(count, exact, look.format, look.columns, tuple(look.lengths), tuple(look.troubles))


@dataclass
class _Look:
    """What one file has shown so far."""

    path: Path
    data: Data
    format: str
    columns: tuple[str, ...] = ()
    count: int = 0
    characters: int = 0
    lengths: list[int] = field(default_factory=list)
    troubles: list[tuple[str, str, bool]] = field(default_factory=list)

    def at(self, line: int, row: Mapping[str, Any]) -> bool:
        """Take one row in; False if the others need not be read."""
        self.count += 1
        self.columns = self.columns or tuple(str(name) for name in row)
        self.format = self.format or rows.recognise(row) or ""
        if not self.format:
            said = f"no known format has the columns {', '.join(self.columns)}"
            self.troubles.append((str(self.path), said, False))
            return False
        if len(self.troubles) < MOST_TROUBLES and (wrong := rows.problem(row, self.format, self.data)):
            self.troubles.append((f"{self.path}, line {line}", wrong, True))
        tokens, characters = _tokens(row)
        self.characters += characters
        if len(self.lengths) < MOST_LENGTHS:
            self.lengths.append(tokens)
        return True


def _count(path: Path, size: int, seen: int, read: int) -> int:
    """Rows of a file that was not read to the end: lines where they are rows and few enough, else by proportion."""
    if path.suffix.lower() == ".jsonl" and size <= 4 * MOST_BYTES:
        with suppress(OSError), path.open("rb") as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
    return max(seen, round(seen * size / max(1, read)))


def _tokens(row: Mapping[str, Any]) -> tuple[int, int]:
    """(tokens, characters) of a row, about: four characters of English make a token, one of many other scripts."""
    text = "".join(_texts(row))
    wide = 0 if text.isascii() else sum(character > "\u02ff" for character in text)
    return wide + (len(text) - wide) // 4, len(text)


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for part in value.values() for text in _texts(part)]
    if isinstance(value, list | tuple):
        return [text for part in value for text in _texts(part)]
    return []


# --- Template and checkpoint ---


def _template(data: Data, base: Path) -> str:
    if data.template != "file":
        return ""
    if not data.template_file:
        return "No template file is named."
    path = base / Path(data.template_file).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}."
    except UnicodeDecodeError:
        return f"{path} is no text."
    return "" if "messages" in text else f"{path} never names messages, so it is no chat template."


def _checkpoint(spec: RunSpec, base: Path) -> str:
    """What is wrong with the named checkpoint, in a sentence."""
    if spec.checkpoint.start != "path":
        return ""
    if not spec.checkpoint.path:
        return "No checkpoint folder is named."
    folder = base / Path(spec.checkpoint.path).expanduser()
    if not (folder / "trainer_state.json").is_file():
        return f"{folder} is no checkpoint: name a checkpoint-N folder of a run."
    if folder.parent.name == "checkpoints" and not (folder / "complete").is_file():
        return f"{folder} was cut off while it was written: take an earlier one."
    if not (folder / "optimizer.pt").is_file():
        return f"{folder} holds weights only, so training cannot go on from it."
    if (folder / "adapter_config.json").is_file() != (spec.method.kind == "lora"):
        other = "whole weights" if spec.method.kind == "lora" else "an adapter"
        return f"{folder} holds {other}, which {catalog.METHODS[spec.method.kind].label} cannot go on from."
    return ""
