"""Inspection of the examples with the model's tokenizer and chat template, in the worker process.

Imports config, data, paths, facts, model_folder, worker. A check requests a few seconds of tokenization and does not
wait for it; the command line and Start wait, and give it more time. The result is kept until a file changes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from backend.config import RunSpec
from backend.data import DataFileError, expand, file_patterns
from backend.inspect.facts import DataIssue
from backend.inspect.model_folder import local_folder
from backend.inspect.worker import Result, WorkerCache, installed_versions, may_start
from backend.paths import cache_folder

FORMAT = 2  # raise it when the result of backend.train.tokenize_examples changes: it is part of the cache key
CHECK_SECONDS, START_SECONDS = 5.0, 30.0  # of tokenization
TOKENIZER_FILES = ("token*", "vocab*", "merges*", "*.jinja", "chat_template*", "special_tokens*", "spiece*", "added*")


class ExampleReports(WorkerCache):
    """What `backend.train.tokenize_examples` found in the examples of a spec."""

    name, task, format = "examples", "tokenizing the examples", FORMAT


@lru_cache(maxsize=8)
def _reports(folder: Path) -> ExampleReports:
    return ExampleReports(folder, seconds=START_SECONDS + 60)


def inspect_examples(spec: RunSpec, base: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """The InputFacts that the tokenizer knows; {} if they cannot be known, or not yet. Returns at once."""
    request = _request(spec, base, environment)
    if request is None:
        return {}
    reports = _reports(cache_folder(environment))
    found = reports.find(_key(request, START_SECONDS), {}, start=False)
    if not isinstance(found, Mapping):
        start = may_start(environment)
        found = reports.find(_key(request, CHECK_SECONDS), _body(request, CHECK_SECONDS), start)
        if found is None:
            return {"examples_pending": start}
    return {} if isinstance(found, str) else _facts(found, spec)


def wait_for_examples(spec: RunSpec, base: Path, environment: Mapping[str, str], seconds: float) -> None:
    """Wait until `inspect_examples` knows all examples, or as many as can be tokenized in START_SECONDS; at most
    `seconds`. For callers that can wait: the command line and Start."""
    request = _request(spec, base, environment)
    if request is None or not may_start(environment):
        return
    reports = _reports(cache_folder(environment))
    quick = reports.find(_key(request, CHECK_SECONDS), {}, start=False)
    if not (isinstance(quick, Mapping) and quick["complete"]):
        reports.wait_for(_key(request, START_SECONDS), _body(request, START_SECONDS), seconds)


def _request(spec: RunSpec, base: Path, environment: Mapping[str, str]) -> dict[str, Any] | None:
    """What the worker needs and the result depends on; None where nothing can be inspected before the run: data on the
    Hub, a model that is not downloaded, a tokenizer with custom code (which is not run while a form is filled in)."""
    folder = local_folder(spec, base, environment)
    if spec.data.source == "hub" or folder is None or spec.model.trust_remote_code:
        return None
    try:
        data, model = _files(_data_files(spec), base), _files(TOKENIZER_FILES, folder)
    except (OSError, DataFileError):
        return None  # reported by the inspection of the files
    if not data or not model:
        return None
    return {"spec": _inspected(spec), "base": str(base), "folder": str(folder), "files": [*data, *model]}


def _inspected(spec: RunSpec) -> dict[str, Any]:
    """The sections that decide how examples are read, rendered and tokenized."""
    model = spec.model.model_dump(include={"source", "builtin", "hub_id", "revision", "path"})
    return {"model": model, "data": spec.data.model_dump(), "train": {"stage": spec.train.stage}}


def _data_files(spec: RunSpec) -> tuple[str, ...]:
    data = spec.data
    template = (data.chat_template_file,) if data.chat_template == "file" and data.chat_template_file else ()
    return (*chain(*file_patterns(data)), *template)


def _files(patterns: tuple[str, ...], base: Path) -> list[tuple[str, int, int]]:
    """(path, size, modification time) of the files that match. Raises OSError, DataFileError."""
    found = []
    for pattern in patterns:
        paths = expand([pattern], base) if patterns is not TOKENIZER_FILES else sorted(base.glob(pattern))
        found += [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths if path.is_file()]
    return found


def _key(request: Mapping[str, Any], seconds: float) -> str:
    versions = installed_versions("transformers", "tokenizers", "trl", "jinja2")
    text = json.dumps([FORMAT, versions, request, seconds], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _body(request: Mapping[str, Any], seconds: float) -> Result:
    return {"examples": {name: request[name] for name in ("spec", "base", "folder")} | {"seconds": seconds}}


def _facts(found: Result, spec: RunSpec) -> dict[str, Any]:
    option = "data.builtin" if spec.data.source == "builtin" else "data.files"
    facts: dict[str, Any] = {
        "tokenizer_problem": found["problem"],
        "tokenizer_size": found["vocabulary"],
        "unrenderable_examples": tuple(DataIssue(option, place, text, True) for place, text in found["issues"]),
        "num_tokenized": found["checked"],
        "all_tokenized": found["complete"],
        "num_usable": found["usable"] if found["complete"] else None,
        "num_identical_pairs": found["counts"].get("identical", 0),
        "num_unmarked": found["counts"].get("unmarked", 0),
    }
    if found["has_chat_template"] is not None:
        facts["has_chat_template"] = found["has_chat_template"]
    if found["token_lengths"]:
        lengths = sorted(found["token_lengths"])
        facts["token_lengths"] = (*lengths, found["longest"]) if found["longest"] > lengths[-1] else tuple(lengths)
    return facts
