"""Ulysses reads num_key_value_heads of every model's config.

deepspeed runtime/sequence_parallel/ulysses_sp.py: `kv_head_count=arch_cfg.num_key_value_heads`. The configs of older
architectures (GPT-NeoX) do not have it, because they have as many KV heads as attention heads. Without the patch
sequence parallelism fails on them with an AttributeError.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

LIBRARY, SEEN_IN = "deepspeed", "0.19.8"


def apply(config: Any) -> None:
    """Set num_key_value_heads in a model's config if it is missing."""
    text = config.get_text_config()
    if not hasattr(text, "num_key_value_heads"):
        text.num_key_value_heads = text.num_attention_heads


def obsolete() -> bool:
    """Whether Ulysses handles configs without it."""
    module = importlib.import_module("deepspeed.runtime.sequence_parallel.ulysses_sp")
    return "kv_head_count=arch_cfg.num_key_value_heads" not in inspect.getsource(module)
