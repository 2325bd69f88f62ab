"""How Adam-mini (adam-mini 1.1.1) divides the weights of a model into blocks, by their names."""

from __future__ import annotations

import re

# Weights that are divided into attention heads, whose size must divide that of the weight.
HEADS = re.compile(r"k_proj|q_proj|wq|wk|query|key", re.IGNORECASE)
# Weights that are divided into rows, so they must be matrices.
ROWS = re.compile(
    r"embed|embd|wte|lm_head|output|final_layer|v_proj|wv|value|feed_forward|linear|mlp|o_proj|wo|attn\.proj",
    re.IGNORECASE,
)
BIAS = re.compile("bias", re.IGNORECASE)
# Model types of transformers 5.23 whose heads have no single size: it differs between layers, or between BLT's parts.
HEADS_DIFFER = frozenset({
    "blt", "dots3_note", "dots3_note_text", "gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text",
})  # fmt: skip


def problem(name: str, dimensions: int, elements: int, head_elements: int) -> str:
    """Why Adam-mini's first step fails on a weight with these dimensions, as the end of a sentence; '' if it does not.
    Vectors do not fail: the trainer gives them names of norms."""
    if BIAS.search(name) or dimensions < 2:
        return ""
    if HEADS.search(name):
        if elements % head_elements:
            return (
                f"has {elements:,} elements, which cannot be divided into attention heads of {head_elements:,} elements"
            )
    elif ROWS.search(name) and dimensions > 2:
        return f"has {dimensions} dimensions, and Adam-mini divides matrices only"
    return ""
