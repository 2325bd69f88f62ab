"""Adam-mini takes the size of an attention head to be hidden_size / heads.

adam_mini.py, `__init__`: `head_numel = dim * dim // n_heads`. Models with a head_dim of their own (Qwen3, Gemma) have
other heads. Without the patch their query and key weights are divided in the middle of heads, or the step fails because
the division leaves a remainder.
"""

from __future__ import annotations

from typing import Any

LIBRARY, SEEN_IN = "adam-mini", "1.1.1"


def sizes(config: Any) -> dict[str, int]:
    """The arguments of Adam-mini for a model's text `config`. A model without attention, such as Mamba, has one head.
    Raises an exception for the types in `adam_mini.HEADS_DIFFER`."""
    heads = getattr(config, "num_attention_heads", None) or 1
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return {"dim": config.hidden_size, "n_heads": heads, "n_kv_heads": kv_heads}


def apply(optimizer: Any, config: Any) -> None:
    """Let the optimizer divide weights by the head_dim of the model's text `config`."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // optimizer.n_heads
    optimizer.head_numel = config.hidden_size * head_dim
