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
        oldest=(8, 0),
    ),
    "flash_attention_3": Attention(
        "FlashAttention 3", "For Hopper; bf16 or fp16.", package="flash_attn_3", oldest=(9, 0), newest=(9, 0)
    ),
    "flex_attention": Attention("FlexAttention", "PyTorch's compiled attention with masks of blocks; GPUs."),
}
FLASH = tuple(name for name, row in ATTENTIONS.items() if row.package)
SHAREABLE = ("auto", "sdpa", *FLASH)  # whose heads DeepSpeed's sequence parallel can share out
