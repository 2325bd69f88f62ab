"""Llama 4's causal language model names a base model that it does not have.

transformers/models/llama4/modeling_llama4.py, `Llama4ForCausalLM`: `base_model_prefix` is "language_model", and the
base model is the attribute `model`, so `model.base_model` is the model itself. Without the patch TRL's loss, which
calls the base model, fails in the first step of every stage.
"""

from __future__ import annotations

from typing import Any

LIBRARY, SEEN_IN = "transformers", "5.23.0"


def apply(model: Any) -> None:
    """Let `model.base_model` be the decoder. The class is not changed: loading uses its prefix."""
    if model.base_model is model and hasattr(model, "model"):
        model.base_model_prefix = "model"
