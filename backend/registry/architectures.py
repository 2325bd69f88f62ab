"""Model types of transformers 5.23 that cannot be trained, or not with every method. Imports nothing from Footplate.

Measured on a small model of each causal type (tests/process/test_architectures.py).
"""

from __future__ import annotations

from collections.abc import Mapping

_LOSS = (
    "TRL computes the loss from the output of the last decoder layer and the weight of the output layer, and this "
    "architecture has further layers between them"
)
UNTRAINABLE: Mapping[str, str] = {  # the end of a sentence
    "inkling_text": _LOSS,
    "modernbert-decoder": _LOSS,
    "reformer": "in training, its attention accepts only sequences whose length is a multiple of its chunk length",
    "xlstm": _LOSS,
}
NO_LAYER_LIST = frozenset({"blt"})  # their config has no num_hidden_layers
NO_ZERO3 = frozenset({"blt", "rwkv", "youtu"})  # their weights are initialized by shape, and ZeRO-3 has sharded them
READS_WEIGHTS = frozenset({"gemma3n", "gemma3n_text"})  # the forward pass clamps the weights of linear layers
