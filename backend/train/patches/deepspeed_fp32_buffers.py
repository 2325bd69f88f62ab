"""DeepSpeed casts a model's parameters to bf16 or fp16, but leaves its buffers in fp32. So does Footplate in pure bf16,
if it loads the model in fp32, for an initialization of LoRA that decomposes the weights.

engine.py, `_cast_module_mixed_precision` (deepspeed 0.19). Without the patch the fp32 positions of XGLM and Kosmos-2.5,
the mask of OpenAI GPT and the decay of MiniMax turn their layers' input into fp32, and the next layer fails:
"expect parameter to have scalar type of Float". transformers has these buffers in 16 bits when it loads a model in 16
bits. Other buffers, such as the frequencies of rotary embeddings, stay in fp32 there too, or are cast where they are
used.
"""

from __future__ import annotations

import re
from typing import Any

import torch

LIBRARY, SEEN_IN = "deepspeed", "0.19.8"
CAST = re.compile(r"(?:embed_positions\.weights|attn\.bias|slope_rate|(?:query|key|diagonal)_decay)$")


def apply(model: Any, dtype: torch.dtype) -> None:
    """Cast the buffers that the layers' input is computed with to the compute dtype."""
    for name, buffer in model.named_buffers():
        if CAST.search(name) and buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)
