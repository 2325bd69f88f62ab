"""accelerate does not broadcast the weights of a model with 4-bit weights from rank 0.

utils/fsdp_utils.py, `fsdp2_prepare_model`: with bitsandbytes' Params4bit, cpu_ram_efficient_loading is ignored. Without
the patch, every rank must read all weights and hold the quantized base model in host RAM, and a rank whose model is on
the meta device fails in the first step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from accelerate import accelerator as accelerate_accelerator
from accelerate.utils import fsdp_utils
from torch import distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor

LIBRARY, SEEN_IN = "accelerate", "1.15.0"


def apply() -> None:
    """Send each FSDP unit from rank 0 right before it is sharded, so that a device never holds more than its shards and
    one unit. From here on, for this process."""

    module_of_fsdp: Any = fsdp

    def prepare(accelerator: Any, model: nn.Module) -> nn.Module:
        fully_shard = fsdp.fully_shard

        def broadcast_and_shard(module: Any, **options: Any) -> Any:
            broadcast_from_rank0(module if isinstance(module, list | tuple) else [module], accelerator.device)
            return fully_shard(module, **options)

        module_of_fsdp.fully_shard = broadcast_and_shard  # each call of accelerate imports it from torch
        try:
            return fsdp_utils.fsdp2_prepare_model(accelerator, model)
        finally:
            module_of_fsdp.fully_shard = fully_shard

    vars(accelerate_accelerator)["fsdp2_prepare_model"] = prepare


def broadcast_from_rank0(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Replace the parameters that are not sharded yet by those of rank 0, on `device`. A collective call."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in (child for parent in modules for child in parent.modules()):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if not isinstance(parameter, DTensor):
                places.setdefault(id(parameter), []).append((module, name))
    for holders in places.values():
        module, name = holders[0]
        received = _broadcast(getattr(module, name), device)
        for module, name in holders:  # tied parameters stay tied
            setattr(module, name, received)


def _broadcast(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    plain, is_first = parameter.detach().as_subclass(torch.Tensor), dist.get_rank() == 0
    tensor = plain.to(device).contiguous() if is_first else torch.empty_like(plain, device=device)
    dist.broadcast(tensor, src=0)
    if not hasattr(parameter, "quant_state"):
        return nn.Parameter(tensor, parameter.requires_grad)
    if is_first and tensor.data_ptr() != plain.data_ptr():  # accelerate keeps a reference until all units are sharded
        plain.untyped_storage().resize_(0)
    made: nn.Parameter = type(parameter)(tensor, **vars(parameter))  # bitsandbytes' Params4bit
    vars(made)["quant_state"].to(device)
    return made
