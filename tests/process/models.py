"""Models and tokenizers of specs, in the test's own process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainings import a_spec, nothing

from backend.config import RunSpec
from backend.inspect import InputFacts
from backend.machine import Machine
from backend.memory import MemoryContext
from backend.modelspec import ModelShape
from backend.resolve import resolve
from backend.train import adapters, model


def tokenizer(spec: RunSpec) -> Any:
    return model.load_tokenizer(spec, model.locate(spec, nothing))


def fresh(changes: Mapping[str, Any], precision: str = "fp32") -> Any:
    """The model as it is before the first step."""
    spec = a_spec(changes)
    source = model.locate(spec, nothing)
    return adapters.apply_method(
        spec, model.load(spec, source, precision, model.load_tokenizer(spec, source)), precision
    )


def memory_context(spec: RunSpec, shape: ModelShape) -> MemoryContext:
    """What the memory estimate of `spec` on a CPU is computed from."""
    machine = Machine()
    return MemoryContext(spec, resolve(spec, machine, InputFacts(shape=shape)), machine, shape)
