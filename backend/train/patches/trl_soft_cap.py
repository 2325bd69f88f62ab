"""TRL knows the cap of a model's logits by one name.

trl/trainer/utils.py, `add_fused_lm_head`: it reads `final_logit_softcapping`, and RecurrentGemma's config has
`logits_soft_cap`. Without the patch the loss of SFT, pretraining, DPO and KTO is that of a model without the cap.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LIBRARY, SEEN_IN = "trl", "1.16.0"
KEY, OTHER = "final_logit_softcapping", "logits_soft_cap"


@contextmanager
def named(*models: Any) -> Iterator[None]:
    """Give the config the cap by TRL's name, too, while a trainer is constructed; it is not saved with the model."""
    configs = [model.config.get_text_config() for model in models if model is not None]
    found = [config for config in configs if hasattr(config, OTHER) and not hasattr(config, KEY)]
    for config in found:
        setattr(config, KEY, getattr(config, OTHER))
    yield
    for config in found:
        if hasattr(config, KEY):  # both models may have the same config
            delattr(config, KEY)
