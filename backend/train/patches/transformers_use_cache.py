"""The Trainer turns the cache off in the model's config, and the saved config.json keeps that.

transformers/trainer.py, `Trainer.__init__`: `model.config.use_cache = args.use_cache`, which is False by default: a
training needs no cache. Without the patch a trained model that is loaded with from_pretrained and called token by token
returns no cache, unlike its base model. (`generate` asks the generation config.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

LIBRARY, SEEN_IN = "transformers", "5.23.0"


@contextlib.contextmanager
def restored(config: Any, value: bool | None) -> Iterator[None]:
    """Let a model's config have the base model's `value` of use_cache while it is saved; None: it has none."""
    current = getattr(config, "use_cache", None)
    if value is None or current is None:
        yield
        return
    config.use_cache = value
    try:
        yield
    finally:
        config.use_cache = current
