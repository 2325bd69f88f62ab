"""BAdam's checkpoints hold the moments of the current block only, and its weight decay is always that of AdamW.

block_optim.py, `__init__`: `state_dict` is that of the base optimizer. The fp32 master weights, the learning rate and
the position in the order of blocks are missing. Without the patch a resumed run starts again with the first block, with
moments that belong to another one. And `_switch_trainable_params_single_gpu` makes groups of the parameters of a block
whose weight decay the defaults of AdamW, 0.01, overwrite, also for norms.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from backend.train.run_log import TrainError

Groups = Callable[[Sequence[tuple[str, Any]]], list[dict[str, Any]]]
LIBRARY, SEEN_IN = "badam", "1.4"


def block_optimizer(groups: Groups, *arguments: Any, **options: Any) -> Any:
    """BAdam's BlockOptimizer with a complete state_dict; arguments as for BlockOptimizer. `groups` splits named
    parameters by their weight decay."""
    package: Any = importlib.import_module("badam")

    class ResumableBlockOptimizer(package.BlockOptimizer):
        """BlockOptimizer whose state_dict holds everything that the next step depends on."""

        def switch_trainable_params(self, verbose: int | None = 0) -> None:
            """Switch to the next block, without a log line for each switch."""
            self.active = self.current_block_idx
            super().switch_trainable_params(0)
            named = [(self.named_parameters_list[n][0], master) for n, master in self.param_idx2hp.items()]
            self.base_optimizer.param_groups = [{**self.defaults, **group} for group in groups(named)]

        def complete_state_dict(self) -> dict[str, Any]:
            """Moments, master weights, learning rate, and the position in the order of blocks."""
            return {
                "base": self.base_optimizer.state_dict(),
                "masters": list(self.param_idx2hp.values()),
                "rate": self.param_groups[0]["lr"],
                "step": self.global_step,
                "active": self.active,
                "next": self.current_block_idx,
                "order": list(getattr(self, "block_order", [])),
            }

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            """Continue with the block that was active."""
            self.current_block_idx = state_dict["active"]
            self.block_order = [0, *state_dict["order"]]  # the switch removes the first entry
            self.switch_trainable_params()
            try:
                self.base_optimizer.load_state_dict(state_dict["base"])
            except ValueError as error:
                raise TrainError(
                    "This checkpoint of BAdam is of an earlier version, which ignored train.weight_decay. Start the "
                    "run again."
                ) from error
            for master, saved in zip(self.param_idx2hp.values(), state_dict["masters"], strict=True):
                master.data.copy_(saved.data)
            self.current_block_idx, self.block_order = state_dict["next"], list(state_dict["order"])
            self.global_step = state_dict["step"]
            for group in self.param_groups:
                group["lr"] = state_dict["rate"]

    optimizer = ResumableBlockOptimizer(*arguments, **options)
    optimizer.state_dict = optimizer.complete_state_dict  # BlockOptimizer's constructor has set the base optimizer's
    return optimizer
