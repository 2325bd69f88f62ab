"""The tokenizer, untrained model and memory context of a spec, created in the test's process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from training_runs import ignore_progress, make_spec

from backend.config import RunSpec
from backend.inspect import InputFacts
from backend.machine import Machine
from backend.memory import MemoryContext
from backend.modelspec import ModelShape
from backend.resolve import resolve
from backend.train import adapters, added_tokens, model


def tokenizer(spec: RunSpec) -> Any:
    return model.load_tokenizer(spec, model.locate(spec, ignore_progress))


def untrained_model(changes: Mapping[str, Any], precision: str = "fp32") -> Any:
    """The model as it is before the first training step."""
    spec = make_spec(changes)
    source = model.locate(spec, ignore_progress)
    tokens = model.load_tokenizer(spec, source)
    whole = model.load(spec, source, precision, tokens)
    return adapters.apply_method(spec, whole, precision, token_ids=added_tokens.ids(spec, tokens))


def memory_context(spec: RunSpec, shape: ModelShape) -> MemoryContext:
    """The inputs of the memory estimate of `spec` on a CPU."""
    machine = Machine()
    return MemoryContext(spec, resolve(spec, machine, InputFacts(shape=shape)), machine, shape)
