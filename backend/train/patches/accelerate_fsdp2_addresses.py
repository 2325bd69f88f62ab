"""accelerate tells the parameters of an optimizer apart by their addresses.

accelerator.py, `_prepare_fsdp2`: the optimizer's parameters are mapped to their shards by `data_ptr()`, which is 0 for
every parameter on the meta device. Without the patch, on ranks whose weights are on the meta device, all parameters
become the same one; fused optimizers refuse meta tensors altogether.
"""

from __future__ import annotations

import torch
from torch import nn

LIBRARY, SEEN_IN = "accelerate", "1.15.0"


def apply(model: nn.Module) -> None:
    """Replace the trainable parameters that are on the meta device by uninitialized CPU tensors. Their memory is never
    touched, so the operating system does not commit it."""
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.is_meta and parameter.requires_grad:
                if parameter not in replaced:  # tied parameters stay tied
                    replaced[parameter] = nn.Parameter(torch.empty_like(parameter, device="cpu"))
                setattr(module, name, replaced[parameter])
