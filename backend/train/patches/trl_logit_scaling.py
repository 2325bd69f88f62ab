"""TRL knows the cap of logits by one name, and multiplies logits by a key that a model may ignore.

trl/trainer/utils.py, `add_fused_lm_head`: it reads `final_logit_softcapping`, and RecurrentGemma's config has
`logits_soft_cap`. Without the patch the loss of SFT, pretraining, DPO and KTO is that of a model without the cap.
It also multiplies the logits by `logit_scale`, which transformers' MPT ignores and which may be a word there. Without
the patch the loss is that of another model, or fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LIBRARY, SEEN_IN = "trl", "1.16.0"
KEY, OTHER = "final_logit_softcapping", "logits_soft_cap"
SCALE, UNSCALED = "logit_scale", ("mpt",)  # the types that ignore it


@contextmanager
def named(*models: Any) -> Iterator[None]:
    """Give the config the cap by TRL's name, too, and hide a scale without effect, while a trainer is constructed. The
    saved config is not changed."""
    configs = [model.config.get_text_config() for model in models if model is not None]
    found = [config for config in configs if hasattr(config, OTHER) and not hasattr(config, KEY)]
    for config in found:
        setattr(config, KEY, getattr(config, OTHER))
    hidden = [(config, getattr(config, SCALE, None)) for config in configs if config.model_type in UNSCALED]
    for config, _ in hidden:
        config.logit_scale = None
    yield
    for config, scale in hidden:
        config.logit_scale = scale
    for config in found:
        if hasattr(config, KEY):  # both models may have the same config
            delattr(config, KEY)
