"""peft saves the whole embeddings with an adapter if their size is not that of the base model, also if the adapter has
all of their new rows.

peft utils/save_and_load.py, `get_peft_model_state_dict`: trainable_token_indices prevents this only for embeddings of
the base model's size. Without the patch, each checkpoint of an adapter with two new tokens has gigabytes of frozen
weights.
"""

from __future__ import annotations

import warnings
from typing import Any

from peft.utils import save_and_load
from peft.utils.other import AuxiliaryTrainingWrapper

LIBRARY, SEEN_IN = "peft", "0.21.2"
original = save_and_load.get_embedding_layer_name


def name_of_frozen(model: Any, layer: Any, *more: Any) -> str | None:
    """The name of an embedding whose weights are saved next to the adapter; None for one that has its trained rows."""
    return None if isinstance(layer, AuxiliaryTrainingWrapper) else original(model, layer, *more)


def apply() -> None:
    """Replace the function, and say nothing about weights that are not saved."""
    save_and_load.get_embedding_layer_name = name_of_frozen
    warnings.filterwarnings("ignore", "Setting `save_embedding_layers` to `True` as the embedding layer has been re")
