"""A run that resumes uses its own options of the optimizer, not those that its checkpoint was trained with.

A checkpoint of an optimizer and of a learning rate schedule contains them, and loading it restores them (torch 2.13
Optimizer.load_state_dict, LambdaLR.load_state_dict). For a run that resumes its own checkpoint they are the same,
unless its spec was edited meanwhile: then the log names the difference. It also says if the data differ.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from backend.config import RunSpec
from backend.config import options as declared
from backend.runs import resume_point

# Sections whose options do not change what is trained.
NOT_TRAINED = ("eval", "kubernetes", "launch", "llamafactory", "logging", "ray", "save", "slurm")
OPTIONS = (
    "initial_lr", "weight_decay", "betas", "beta1", "beta2", "eps", "momentum", "warmup_steps", "scale",
    "update_proj_gap", "proj", "proj_type", "scale_type",
)  # fmt: skip
EXAMPLES = "examples"  # next to the options: what identifies the tokenized training examples


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
        for parameter in group["params"]:  # GaLore and APOLLO copy some of them into the state of a parameter
            state = optimizer.state.get(parameter, {})
            projector = state.get("projector") if isinstance(state, dict) else None
            for name in options.keys() & vars(projector).keys() if projector is not None else ():
                setattr(projector, name, options[name])
    peaks = [options.get("initial_lr") for options in configured]
    if isinstance(schedule, LambdaLR) and None not in peaks:
        schedule.base_lrs = peaks
        factors = [factor(schedule.last_epoch) for factor in schedule.lr_lambdas]  # those of the run's own schedule
        schedule._last_lr = [peak * factor for peak, factor in zip(peaks, factors, strict=True)]
        for group, rate in zip(groups, schedule.get_last_lr(), strict=True):
            group["lr"] = rate  # an optimizer without a state does not load its learning rate


def compared(spec: RunSpec, examples: str) -> dict[str, Any]:
    """The options that differ from their default, as JSON has them, and what identifies the training examples. Options
    that do not change what is trained are left out."""
    found = {name: value for name, value in declared.changes(spec).items() if name.split(".")[0] not in NOT_TRAINED}
    plain = {name: declared.plain(value) for name, value in found.items()}
    return {**json.loads(json.dumps(plain)), EXAMPLES: examples}


def differences(checkpoint: Path, now: Mapping[str, Any]) -> tuple[str, str]:
    """How the options and the training examples of `now`, which `compared` returned, differ from those that the
    checkpoint was trained with, each as a sentence; '' if they do not, or if the checkpoint does not record them."""
    try:
        before = resume_point.read_mark(checkpoint).get("options")
    except (OSError, ValueError, TypeError):
        before = None
    if not isinstance(before, dict):
        return "", ""
    known = {name: _default(name) for name in declared.by_name()}
    names = [name for name in known if before.get(name, known[name]) != now.get(name, known[name])]
    values = [[source.get(name, known[name]) for source in (before, now)] for name in names]
    shown = [["empty" if value in ("", [], {}) else value for value in pair] for pair in values]
    texts = [f"{name} was {was} and is now {now_}" for name, (was, now_) in zip(names, shown, strict=True)]
    options = f"The options differ from those that {checkpoint.name} was trained with: {'; '.join(texts)}."
    examples = (
        f"The tokenized training examples have changed since {checkpoint.name}. Training continues at the same "
        "position in the new ones, so this epoch may repeat some and miss others."
    )
    return options if texts else "", examples if before.get(EXAMPLES, now[EXAMPLES]) != now[EXAMPLES] else ""


def _default(name: str) -> Any:
    """The default of an option, as JSON has it."""
    return json.loads(json.dumps(declared.plain(declared.by_name()[name].default)))
