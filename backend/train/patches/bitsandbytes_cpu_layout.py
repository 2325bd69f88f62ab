"""bitsandbytes rewrites its 4-bit weights on CPUs with AVX512-BF16.

nn/modules.py, `Linear4bit.forward`: the first evaluation converts the weights into a layout for inference whose scales
are rounded to bf16, and which needs rows that are multiples of a block. Without the patch the steps after an evaluation
train on other base weights than the steps before it, and layers of other widths fail.
"""

from __future__ import annotations

from typing import Any

LIBRARY, SEEN_IN = "bitsandbytes", "0.50.2"


def apply(model: Any) -> None:
    """Keep the 4-bit weights of `model` in the layout in which they were loaded."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
