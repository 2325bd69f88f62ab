"""ZeRO-3 restores parameter groups and step counts of a universal checkpoint wrongly.

runtime/zero/stage3.py, `load_hp_checkpoint_state_from_checkpoint_dir_stage3`: all groups get the weight decay and the
other options of the first group, and all shards share one tensor that counts the steps. Without the patch norms and
biases decay after a resume with a different number of processes, and each shard's step raises the count of all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

LIBRARY, SEEN_IN = "deepspeed", "0.19.8"


def apply(optimizer: Any, folder: Path) -> None:
    """Give the innermost `optimizer` the groups that the universal checkpoint in `folder` has, and each shard its own
    step count."""
    (path,) = folder.glob("global_step*/zero/optimizer_state.pt")
    saved = torch.load(path, map_location="cpu", weights_only=False)["optimizer_state_dict"]["param_groups"]
    for group, own in zip(optimizer.param_groups, saved, strict=True):
        group.update({key: value for key, value in own.items() if key != "params"})
    for state in optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()
