"""Ulysses takes the sizes of attention from the config, the same for queries, keys and values, and merges the heads.

deepspeed runtime/sequence_parallel/ulysses_sp.py, UlyssesSPAttentionHF: it reads num_key_value_heads, which older
configs do not have, and head_dim, which may be null. With multi-head latent attention, heads of queries and keys are
larger than those of values. It returns the heads merged into one dimension, while transformers' attention functions
return them apart, and some layers (GPT-2, DiffLlama) still need them. Without the patch sequence parallelism fails on
these architectures.

With more ranks than key-value heads, it also changes the layer's num_key_value_groups to that of a rank, which is wrong
in the evaluation: there each rank has all heads.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

LIBRARY, SEEN_IN = "deepspeed", "0.19.8"
GROUPS = "num_key_value_groups"


class SizedForward:
    """Calls `original`, the forward method, with the sizes of the tensors; the heads of its output are apart again, and
    the layer is as it was."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def __get__(self, attention: Any, _: Any = None) -> Any:
        return lambda *args, **more: self(attention, *args, **more)

    def __call__(self, attention: Any, module: Any, query: Any, key: Any, value: Any, *args: Any, **more: Any) -> Any:
        """(output, weights), as transformers' attention functions return them: batch, tokens, heads, head size."""
        if not module.training and attention.disable_in_eval:
            return self.original(attention, module, query, key, value, *args, **more)
        size, kept = query.shape[-1], value.shape[-1]
        set_sizes(attention, query.shape[1], key.shape[1], size)
        value = torch.nn.functional.pad(value, (0, size - kept))
        before = vars(module).get(GROUPS)
        try:
            output, weights = self.original(attention, module, query, key, value, *args, **more)
        finally:
            vars(module).pop(GROUPS, None)
            if before is not None:
                module.num_key_value_groups = before
        return output.unflatten(-1, (-1, size))[..., :kept], weights


def set_sizes(attention: Any, heads: int, kv_heads: int, size: int) -> None:
    """What the constructor of UlyssesSPAttentionHF derives from the config."""
    attention.attn_head_count, attention.global_kv_head_count, attention.attn_head_size = heads, kv_heads, size
    attention.local_q_head_count = heads // attention.world_size
    attention.kv_replication_factor = attention.world_size // kv_heads
    attention.local_kv_head_count = max(1, kv_heads // attention.world_size)
    local, batch = attention.required_query_shape[:2]
    attention.required_query_shape = torch.Size([local, batch, heads, size])
    attention.required_key_value_shape = torch.Size([local, batch, kv_heads, size])
    context = attention.required_context_shape[0]
    attention.required_context_shape = torch.Size([context, batch, size * heads // attention.world_size])


def apply(config: Any) -> None:
    """Replace the method, and complete a model's config with what the constructor reads."""
    text = config.get_text_config()
    if getattr(text, "num_key_value_heads", None) is None:
        text.num_key_value_heads = text.num_attention_heads
    if hasattr(text, "head_dim") and text.head_dim is None:
        text.head_dim = text.hidden_size // text.num_attention_heads
    ulysses = _ulysses()
    if not isinstance(ulysses.__dict__["forward"], SizedForward):
        ulysses.forward = SizedForward(ulysses.forward)


def _ulysses() -> Any:
    return importlib.import_module("deepspeed.runtime.sequence_parallel.ulysses_sp").UlyssesSPAttentionHF
