"""Specs for tests: options as keyword arguments, and the memory estimate of a spec for a model shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backend.config import RunSpec
from backend.config.options import edit, effective, parse
from backend.inspect import InputFacts
from backend.machine import Machine
from backend.memory import Estimate, MemoryContext
from backend.modelspec import ModelShape
from backend.rules import RULES, Case, Finding


def spec(**values: Any) -> RunSpec:
    """With `train__seed=7` for train.seed."""
    return parse({name.replace("__", "."): value for name, value in values.items()})


NO_TENSORS = (2).to_bytes(8, "little") + b"{}"  # a safetensors file without tensors
BY_CODE = {rule.code: rule for rule in RULES}


def rule_finding(code: str, patch: Mapping[str, Any], machine: Machine, facts: InputFacts) -> Finding | None:
    """What one rule says of a patched default spec."""
    return BY_CODE[code].finding(Case(effective(edit(RunSpec(), dict(patch))), machine, facts))


def estimate(
    spec: RunSpec, machine: Machine, shape: ModelShape | None, longest: int = 0, examples: int | None = None
) -> Estimate:
    """The memory estimate for a model and training examples of at most `longest` tokens."""
    facts = InputFacts(shape=shape, num_examples=examples, token_lengths=(longest,) if longest else ())
    return Case(spec, machine, facts).estimate


def memory_context(spec: RunSpec, machine: Machine, shape: ModelShape) -> MemoryContext:
    """The context that an estimate is computed from."""
    return MemoryContext(spec, Case(spec, machine, InputFacts(shape=shape)).run, machine, shape)
