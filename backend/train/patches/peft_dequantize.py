"""DoRA replaces quantized weights on a CPU.

peft utils/integrations.py, `dequantize_module_weight`: on a CPU it assigns `module.weight` a copy, which has lost its
8-bit scales and what DeepSpeed has noted on it. Without the patch DoRA on an 8-bit base model, or under ZeRO-3, fails
on a CPU after its first use.
"""

from __future__ import annotations

from typing import Any

from peft.tuners.lora import dora, variants
from peft.utils import integrations

LIBRARY, SEEN_IN = "peft", "0.21.2"


def apply() -> None:
    """Let DoRA read the base weights without replacing them."""
    dora.dequantize_module_weight = variants.dequantize_module_weight = dequantized_weight


def dequantized_weight(module: Any) -> Any:
    """The dequantized weight of a layer; the layer keeps its own."""
    weight = module.weight
    dequantized = integrations.dequantize_module_weight(module)
    if module.weight is not weight:
        module.weight = weight
    return dequantized
