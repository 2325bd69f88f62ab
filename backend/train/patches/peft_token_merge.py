"""The trained rows of an embedding cannot be merged into an embedding that FSDP2 has sharded.

peft tuners/trainable_tokens/layer.py, `TrainableTokensLayer.merge`, indexes the sharded weight with a plain tensor.
Without the patch, a run that merges its adapter fails after the last step: RuntimeError: "aten.index_copy.default got
mixed torch.Tensor and DTensor".
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch.distributed.tensor import DTensor, distribute_tensor

LIBRARY, SEEN_IN = "peft", "0.21.2"
original = TrainableTokensLayer.merge


def merge(layer: Any, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
    """As peft's, but a sharded weight gets the rows in its place, where FSDP2 finds them."""
    weight = layer.base_layer.weight.data
    if not isinstance(weight, DTensor):
        original(layer, safe_merge, adapter_names)
        return
    whole = weight.full_tensor()
    for name in check_adapters_to_merge(layer, adapter_names):
        rows = layer.trainable_tokens_delta[name].data
        rows = rows.full_tensor() if isinstance(rows, DTensor) else rows
        whole[torch.tensor(layer.token_indices[name])] = rows.to(whole)
        layer.merged_adapters.append(name)
    weight.copy_(distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None))


def apply() -> None:
    """Replace the method."""
    TrainableTokensLayer.merge = merge
