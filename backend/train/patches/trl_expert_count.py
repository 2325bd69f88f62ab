"""TRL's loss reads config.num_experts, which some mixtures of experts call num_local_experts.

trl/trainer/utils.py, `_fused_forward`: with the router loss on, it raises AttributeError for GraniteMoe, PhiMoE and
others. Without the patch full fine-tuning of these architectures fails in the first step.
"""

from __future__ import annotations

from typing import Any

LIBRARY, SEEN_IN = "trl", "1.16.0"


def apply(model: Any) -> None:
    """Let `num_experts` of the model's config be another name of `num_local_experts`. It is not saved."""
    config = model.config.get_text_config()
    if hasattr(config, "num_local_experts") and not hasattr(config, "num_experts"):
        names = type(config).attribute_map
        type(config).attribute_map = {**names, "num_experts": names.get("num_local_experts", "num_local_experts")}
