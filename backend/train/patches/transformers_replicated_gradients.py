"""transformers adds up gradients over tensor parallel ranks again with each batch of a gradient accumulation.

transformers distributed/tensor_parallel.py, `ReplicatedWithGradAllReduce`: the norm of each head (q_norm and k_norm of
Qwen3, Gemma 3 and others) has the same weights on all ranks, and a gradient of the heads on each rank. After each
backward pass, it sums the accumulated gradient over the ranks, of which the part of earlier batches is a sum already.
Without the patch the first of three batches counts four times with two ranks, and the training silently differs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers.distributed.tensor_parallel import ReplicatedWithGradAllReduce

LIBRARY, SEEN_IN = "transformers", "5.23.0"


class SummedGradients:
    """Calls `original`, the forward method of `module`; each gradient of its weights is summed over `group` before it
    is accumulated."""

    def __init__(self, module: torch.nn.Module, group: Any) -> None:
        self.module, self.group, self.original = module, group, module.forward
        self.hooked: dict[str, torch.nn.Parameter] = {}  # loading replaces the weights that there are at first

    def __call__(self, *args: Any, **more: Any) -> Any:
        """The output of the module."""
        if torch.is_grad_enabled():
            for name, weight in self.module.named_parameters(recurse=False):
                if weight.requires_grad and self.hooked.get(name) is not weight:
                    weight.register_hook(self.summed)
                    self.hooked[name] = weight
        return self.original(*args, **more)

    def summed(self, gradient: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks."""
        total = gradient.clone()
        dist.all_reduce(total, group=self.group)
        return total


def install_forward(style: Any, module: Any, mesh: Any) -> Any:
    """Replace the module's forward method."""
    module.forward = SummedGradients(module, mesh.get_group())
    return module


def apply() -> None:
    """Replace the method of the style."""
    ReplicatedWithGradAllReduce.install_forward = install_forward
