"""The Trainer's resume loads adapters in fp32, whatever their dtype was.

transformers trainer.py, `_load_from_checkpoint`, calls peft's `load_adapter`, whose `autocast_adapter_dtype` is true by
default. Without the patch a run in pure bf16 continues with fp32 adapters.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LIBRARY, SEEN_IN = "peft", "0.21.2"


@contextmanager
def kept(model: Any) -> Iterator[None]:
    """Give all parameters of `model` the dtype back that they had before this context."""
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    yield
    for name, parameter in model.named_parameters():
        if parameter.dtype != dtypes[name]:
            parameter.data = parameter.data.to(dtypes[name])


def obsolete() -> bool:
    """Whether the Trainer asks for the adapter's own dtype, or peft keeps it by default."""
    from peft import PeftModel  # noqa: PLC0415  (takes seconds)
    from transformers import Trainer  # noqa: PLC0415

    default = inspect.signature(PeftModel.load_adapter).parameters["autocast_adapter_dtype"].default
    return not default or "autocast_adapter_dtype" in inspect.getsource(Trainer._load_from_checkpoint)
