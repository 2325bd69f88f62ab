"""transformers quantizes a weight on the device on which it is kept.

integrations/bitsandbytes.py, `Bnb4bitQuantize.convert`: with a device_map of "cpu" the CPU quantizes, about ten million
elements per second and core: hours for a large model. Without the patch, only a device_map of the GPU is fast, and then
each GPU holds the whole quantized base model before FSDP shards it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers.integrations.bitsandbytes import Bnb4bitQuantize

LIBRARY, SEEN_IN = "transformers", "5.23.0"


@contextlib.contextmanager
def apply(device: torch.device) -> Iterator[None]:
    """Quantize on `device`, one weight at a time, and keep the quantized weights on the CPU."""
    owner: Any = Bnb4bitQuantize
    convert = owner.convert

    def convert_on_device(self: Any, input_dict: dict[str, Any], *arguments: Any, **more: Any) -> dict[str, Any]:
        weights = {name: value[0] if isinstance(value, list) else value for name, value in input_dict.items()}
        moved = {name: weight.to(device) for name, weight in weights.items()}
        return {name: weight.to("cpu") for name, weight in convert(self, moved, *arguments, **more).items()}

    owner.convert = convert_on_device
    try:
        yield
    finally:
        owner.convert = convert
