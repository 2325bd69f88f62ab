"""RWKV divides some of its weights in place for evaluation, and multiplies them again for training.

transformers/models/rwkv/modeling_rwkv.py, `RwkvModel._rescale_layers`: it keeps hidden states small for fp16. Without
the patch, a model or checkpoint that is saved after an evaluation has divided weights, so it is another model, and an
adapter on divided weights is added at its full size, which changes every evaluation and output. The last layer norm
makes the scale of the hidden states irrelevant.
"""

from __future__ import annotations

from typing import Any

LIBRARY, SEEN_IN = "transformers", "5.23.0"


def apply(model: Any) -> None:
    """Keep the weights of `model` as they are."""
    for module in model.modules():
        if hasattr(module, "layers_are_rescaled"):
            module._rescale_layers = _keep


def _keep() -> None:
    pass
