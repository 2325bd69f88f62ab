"""What stands inside of an optimizer: the one that steps, without its wrappers, and all tensors of its state.

Beside the floors. Imports nothing of ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch


def innermost(optimizer: Any) -> Any:
    """Without the wrappers of accelerate and of an engine."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def held(optimizer: Any) -> dict[str, Any]:
    """The class of the optimizer that stepped, and the bytes of its state on this rank."""
    found = innermost(optimizer)
    base = getattr(found, "base_optimizer", found)
    seen: dict[int, int] = {}
    for tensor in _tensors([base.state, [group.get("state") for group in base.param_groups]]):
        seen[id(tensor)] = tensor.numel() * tensor.element_size()
    masters = getattr(found, "param_idx2hp", {}).values()
    kind = type(found)
    return {
        "class": f"{kind.__module__}.{kind.__name__}",
        "bytes": sum(seen.values()) + sum(m.numel() * m.element_size() for m in masters),
    }


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every plain tensor within dicts, lists, quantized tensors and projectors."""
    if isinstance(value, torch.Tensor):
        parts = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else []
        if parts:
            yield from _tensors([getattr(value, name) for name in parts])
        else:
            yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
    elif hasattr(value, "ortho_matrix"):
        yield from _tensors(value.ortho_matrix)
