"""torch casts the state of an optimizer to the dtype of its parameters when it is loaded.

torch/optim/optimizer.py, `_process_value_according_to_param_policy`. Some optimizers keep fp32 state for bf16 weights,
such as Adafactor with pure bf16. Without the patch this state is rounded to bf16, so a resumed run is not the
undisturbed one.
"""

from __future__ import annotations

from typing import Any

import torch

LIBRARY, SEEN_IN = "torch", "2.13.0"


def apply(optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer its saved state in the dtype that it was saved in, each time that one is loaded."""
    saved: dict[Any, Any] = {}

    def remember(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        saved.update(state_dict["state"])

    def restore(loaded: torch.optim.Optimizer) -> None:
        parameters = [parameter for group in loaded.param_groups for parameter in group["params"]]
        for number, values in saved.items():
            state = loaded.state.get(parameters[number], {}) if isinstance(number, int) else {}
            for name, value in values.items():
                if isinstance(value, torch.Tensor) and name in state and state[name].dtype != value.dtype:
                    state[name] = value.to(state[name].device)
        saved.clear()

    optimizer.register_load_state_dict_pre_hook(remember)
    optimizer.register_load_state_dict_post_hook(restore)
