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
    "longcat_flash": "its router may send no token to any expert, so that the processes of a run call different "
    "modules and wait for each other; and it reads the weight of its classifier without calling the layer",
    "reformer": "in training, its attention accepts only sequences whose length is a multiple of its chunk length",
    "xlstm": _LOSS,
}
NO_LAYER_LIST = frozenset({"blt"})  # their config has no num_hidden_layers
NO_ZERO3 = frozenset({"blt", "rwkv", "youtu"})  # their weights are initialized by shape, and ZeRO-3 has sharded them
READS_WEIGHTS = frozenset({"gemma3n", "gemma3n_text"})  # the forward pass clamps the weights of linear layers
# Linear layers whose weight the forward pass reads without calling the layer, so that an adapter has no effect.
NOT_CALLED: Mapping[str, tuple[str, ...]] = {
    "falcon_mamba": ("dt_proj",),
    "gemma3n": ("correction_coefs",),
    "gemma3n_text": ("correction_coefs",),
    "jamba": ("dt_proj",),
    "mamba": ("dt_proj",),
}
