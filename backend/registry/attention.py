"""How attention is computed.

Floor 0.
"""

from __future__ import annotations

from collections.abc import Mapping

from backend.registry.types import Attention

ATTENTIONS: Mapping[str, Attention] = {
    "auto": Attention("Automatic", "As the library chooses for the model: SDPA wherever it can."),
    "sdpa": Attention("SDPA", "PyTorch's own, fused: good everywhere."),
    "eager": Attention("Eager", "Scores written out: slow, and memory grows with the square of the length."),
    "flash_attention_2": Attention(
        "FlashAttention 2",
        "Long and packed rows without masks; Ampere and later, bf16 or fp16.",
        package="flash_attn",
        package_min_version="2.3.3",
        devices=("cuda", "npu", "xpu"),
        min_capability=(8, 0),
        max_head_dim=256,
        head_dim_multiple=8,
    ),
    "flash_attention_3": Attention(
        "FlashAttention 3",
        "For Hopper; bf16 or fp16.",
        package="flash_attn_3",
        devices=("cuda", "npu", "xpu"),
        min_capability=(9, 0),
        max_capability=(9, 0),
        max_head_dim=256,
        head_dim_multiple=8,
    ),
    "flex_attention": Attention(
        "FlexAttention", "PyTorch's compiled attention with masks of blocks; GPUs.", devices=("cuda", "npu", "xpu")
    ),
}
FLASH_ATTENTIONS = tuple(name for name, row in ATTENTIONS.items() if row.package)
SEQUENCE_PARALLEL_ATTENTIONS = (
    "auto",
    "sdpa",
    *FLASH_ATTENTIONS,
)  # whose heads DeepSpeed's sequence parallel can share out
