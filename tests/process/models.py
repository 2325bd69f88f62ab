"""Models and tokenizers of specs, in the test's own process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainings import a_spec, nothing

from backend.config import RunSpec
from backend.train import adapters, model


def tokenizer(spec: RunSpec) -> Any:
    return model.tokenizer(spec, model.find(spec, nothing))


def fresh(changes: Mapping[str, Any], precision: str = "fp32") -> Any:
    """The model as it is before the first step."""
    spec = a_spec(changes)
    source = model.find(spec, nothing)
    return adapters.adapt(spec, model.load(spec, source, precision, model.tokenizer(spec, source)), precision)
