"""The reference model of DPO and KTO turns on the gradients of all blocks, of which BAdam trains one.

trl/trainer/utils.py, `use_adapter`: peft's `set_adapter` and `disable_adapter`, with which it switches to the reference
and back, make every parameter of the adapter trainable (tuners/tuners_utils.py, `enable_adapters`). Without the patch
activation checkpointing fails in the first step with "Recomputed values have different metadata", since the forward
pass was without these gradients. In other runs the gradients of all blocks would need memory, and the gradient norm
would include them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trl.trainer import dpo_trainer, kto_trainer, utils

LIBRARY, SEEN_IN = "trl", "1.16.0"
original = utils.use_adapter


@contextmanager
def use_adapter(model: Any, adapter_name: str | None) -> Iterator[None]:
    """Use another adapter, or none; then the same parameters as before are trainable."""
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    with original(model, adapter_name):
        yield
    for parameter in frozen:
        parameter.requires_grad_(False)


def apply() -> None:
    """Replace the function where it is used."""
    dpo_trainer.use_adapter = kto_trainer.use_adapter = use_adapter
