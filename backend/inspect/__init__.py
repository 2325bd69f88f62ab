"""Inspection of a run's input files before the run: model folder, data files, checkpoint, NVMe folder, port.

Rules read the InputFacts found here and open no file themselves.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backend.config import Data, RunSpec
from backend.config.options import edit, for_dataset, get, options
from backend.config.processes import rendezvous_port
from backend.config.sources import key_of
from backend.inspect.chain import awaited_model, predecessor
from backend.inspect.checkpoint import inspect_checkpoint
from backend.inspect.checkpoint_adapter import continued_adapter_facts
from backend.inspect.cpu_speed import CpuSpeed, inspect_cpu
from backend.inspect.datasets import inspect_datasets, shares
from backend.inspect.disk import inspect_nvme_folder
from backend.inspect.examples import inspect_examples, show_examples, summarize_examples, wait_for_examples
from backend.inspect.facts import DataIssue, InputFacts
from backend.inspect.hub_download import download_config, is_refused
from backend.inspect.hub_token import TokenAnswer, check_token, store_token, token_state
from backend.inspect.model_folder import inspect_model, wait_for_architecture, wait_for_config
from backend.inspect.other_trainer import inspect_trainer
from backend.inspect.ports import inspect_port
from backend.inspect.worker import Show, no_show


def resolve_paths(spec: RunSpec, base: Path) -> RunSpec:
    """`spec` with every relative path resolved against `base`: a run's working directory is its own folder."""

    def absolute(text: str) -> str:
        return os.path.normpath(base / os.path.expanduser(text)) if text else text

    patch: dict[str, Any] = {
        option.name: absolute(value)
        for option in options()
        if option.kind == "str" and option.path and (value := get(spec, option.name)) and absolute(value) != value
    }
    for index, dataset in enumerate(spec.data.datasets):
        for name in ("files", "validation_files"):
            files = getattr(dataset, name)
            resolved = tuple(absolute(file) for file in files)
            if resolved != files:
                patch[key_of(index, name)] = resolved
    return edit(spec, patch) if patch else spec


def inspect_inputs(spec: RunSpec, base: Path, environment: Mapping[str, str] = os.environ) -> InputFacts:
    """Inspect every file that `spec` names; relative paths are resolved against `base`. Never raises."""
    awaited = awaited_model(spec, base)
    loaded = awaited.spec if awaited else spec
    model = inspect_model(loaded, base, environment) | (awaited.facts if awaited else {})
    found = inspect_datasets(spec, loaded, base, environment, model)
    spec = loaded
    found |= _added_rows(spec, found)
    # Without the size of the tokenizer, full weights may have more rows of embeddings than the model for added tokens.
    is_whole = spec.method.kind == "lora" or found.get("tokenizer_size") or not spec.data.added_tokens
    return InputFacts(
        **found,
        template_problem=_template_problem(spec.data, base),
        **inspect_checkpoint(spec, base, found.get("shape") if is_whole else None),
        **continued_adapter_facts(spec, base, model.get("shape")),
        **inspect_trainer(spec, base),
        **inspect_nvme_folder(spec, base),
        **inspect_port(rendezvous_port(spec)),
    )


def _added_rows(spec: RunSpec, found: Mapping[str, Any]) -> dict[str, Any]:
    """The shape of the model with the rows that its embeddings get for added tokens, and how many; empty without any,
    and if the tokenizer has too many tokens even without them."""
    shape, size = found.get("shape"), found.get("tokenizer_size", 0)
    if shape is None or not spec.data.added_tokens or not found.get("known_size", 0) <= shape.vocabulary < size:
        return {}
    return {"shape": shape.with_vocabulary(size), "added_rows": size - shape.vocabulary}


def wait_for_worker(spec: RunSpec, base: Path, seconds: float, show: Show = no_show) -> None:
    """Wait until the worker process has read the model's architecture and all examples, at most `seconds`, so that
    `inspect_inputs` knows them; downloads config.json of an unknown model of the Hub first. `show` gets the progress as
    a text. For callers that can wait: the command line and Start."""
    until = time.monotonic() + seconds
    awaited = awaited_model(spec, base)
    spec = awaited.spec if awaited else spec
    wait_for_config(spec, base, os.environ, show)
    alone = [for_dataset(spec, index) for index in range(len(spec.data.datasets))]
    for each in alone:
        inspect_examples(each, base, os.environ)  # starts reading them, along with the architecture
    wait_for_architecture(spec, base, os.environ, seconds, show)
    for each in alone:
        wait_for_examples(each, base, os.environ, until - time.monotonic(), show)


MAX_TEMPLATE = 1024 * 1024  # characters


def _template_problem(data: Data, base: Path) -> str:
    """What is wrong with the chat template file, a sentence; '' if nothing is."""
    if data.chat_template != "file":
        return ""
    if not data.chat_template_file:
        return "data.chat_template_file is empty: set the path of a Jinja chat template."
    path = base / Path(data.chat_template_file).expanduser()
    if path.exists() and not path.is_file():  # reading a pipe would wait for a writer
        return f"The chat template file {path} is not a regular file."
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_TEMPLATE + 1)
    except OSError as error:
        return f"The chat template file {path} cannot be read: {error.strerror or error}."
    except UnicodeDecodeError:
        return f"The chat template file {path} is not UTF-8 text."
    if len(text) > MAX_TEMPLATE:
        return f"The file {path} is not a chat template: it is longer than {MAX_TEMPLATE // 1024} KiB."
    if "messages" not in text:
        return f"The file {path} is not a chat template: it never uses the variable messages."
    return ""
