"""TRL's SFT trainer changes the router loss of a mixture of experts in the model's config.

trl/trainer/sft_trainer.py, `__init__`: it sets `output_router_logits`, which is saved with the model, and the loss's
coefficient. Without the patch
`generate` of the trained model fails, because it computes the router loss for one token at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LIBRARY, SEEN_IN = "trl", "1.16.0"
KEYS = ("output_router_logits", "router_aux_loss_coef")


@contextmanager
def kept(model: Any) -> Iterator[None]:
    """Keep the config's values while a trainer is constructed; the trainer itself remembers what it needs."""
    config = model.config.get_text_config()
    before = {key: value for key in KEYS if (value := getattr(config, key, None)) is not None}
    yield
    for key, value in before.items():
        setattr(config, key, value)
