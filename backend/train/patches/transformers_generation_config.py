"""transformers loads, but refuses to save, a generation config with a setting that has no effect.

transformers/generation/configuration_utils.py, `save_pretrained`. Published models have such files. Without the patch a
run ends with an error when it saves its first checkpoint.
"""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig

LIBRARY, SEEN_IN = "transformers", "5.23.0"
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
BEAMS = ("early_stopping", "length_penalty", "num_beam_groups", "diversity_penalty")
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def apply(model: Any) -> None:
    """Leave out the settings of the model's generation config that have no effect; all but its tokens, if it is invalid
    for another reason."""
    config = getattr(model, "generation_config", None)
    if config is None or _can_be_saved(config):
        return
    usual = GenerationConfig()
    without = (*(() if config.do_sample else SAMPLING), *(BEAMS if (config.num_beams or 1) == 1 else ()))
    for name in without:
        setattr(config, name, getattr(usual, name, None))
    if not _can_be_saved(config):
        model.generation_config = GenerationConfig(**{name: getattr(config, name) for name in TOKENS})


def _can_be_saved(config: Any) -> bool:
    try:
        config.validate(strict=True)
    except ValueError:
        return False
    return True
