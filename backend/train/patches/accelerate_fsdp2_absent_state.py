"""accelerate loads an optimizer state for every trainable parameter, also for those that never had a gradient.

accelerate/utils/fsdp_utils.py, `load_fsdp_optimizer`: an optimizer has no state for a parameter without gradients, such
as those of the indexer of DeepSeek V3.2, so the checkpoint has none. Without the patch a run with FSDP2 and such a
parameter cannot be resumed: "Missing optimizer state for parameter". With it the parameter has no state, as before. The
weights are loaded as strictly as without it.

SGD without momentum has no state at all. Without the patch torch 2.13 refuses to load it (checkpoint/state_dict.py,
`_load_optim_state_dict`: "Expected device to be set").
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from accelerate.utils import fsdp_utils
from torch.distributed.checkpoint import default_planner, state_dict
from transformers import trainer

LIBRARY, SEEN_IN = "accelerate", "1.15.0"
original = fsdp_utils.load_fsdp_optimizer


def apply() -> None:
    """Let the Trainer load the states that the checkpoint has."""
    trainer.load_fsdp_optimizer = load_optimizer


def load_optimizer(plugin: Any, accelerator: Any, optimizer: Any, *args: Any, **more: Any) -> None:
    """Load the optimizer states that the checkpoint has."""
    state_dict._init_optim_state(optimizer)
    tensors = (value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value))
    if not any(tensor.dim() for tensor in tensors):
        return
    options, planner = fsdp_utils._prepare_sd_options, default_planner.DefaultLoadPlanner
    found = options(plugin)
    fsdp_utils._prepare_sd_options = lambda _: found and replace(found, strict=False)
    default_planner.DefaultLoadPlanner = partial(planner, allow_partial_load=True)
    try:
        original(plugin, accelerator, optimizer, *args, **more)
    finally:
        fsdp_utils._prepare_sd_options, default_planner.DefaultLoadPlanner = options, planner
