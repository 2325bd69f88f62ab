"""Adam-mini takes the size of an attention head to be hidden_size / heads.

adam_mini.py, `__init__`: `head_numel = dim * dim // n_heads`. Models with a head_dim of their own (Qwen3, Gemma) have
other heads. Without the patch their query and key weights are divided in the middle of heads, or the step fails because
the division leaves a remainder.
"""

from __future__ import annotations

from typing import Any

LIBRARY, SEEN_IN = "adam-mini", "1.1.1"


def apply(optimizer: Any, config: Any) -> None:
    """Let the optimizer divide weights by the head_dim of the model's text `config`."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    optimizer.head_numel = config.hidden_size * head_dim
