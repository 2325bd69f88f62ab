"""Attention implementations of transformers."""

from __future__ import annotations

from collections.abc import Mapping

from backend.registry.types import Attention

ATTENTIONS: Mapping[str, Attention] = {
    "auto": Attention("Automatic", "The default of transformers for the model: SDPA where it is supported."),
    "sdpa": Attention("SDPA", "PyTorch's fused scaled_dot_product_attention: works on every device."),
    "eager": Attention(
        "Eager", "Attention scores as a full matrix: slow, and memory grows with the square of the sequence length."
    ),
    "flash_attention_2": Attention(
        "FlashAttention 2",
        "Fast for long and packed sequences; Ampere and newer GPUs, bf16 or fp16.",
        package="flash_attn",
        package_min_version="2.3.3",
        devices=("cuda", "npu", "xpu"),
        min_capability=(8, 0),
        max_head_dim=256,
        head_dim_multiple=8,
    ),
    "flash_attention_3": Attention(
        "FlashAttention 3",
        "Written for Hopper GPUs; its build can include Ampere and Ada; bf16 or fp16.",
        package="flash_attn_3",
        devices=("cuda",),
        min_capability=(8, 0),
        max_capability=(9, 0),
        max_head_dim=256,
        head_dim_multiple=8,
    ),
    "flex_attention": Attention(
        "FlexAttention", "PyTorch's compiled attention with block masks; GPUs only.", devices=("cuda", "xpu")
    ),
}
FLASH_ATTENTIONS = tuple(name for name, row in ATTENTIONS.items() if row.package)
# Implementations whose heads DeepSpeed's sequence parallelism (Ulysses) can distribute.
SEQUENCE_PARALLEL_ATTENTIONS = ("auto", "sdpa", *FLASH_ATTENTIONS)
