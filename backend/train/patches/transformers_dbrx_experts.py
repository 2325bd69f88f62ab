"""DBRX's experts add outputs of another dtype to their sum.

transformers/models/dbrx/modeling_dbrx.py, `DbrxExperts.forward`: the sum has the dtype of the input, which is fp32
after a layer norm under autocast, and the experts compute in 16 bits. Without the patch, training the weights of DBRX
in mixed precision fails in the first step: "index_add_(): self (Float) and source (BFloat16) must have the same scalar
type".
"""

from __future__ import annotations

from typing import Any

import torch

LIBRARY, SEEN_IN = "transformers", "5.23.0"


def apply(model: Any) -> None:
    """Give the experts of `model` their input in the dtype in which they compute."""
    for module in model.modules():
        if type(module).__name__ == "DbrxExperts":
            module.register_forward_pre_hook(_cast)


def _cast(module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    kind = inputs[0].device.type
    if not torch.is_autocast_enabled(kind):
        return inputs
    return (inputs[0].to(torch.get_autocast_dtype(kind)), *inputs[1:])
