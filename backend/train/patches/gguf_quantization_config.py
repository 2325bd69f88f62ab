"""A model that transformers has dequantized from a GGUF file still says that it is quantized.

quantizers/auto.py, `get_hf_quantizer`: reading a GGUF file sets `config.quantization_config` to a GgufConfig, although
the weights are plain tensors by then. Without the patch the config is saved with the model, and loading the saved
checkpoint fails, because transformers looks for a GGUF file.
"""

from __future__ import annotations

from typing import Any

LIBRARY, SEEN_IN = "transformers", "5.23.0"


def apply(model: Any) -> None:
    """Remove the marks of the GGUF file before `model` is saved."""
    model.hf_quantizer = None
    model.config.__dict__.pop("quantization_config", None)
