"""Some models change the output of a layer in place, which is not allowed in FP8.

transformers/models/llama4/modeling_llama4.py, `Llama4TextMoe.forward`: `out.add_(...)`; falcon/modeling_falcon.py,
`FalconDecoderLayer.forward`: `mlp_output += attention_output`; gemma3n/modeling_gemma3n.py, `project_per_layer_inputs`:
`per_layer_projection *= ...`. The output of torchao's FP8 layers is a view that a custom autograd function has created.
Without the patch the first step ends with "Output 0 of matmul_with_hp_or_float8_args is a view and is being modified
inplace".
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

LIBRARY, SEEN_IN = "transformers", "5.23.0"
# Class of a module -> its part whose output it changes.
PARTS = {
    "FalconDecoderLayer": "mlp",
    "Gemma3nTextModel": "per_layer_model_projection",
    "Llama4TextMoe": "shared_expert",
}


def apply(model: Any) -> None:
    """Let these parts return a copy."""
    for module in model.modules():
        name = PARTS.get(type(module).__name__)
        if name is None:
            continue
        part = getattr(module, name)
        if isinstance(part, nn.Linear):  # accelerate replaces it with a layer in FP8 before the first forward pass
            module.register_forward_pre_hook(partial(_hook, name))
        else:
            part.register_forward_hook(copied)


def _hook(name: str, module: Any, inputs: Any) -> None:
    part = getattr(module, name)
    if copied not in part._forward_hooks.values():
        part.register_forward_hook(copied)


def copied(module: Any, inputs: Any, output: Any) -> Any:
    """A copy of the output."""
    return output.clone()
