"""Loaded models train parameters that their class has frozen.

transformers core_model_loading.py makes new parameters, with a gradient: router biases (ERNIE 4.5, AFMoE, Laguna),
sinusoidal positions (Marian, Pegasus, RoFormer) and BLT's patcher. Without the patch full fine-tuning trains them, and
DDP fails in the second step on those that get no gradient.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch

LIBRARY, SEEN_IN = "transformers", "5.23.0"


def apply(model: Any) -> None:
    """Freeze the parameters of a loaded model that a new one of its class has frozen; a model with custom code is left
    as it is."""
    if not type(model).__module__.startswith("transformers."):
        return
    with _without_zero3(), torch.device("meta"), torch.random.fork_rng(devices=[]):  # no memory, no random numbers
        new = type(model)(copy.deepcopy(model.config))
    frozen = {name for name, parameter in new.named_parameters() if not parameter.requires_grad}
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)


@contextlib.contextmanager
def _without_zero3() -> Iterator[None]:
    """Turn ZeRO-3 off. With it, `from_config`, which Gemma 3 calls for its vision tower, shards and initializes the
    weights, which the meta device cannot do."""
    from transformers.integrations import deepspeed  # noqa: PLC0415  (takes a second)

    active = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = active
