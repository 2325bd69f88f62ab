"""The Trainer writes the tokenizer's padding token into the model's config, after the model was built with another.

transformers/trainer_utils.py, `align_special_tokens`. Some models compute with the value that they are built with: XGLM
sets a row of its position table to zero, RoBERTa's positions start after it. Without the patch the saved model, which
is built with the new value, gives other logits than the trained one. Its generation config and its tokenizer name the
padding token in any case.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

LIBRARY, SEEN_IN = "transformers", "5.23.0"
NAME = "pad_token_id"


class PaddingIndex(TrainerCallback):
    """Restores the padding index of `config`, with which the model was built, before the first checkpoint is written.
    Some configs (CodeGen, RWKV, those of custom code) have none."""

    def __init__(self, config: Any) -> None:
        self.known, self.index = hasattr(config, NAME), getattr(config, NAME, None)

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """The Trainer has aligned the tokens of `more["model"]` by now."""
        config = more["model"].config.get_text_config()
        if self.known:
            config.pad_token_id = self.index
        elif hasattr(config, NAME):
            delattr(config, NAME)
