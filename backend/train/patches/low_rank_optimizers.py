"""transformers' GaLore and APOLLO: no weight decay, no betas, checkpoints that do not load, layer-wise without a state.

- trainer_optimizer.py, `_setup_low_rank_optimizer`: the two parameter groups have neither weight decay nor (for most)
  betas and epsilon, and contain frozen parameters. Without `rebuild_groups` weight_decay has no effect.
- The same function makes one optimizer per parameter for the layer-wise variants, behind a dummy: their state is not
  saved, and the learning rate in the log is not theirs. `step_in_backward` does the same with the one real optimizer.
- trainer.py loads optimizer.pt with `weights_only=True`, and the state holds projector objects. Without
  `allow_projectors` a run cannot be resumed.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

LIBRARY, SEEN_IN = "transformers", "5.23.0"
PROJECTORS = (
    ("galore_torch.galore_projector", "GaLoreProjector"),
    ("apollo_torch.svd_projector", "GaLoreProjector"),
    ("apollo_torch.random_projector", "GradientProjector"),
)


def allow_projectors() -> None:
    """Let torch.load read the projectors of a checkpoint."""
    for module, name in PROJECTORS:
        if importlib.util.find_spec(module.partition(".")[0]) is not None:
            torch.serialization.add_safe_globals([getattr(importlib.import_module(module), name)])


def rebuild_groups(
    optimizer: Any,
    model: nn.Module,
    split: Callable[[list[tuple[str, nn.Parameter]]], list[dict[str, Any]]],
    options: dict[str, Any],
) -> bool:
    """Divide each group by `split` into those with and without weight decay, without frozen parameters, with `options`.
    Returns whether any group is projected."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        named = [(names[id(p)], p) for p in group["params"] if p.requires_grad]
        groups += [{**group, **options, **part} for part in split(named)]
    projected = any("rank" in group for group in groups)
    if projected:
        optimizer.param_groups = groups
    return projected


def step_in_backward(optimizer: Any) -> None:
    """Step as soon as a parameter's gradient is computed, and free the gradient. All other gradients are None then, and
    optimizers skip parameters without one."""
    step: Callable[[], Any] = optimizer.step

    def use_gradient(parameter: nn.Parameter) -> None:
        step()
        parameter.grad = None

    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.register_post_accumulate_grad_hook(use_gradient)
    optimizer.step = MethodType(lambda self, closure=None: None, optimizer)
