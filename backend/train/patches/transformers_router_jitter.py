"""Routers with noise change the output of the layer norm before them in place.

transformers/models/mixtral/modeling_mixtral.py, `MixtralSparseMoeBlock.forward`: `hidden_states *= ...` with
router_jitter_noise; MiniMax, PhiMoE (input_jitter_noise) and DBRX (moe_jitter_eps) do the same. ZeRO-3's hooks return
views, which torch does not allow to be changed in place. Without the patch the first step of Mixtral ends with "Output
0 of BackwardHookFunction is a view and is being modified inplace".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any

LIBRARY, SEEN_IN = "transformers", "5.23.0"
DBRX = "moe_jitter_eps"
NOISE = ("jitter_noise", "input_jitter_noise", DBRX)  # attributes of the modules that add it


def apply(model: Any) -> None:
    """Let modules that add noise change a copy of their input. A hook could not make it: a view comes after it."""
    for module in model.modules():
        if getattr(module, DBRX, None) == 0:  # it would multiply by 1; published configs have 0
            module.moe_jitter_eps = None
        if any(getattr(module, name, None) for name in NOISE):
            module.forward = MethodType(_with_copy(module.forward.__func__), module)


def _with_copy(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which gets a copy of the input."""

    @wraps(forward)
    def call(module: Any, hidden_states: Any, *arguments: Any, **more: Any) -> Any:
        return forward(module, hidden_states.clone(), *arguments, **more)

    return call
