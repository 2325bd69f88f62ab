"""A run that resumes uses its own options of the optimizer, not those that its checkpoint was trained with.

A checkpoint of an optimizer and of a learning rate schedule contains them, and loading it restores them (torch 2.13
Optimizer.load_state_dict, LambdaLR.load_state_dict). For a run that resumes its own checkpoint they are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

OPTIONS = ("initial_lr", "weight_decay", "betas", "eps", "momentum")


def read(optimizer: Any) -> list[dict[str, Any]]:
    """The options of each parameter group."""
    return [{key: group[key] for key in OPTIONS if key in group} for group in optimizer.param_groups]


def apply(optimizer: Any, scheduler: Any, configured: Sequence[dict[str, Any]]) -> None:
    """Set the options that `read` returned for the same parameter groups, and the learning rate that follows."""
    groups, schedule = optimizer.param_groups, getattr(scheduler, "scheduler", scheduler)
    if len(groups) != len(configured):
        return
    for group, options in zip(groups, configured, strict=True):
        group.update(options)
    peaks = [options.get("initial_lr") for options in configured]
    if isinstance(schedule, LambdaLR) and schedule.base_lrs != peaks:
        schedule.base_lrs = peaks
        rates = [peak * factor(schedule.last_epoch) for peak, factor in zip(peaks, schedule.lr_lambdas, strict=True)]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        schedule._last_lr = rates
