"""bitsandbytes cannot load a checkpoint into 8-bit layers that have already computed something.

nn/modules.py, `Linear8bitLt.forward`: the first call moves the quantized weights and their scales (CB, SCB) from the
weight to `state`, and `_load_from_state_dict` looks for the scales in the weight only. DeepSpeed loads whole modules.
Without the patch load_best_model_at_end ends with an error after all steps, as does a resume after a forward pass.
"""

from __future__ import annotations

from typing import Any

LIBRARY, SEEN_IN = "bitsandbytes", "0.50.2"


def apply(model: Any) -> None:
    """Move CB and SCB of the 8-bit layers of `model` back before each load; the next forward moves them again."""
    for module in model.modules():
        if hasattr(module, "init_8bit_state"):
            module.register_load_state_dict_pre_hook(_move_back)


def _move_back(layer: Any, *_: Any) -> None:
    weight, state = layer.weight, layer.state
    if weight.SCB is None and state.SCB is not None:
        weight.CB, weight.SCB = state.CB, state.SCB
