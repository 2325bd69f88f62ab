"""TRL's SFT trainer switches on the router loss of a mixture of experts in the model's config.

trl/trainer/sft_trainer.py, `__init__`: it sets `output_router_logits`, which is saved with the model. Without the patch
`generate` of the trained model fails, because it computes the router loss for one token at a time.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LIBRARY, SEEN_IN = "trl", "1.16.0"
KEY = "output_router_logits"


@contextmanager
def kept(model: Any) -> Iterator[None]:
    """Keep the config's value while a trainer is constructed; the trainer itself remembers what it needs."""
    config = model.config.get_text_config()
    before = getattr(config, KEY, None)
    yield
    if before is not None:
        setattr(config, KEY, before)


def obsolete() -> bool:
    """Whether the constructor leaves the config as it is."""
    trainer = importlib.import_module("trl.trainer.sft_trainer").SFTTrainer
    return f".{KEY} = self.aux_loss_enabled" not in inspect.getsource(trainer.__init__)
