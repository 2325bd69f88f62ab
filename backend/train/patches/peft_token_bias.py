"""An output layer of which only some rows are trained has no bias in peft, not even None, and TRL's losses ask for it.

peft utils/other.py, `TrainableTokensWrapper._hasattr_wrapped`, knows the weight only. Without the patch, the first step
of training ends with AttributeError: 'TrainableTokensWrapper' object has no attribute 'bias'.
"""

from __future__ import annotations

from typing import Any

from peft.utils.other import TrainableTokensWrapper

LIBRARY, SEEN_IN = "peft", "0.21.2"
BIAS = "bias"
originals = TrainableTokensWrapper._hasattr_wrapped, TrainableTokensWrapper._getattr_wrapped


def has_attribute(wrapper: Any, name: str, modules: Any) -> bool:
    """Whether the wrapped layer has the attribute."""
    return name == BIAS or bool(originals[0](wrapper, name, modules))


def get_attribute(wrapper: Any, name: str, modules: Any) -> Any:
    """The bias of the wrapped layer, None if it has none; other attributes as before."""
    if name == BIAS:
        return getattr(wrapper.original_module, BIAS, None)
    return originals[1](wrapper, name, modules)


def apply() -> None:
    """Replace the methods."""
    TrainableTokensWrapper._hasattr_wrapped, TrainableTokensWrapper._getattr_wrapped = has_attribute, get_attribute
