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


class PaddingIndex(TrainerCallback):
    """Restores `index`, the value that the model was built with, before the first checkpoint is written."""

    def __init__(self, index: int | None) -> None:
        self.index = index

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """The Trainer has aligned the tokens of `more["model"]` by now."""
        more["model"].config.get_text_config().pad_token_id = self.index
