"""TRL rounds the adapters of a quantized base model to bf16.

trl/trainer/sft_trainer.py, `__init__` (and the other trainers): trainable parameters on a quantized model become bf16,
where small optimizer updates are lost. Without the patch precision.compute does not decide about adapters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LIBRARY, SEEN_IN = "trl", "1.16.0"


@contextmanager
def kept(model: Any) -> Iterator[None]:
    """Keep the trainable parameters of a quantized `model` while a trainer is constructed."""
    quantized = getattr(model, "is_quantized", False)
    data = [(p, p.data) for p in model.parameters() if p.requires_grad] if quantized else []
    yield
    for parameter, before in data:
        parameter.data = before
