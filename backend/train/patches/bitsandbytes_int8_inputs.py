"""8-bit layers of bitsandbytes take inputs with at most three dimensions.

autograd/_functions.py, `MatMul8bitLt.forward`: it flattens inputs with three dimensions only. Multi-head latent
attention (DeepSeek, GLM 4.7 Flash, MiniCPM3 and others) gives its projection of keys and values four. Without the patch
the first step fails, or computes something else if two sizes happen to be equal.
"""

from __future__ import annotations

from typing import Any

LIBRARY, SEEN_IN = "bitsandbytes", "0.50.2"
MAX_DIMENSIONS = 3
originals: dict[type, Any] = {}


def apply(model: Any) -> None:
    """Replace `forward` of the class of 8-bit layers if `model` has any."""
    for module in model.modules():
        kind = type(module)
        if hasattr(module, "init_8bit_state") and kind not in originals:
            originals[kind], kind.forward = kind.forward, forward


def forward(layer: Any, inputs: Any) -> Any:
    """The output for inputs of any number of dimensions."""
    original = originals[type(layer)]
    if inputs.dim() <= MAX_DIMENSIONS:
        return original(layer, inputs)
    return original(layer, inputs.flatten(0, -2)).unflatten(0, inputs.shape[:-1])
