"""Prepared data is kept for the next run with the same files, tokenizer, template, options and code.

An entry is a folder with what `backend.train.data.save` writes. It is written to a temporary folder and renamed,
so no entry is ever incomplete. A run hard-links its files, so an entry may be removed while a run uses it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from backend.config import RunSpec
from backend.data.reading import expand, file_patterns
from backend.paths import HOME, prepared_folder
from backend.runs import processes
from backend.runs.files import write_json

MIN_SECONDS = 5.0  # a preparation that was quicker is not kept
STALE_SECONDS = 24 * 3600.0  # after which a folder of a process that was killed is removed
LIMIT = "FOOTPLATE_PREPARED_GB"
DEFAULT_LIMIT = 100.0
HASHES = "hashes.json"  # of data files: a file is hashed again only if one of its dates, its size or its inode changes
ABOUT = "about.json"
NEW = ".new-"
PRIVATE = 0o700  # the mode of the folder, when it is made: it has the user's texts as tokens
# The code and the packages that decide which tokens an example becomes.
MODULES = (
    "config/data.py", "data/*.py", "train/data.py", "train/encoding.py", "train/end_tokens.py", "train/examples.py",
    "train/loss_weights.py", "train/preference_data.py", "train/template_input.py", "train/templates.py",
    "train/token_places.py",
)  # fmt: skip
PACKAGES = ("datasets", "jinja2", "numpy", "tokenizers", "transformers", "trl")
# Options of data that are in the key as content, or do not affect the tokens.
ELSEWHERE = {"dataset_num_proc", "files", "validation_files", "chat_template_file"}


def key_of(spec: RunSpec, tokenizer: Any, hub: str = "", today: str = "") -> str:
    """What the prepared data of a spec depends on, as a hash; '' if it cannot be determined, as for a slow tokenizer or
    one with its own code. `hub`: the fingerprint of data on the Hub; `today`: the date that chat templates write.
    Raises OSError and DataFileError."""
    if not tokenizer.is_fast or spec.model.trust_remote_code:
        return ""
    paths = [[str(path.absolute()) for path in part] for part in _paths(spec)]
    modules = sorted(chain.from_iterable((HOME / "backend").glob(pattern) for pattern in MODULES))
    template = str(tokenizer.chat_template)
    parts = {
        "data": {name: value for name, value in spec.data if name not in ELSEWHERE},
        "files": paths,
        "contents": _contents([*chain.from_iterable(paths)]),
        "hub": hub,
        "stage": [spec.train.stage, spec.train.seed, spec.eval.strategy != "no", spec.eval.num_generations],
        "neighbors": [spec.preference.kto_loss_type, spec.train.per_device_train_batch_size]
        * (spec.train.stage == "kto"),
        "tokenizer": [tokenizer.backend_tokenizer.to_str(), type(tokenizer).__name__, str(tokenizer.init_kwargs)],
        "special": [str(tokenizer.special_tokens_map), tokenizer.eos_token_id],
        "template": [template, today if "strftime_now" in template else ""],
        "code": [module.read_text(encoding="utf-8") for module in modules],
        "packages": [importlib.metadata.version(package) for package in PACKAGES],
    }
    return hashlib.sha256(json.dumps(parts, default=str, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()


def file_states(spec: RunSpec) -> list[list[int]]:
    """What changes with a data file: to be compared before and after it is read. Raises OSError and DataFileError."""
    return [_state(path) for path in chain.from_iterable(_paths(spec))]


def _paths(spec: RunSpec) -> list[list[Path]]:
    return [expand(part) for source in spec.data.datasets for part in file_patterns(source)]


def _state(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _contents(paths: Sequence[str]) -> list[str]:
    """The hashes of files. Raises OSError."""
    known, found = _hashes(), {}
    for path in paths:
        state = _state(Path(path))
        if known.get(path, [None])[0] == state:
            found[path] = known[path]
            continue
        with open(path, "rb") as file:
            found[path] = [state, hashlib.file_digest(file, "sha256").hexdigest()]
    if any(known.get(path) != value for path, value in found.items()):
        with suppress(OSError, ValueError):  # a full disk, a folder that cannot be written, a name that is not UTF-8
            prepared_folder().mkdir(mode=PRIVATE, parents=True, exist_ok=True)
            others = {name: value for name, value in _hashes().items() if Path(name).exists()}
            write_json(prepared_folder() / HASHES, {**others, **found})
    return [str(found[path][1]) for path in paths]


def _hashes() -> dict[str, Any]:
    found = _read(prepared_folder() / HASHES)
    return {name: value for name, value in found.items() if isinstance(value, list) and len(value) == 2}


def _read(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} if there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def take(key: str, folder: Path) -> list[str] | None:
    """Make `folder` with the files of an entry, as links where that is possible. The log lines of its preparation; None
    without such an entry."""
    entry = prepared_folder() / key
    if not key or not entry.is_dir():
        return None
    about = _read(entry / ABOUT)
    try:
        with suppress(OSError):  # another user's entry
            os.utime(entry)  # the entry that was not used for the longest time is removed first
        shutil.copytree(entry, folder, copy_function=_link)
        if _sizes(folder) == about.get("sizes") and isinstance(about.get("lines"), list):
            return [str(line) for line in about["lines"]]
        _remove(entry)  # a file is truncated, for example after a power failure
    except OSError:  # another process has removed it
        pass
    shutil.rmtree(folder, ignore_errors=True)
    return None


def keep(key: str, folder: Path, name: str, lines: Sequence[str]) -> bool:
    """Make an entry of the files in `folder`, with the name of the data and the log lines of its preparation. Returns
    whether there is one now: if the disk is full, no entry is made."""
    place = prepared_folder()
    new = place / f"{NEW}{uuid.uuid4().hex}"
    try:
        place.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        shutil.copytree(folder, new, copy_function=_link)
        write_json(new / ABOUT, {"name": name, "lines": [*lines], "sizes": _sizes(new)})
        new.rename(place / key)
    except (OSError, ValueError):  # also if another process has made the entry
        shutil.rmtree(new, ignore_errors=True)
    _make_room()
    return (place / key).is_dir()


def _sizes(folder: Path) -> dict[str, int]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ABOUT)
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)


def limit() -> float:
    """The most bytes that all entries together may have."""
    try:
        found = float(os.environ.get(LIMIT) or DEFAULT_LIMIT)
    except ValueError:
        found = math.nan
    return (found if found >= 0 else DEFAULT_LIMIT) * 1e9


def entries() -> list[tuple[Path, str, int, float]]:
    """(folder, name of the data, bytes, time of the last use) of each entry, the last used first."""
    found = []
    for folder in _folders():
        with suppress(OSError):
            if about := _read(folder / ABOUT):
                size = sum(_sizes(folder).values())
                found.append((folder, str(about.get("name", "")), size, folder.stat().st_mtime))
    return sorted(found, key=lambda entry: -entry[3])


def _folders() -> Iterator[Path]:
    with suppress(OSError):
        yield from (each for each in prepared_folder().iterdir() if each.is_dir())


def _make_room() -> None:
    """Remove the least recently used entries until the rest is within the limit, and what killed processes left
    behind."""
    room = limit()
    for entry, _, size, _ in entries():
        if size > room:
            _remove(entry)
        else:
            room -= size
    _remove_leftovers(STALE_SECONDS)


def _remove_leftovers(seconds: float) -> None:
    """Remove folders that killed processes left behind at least `seconds` ago."""
    for folder in _folders():
        with suppress(OSError):
            is_old = folder.name.startswith(NEW) and time.time() - folder.stat().st_mtime > seconds
            if is_old and not processes.is_locked(folder):  # `footplate prepare` may take days
                shutil.rmtree(folder, ignore_errors=True)


def clear() -> tuple[int, int]:
    """Remove all entries: how many, and their bytes."""
    found = entries()
    for folder in _folders():
        if not folder.name.startswith("."):
            _remove(folder)
    _remove_leftovers(0)
    return len(found), sum(size for _, _, size, _ in found)


def _remove(entry: Path) -> None:
    """Remove an entry; nothing finds it while it is incomplete."""
    gone = entry.with_name(f"{NEW}{uuid.uuid4().hex}")
    with suppress(OSError):
        entry.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
