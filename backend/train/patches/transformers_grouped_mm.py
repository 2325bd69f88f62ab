"""transformers uses grouped_mm for experts whose weights torch's grouped_mm rejects.

transformers integrations/moe.py, `_can_use_grouped_mm`: it does not check the sizes, but torch's grouped_mm needs rows
of a multiple of 16 bytes, which the shards of tensor parallelism may not have. Without the patch such models fail in
the first step with "strides should be multiple of 16 bytes"; with it they use transformers' loop over the experts.
"""

from __future__ import annotations

import torch
from transformers.integrations import moe

LIBRARY, SEEN_IN = "transformers", "5.23.0"
ALIGNMENT = 16  # bytes
_supported = moe._can_use_grouped_mm


def apply() -> None:
    """Let transformers use grouped_mm only for weights that torch's grouped_mm accepts."""
    moe._can_use_grouped_mm = can_use_grouped_mm


def can_use_grouped_mm(rows: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> bool:
    """Whether grouped_mm, also in the backward pass, accepts `rows` and `weight` (experts, input, output)."""
    is_aligned = all(size * weight.element_size() % ALIGNMENT == 0 for size in weight.shape[-2:])
    return is_aligned and bool(_supported(rows, weight, offs))
