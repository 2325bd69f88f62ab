"""Routers with noise change the output of the layer norm before them in place.

transformers/models/mixtral/modeling_mixtral.py, `MixtralSparseMoeBlock.forward`: `hidden_states *= ...` with
router_jitter_noise; MiniMax, PhiMoE (input_jitter_noise) and DBRX (moe_jitter_eps) do the same. ZeRO-3's hooks return
views, which torch does not allow to be changed in place. Without the patch the first step of Mixtral ends with "Output
0 of BackwardHookFunction is a view and is being modified inplace".
"""

from __future__ import annotations

from typing import Any

LIBRARY, SEEN_IN = "transformers", "5.23.0"
NOISE = ("jitter_noise", "input_jitter_noise", "moe_jitter_eps")  # attributes of the modules that add it


originals: dict[type, Any] = {}


def apply(model: Any) -> None:
    """Let modules that add noise change a copy of their input. A hook could not make it: a view comes after it."""
    for module in model.modules():
        kind = type(module)
        if kind not in originals and any(getattr(module, name, None) for name in NOISE):
            originals[kind], kind.forward = kind.forward, forward


def forward(module: Any, hidden_states: Any, *arguments: Any, **more: Any) -> Any:
    """The output for a copy of the input."""
    return originals[type(module)](module, hidden_states.clone(), *arguments, **more)
