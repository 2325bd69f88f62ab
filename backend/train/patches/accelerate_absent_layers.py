"""accelerate wraps every class of `_no_split_modules` for FSDP, and fails if the model has no module of one of them.

accelerate/utils/fsdp_utils.py, `fsdp2_prepare_auto_wrap_policy`: the text model of a multimodal checkpoint
(Qwen3.5, Cohere Compass) names the layers of the vision tower too. Without the patch FSDP raises Could not find the
transformer layer class.
"""

from __future__ import annotations

from typing import Any

LIBRARY, SEEN_IN = "accelerate", "1.15.0"


def apply(model: Any) -> None:
    """Leave the classes that the model has no module of out of `_no_split_modules`."""
    if names := getattr(model, "_no_split_modules", None):
        present = {type(module).__name__ for module in model.modules()}
        model._no_split_modules = [name for name in names if name in present]
