"""TRL turns off the dropout of preference stages in the modules of type nn.Dropout only.

trl/trainer/utils.py, `disable_dropout_in_model`. Attention and some residual connections call the function
`nn.functional.dropout` with a probability that their module keeps as a number, such as the residual_dropout of 0.1 in
Seed-OSS. Mixtral and others multiply the input of a router with noise (router_jitter_noise). Without the patch the
policy would be noisy and the reference model not, so DPO's first loss is not ln 2.
"""

from __future__ import annotations

from typing import Any

from backend.train.patches.transformers_router_jitter import NOISE

LIBRARY, SEEN_IN = "trl", "1.16.0"


def apply(config: Any, *models: Any) -> None:
    """Set these probabilities to 0 where the trainer's `config` turns dropout off; config.json keeps them."""
    if not getattr(config, "disable_dropout", False):
        return
    for module in (module for model in models if model is not None for module in model.modules()):
        for name, value in vars(module).items():
            if ("drop" in name or name in NOISE) and isinstance(value, float):
                setattr(module, name, 0.0)
