"""Llama 4 changes the output of its shared expert in place, which is not allowed in FP8.

transformers/models/llama4/modeling_llama4.py, `Llama4TextMoe.forward`: `out.add_(...)`. The output of torchao's FP8
layers is a view that a custom autograd function has created. Without the patch the first step ends with "Output 0 of
matmul_with_hp_or_float8_args is a view and is being modified inplace".
"""

from __future__ import annotations

from typing import Any

from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

LIBRARY, SEEN_IN = "transformers", "5.23.0"


def apply(model: Any) -> None:
    """Let the shared experts return a copy."""
    for module in model.modules():
        if isinstance(module, Llama4TextMoe):
            module.shared_expert.register_forward_hook(copied)


def copied(module: Any, inputs: Any, output: Any) -> Any:
    """A copy of the output."""
    return output.clone()
