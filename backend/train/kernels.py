"""How attention is computed: as asked for, or not at all.

Beside the floors. Imports spec, catalog, journal.
"""

from __future__ import annotations

from typing import Any

from backend import catalog
from backend.spec import RunSpec
from backend.train.journal import TrainError


def check(spec: RunSpec, family: str, precision: str) -> None:
    """Raise TrainError for what would fail at the first step only."""
    asked = spec.model.attention
    if asked in catalog.FLASH and precision == "fp32":
        raise TrainError(f"model.attention: {asked} computes in bf16 or fp16: set precision.compute to bf16.")
    if asked == "flex_attention" and family in ("cpu", "mps"):
        raise TrainError("model.attention: flex_attention has no backward pass on this device: take sdpa.")


def loading(spec: RunSpec) -> dict[str, Any]:
    """What `from_pretrained` is told."""
    return {} if spec.model.attention == "auto" else {"attn_implementation": spec.model.attention}


def refused(spec: RunSpec, error: Exception) -> str:
    """A sentence about an attention that could not be had; '' if the error is about something else."""
    words = str(error)
    if spec.model.attention == "auto" or "ttention" not in words:
        return ""
    return f"model.attention: {spec.model.attention} cannot be used here: {words.strip().splitlines()[0]}"


def check_attention(spec: RunSpec, model: Any) -> None:
    """Raise TrainError unless the model computes attention as asked for: the library may take something like it."""
    asked, found = spec.model.attention, model.config.get_text_config()._attn_implementation
    if asked not in ("auto", found):
        raise TrainError(f"model.attention: {asked} was asked for, and the library took {found}: choose that, or sdpa.")
