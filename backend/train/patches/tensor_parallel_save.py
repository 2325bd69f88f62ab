"""save_pretrained of a tensor-parallel model gathers the weights even if it is given gathered ones.

transformers modeling_utils.py, `save_pretrained`: whenever the config has a `distributed_config`, it gathers again and
waits for all ranks. Only rank 0 saves here, with weights that are gathered already. Without the patch it waits forever.
"""

from __future__ import annotations

from typing import Any

LIBRARY, SEEN_IN = "transformers", "5.23.0"


def apply(model: Any) -> None:
    """Remove the mark of a distributed model from its config, on the rank that saves."""
    vars(model.config).pop("distributed_config", None)
