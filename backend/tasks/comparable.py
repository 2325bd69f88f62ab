"""Options that decide what a validation loss is: those of runs that differ in one of them cannot be compared."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from backend.config import RunSpec
from backend.rules.base import names

# Options that decide over which tokens a validation loss is averaged, or which loss it is. data.sources also has
# options of the training examples. Another model may have a different tokenizer.
DECIDE_EVAL_LOSS = {
    *(f"data.{name}" for name in (
        "source", "builtin", "files", "hub_id", "hub_config", "hub_split", "format", "messages_column", "prompt_column",
        "completion_column", "chosen_column", "rejected_column", "label_column", "text_column", "system_column",
        "system_prompt", "validation", "validation_split", "validation_files", "chat_template", "chat_template_file",
        "chat_template_kwargs", "add_special_tokens", "add_tokens", "loss_on", "max_length", "drop_duplicates",
        "on_bad_example", "sources",
    )),
    *(f"model.{name}" for name in ("source", "builtin", "path", "hub_id", "revision", "trust_remote_code")),
    *(f"preference.{name}" for name in (
        "beta", "dpo_loss_type", "label_smoothing", "sft_loss_weight", "kto_loss_type", "desirable_weight",
        "undesirable_weight", "center_rewards_coefficient",
    )),
    "train.stage",
    # LLaMA-Factory takes the mean over batches, splits validation examples off itself, and has its own templates.
    "launch.trainer", "llamafactory.template", "llamafactory.extra_args",
}  # fmt: skip
# Options that decide which examples are in a validation split: with data.streaming a hash, else a random order.
DECIDE_SPLIT = {"train.seed", "data.streaming"}


TRAINING_EXAMPLES = {f"data.{name}" for name in ("files", "hub_id", "hub_config", "hub_split")}


def decisive(spec: RunSpec | None, patches: Collection[Mapping[str, Any]]) -> list[str]:
    """The options in which these changes of `spec` differ and that decide what the validation loss is, also as options
    of one of several datasets."""
    deciding = DECIDE_EVAL_LOSS
    if spec and spec.eval.strategy == "no":
        return []
    # Dropped duplicates of training examples are missing in the validation files.
    if spec and not spec.data.drop_duplicates and all(each.validation == "files" for each in spec.data.datasets):
        deciding = DECIDE_EVAL_LOSS - TRAINING_EXAMPLES
    found = dict.fromkeys(name for patch in patches for name in patch)
    known = (name for name in found if re.sub(r"\bsources\[\d+\]\.", "", name) in deciding)
    return [name for name in known if len({str(patch.get(name)) for patch in patches}) > 1]


def not_comparable(options: list[str]) -> str:
    """What that means for the runs of a sweep, as sentences."""
    verb = "decides" if len(options) == 1 else "decide"
    return (
        f"{names(options)} {verb} what the validation loss is, so the validation losses of these runs cannot be "
        "compared. Rank the runs by a score of generations or of evaluations."
    )
