"""What each stage is done with: TRL's trainer and its configuration, and the model that it is held to.

Beside the floors. Imports catalog, spec, lora, universal. Rows come to every trainer as tokens (data, pairs), so what
a trainer does to rows is left out.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backend import registry
from backend.config import RunSpec
from backend.train import device, lora, optimizers, universal_checkpoint
from backend.train.context import TrainContext


@dataclass(frozen=True)
class Kind:
    """Where TRL keeps a stage's configuration and trainer: importing the others would cost time."""

    module: str
    config: str
    trainer: str


SFT = Kind("trl.trainer.sft", "SFTConfig", "SFTTrainer")
KINDS: Mapping[str, Kind] = {
    "sft": SFT,
    "pretraining": SFT,
    "dpo": Kind("trl.trainer.dpo", "DPOConfig", "DPOTrainer"),
    "kto": Kind("trl.trainer.kto", "KTOConfig", "KTOTrainer"),
    "orpo": Kind("trl.experimental.orpo.orpo", "ORPOConfig", "ORPOTrainer"),
    "reward": Kind("trl.trainer.reward", "RewardConfig", "RewardTrainer"),
}


class Own(optimizers.Optimizing):
    """What is the same in all: LoRA+, and no model card beside every checkpoint."""

    lora_plus = 1.0
    work: TrainContext

    def create_optimizer(self: Any, model: Any = None) -> Any:
        """The optimizer, with faster B matrices where they are asked for."""
        fresh = self.optimizer is None
        made = super().create_optimizer(model)
        if fresh and self.lora_plus != 1:
            lora.hurry(made, self.model if model is None else model, self.lora_plus)
        return made

    def _load_best_model(self) -> None:
        with universal_checkpoint.best(self.work, self):
            super()._load_best_model()

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """Nothing."""

    def _build_accelerator_args(self: Any, **more: Any) -> dict[str, Any]:
        """The Trainer has no word for fp8; its accelerator has."""
        found: dict[str, Any] = super()._build_accelerator_args(**more)  # type: ignore[misc]
        if self.args.mixed_precision == "fp8":
            found["kwargs_handlers"].append(device.fp8_recipe(self.args._fp8))
        return found


class Prepared(Own):
    """Of a trainer that would tokenize."""

    def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
        return dataset

    def _set_signature_columns_if_needed(self: Any) -> None:
        super()._set_signature_columns_if_needed()  # type: ignore[misc]
        if "length" not in self._signature_columns:
            self._signature_columns.append("length")  # what grouping by length looks at


class Counting(Own):
    """ORPO's trainer counts no tokens."""

    counted = 0

    def compute_loss(self: Any, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
        """As before, and counted."""
        if self.model.training:
            mine = inputs["chosen_attention_mask"].sum() + inputs["rejected_attention_mask"].sum()
            self.counted += int(self.accelerator.gather(mine).sum())
        return super().compute_loss(model, inputs, *more, **named)  # type: ignore[misc]

    def log(self: Any, logs: dict[str, float], *more: Any, **named: Any) -> None:
        """As before, with the count."""
        if "loss" in logs:
            logs["num_tokens"] = self.counted
        super().log(logs, *more, **named)  # type: ignore[misc]


OWN: Mapping[str, type] = {"sft": Own, "pretraining": Own, "orpo": Counting}


def config(spec: RunSpec) -> Any:
    """The class of the trainer's arguments."""
    kind = KINDS[spec.train.stage]
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # the stage's own help says what is experimental
    return getattr(importlib.import_module(f"{kind.module}_config"), kind.config)


def trainer(stage: str) -> Any:
    """The class of the trainer."""
    kind = KINDS[stage]
    theirs = getattr(importlib.import_module(f"{kind.module}_trainer"), kind.trainer)
    return type("Trainer", (OWN.get(stage, Prepared), theirs), {})


def arguments(spec: RunSpec) -> dict[str, Any]:
    """The arguments that a stage has for itself."""
    if spec.train.stage in registry.NEXT_TOKEN_STAGES:
        return _plain(spec)
    asked = spec.preference
    if spec.train.stage == "reward":
        return {"max_length": None, "center_rewards_coefficient": asked.center_rewards_coefficient or None}
    if spec.train.stage == "orpo":
        return {"max_length": spec.data.max_length, "beta": asked.beta, "remove_unused_columns": False}
    held = {"max_length": None, "beta": asked.beta, "precompute_ref_log_probs": asked.precompute_ref_log_probs}
    os.environ.setdefault("TQDM_DISABLE", "1")  # a bar is a hundred lines in a log
    if spec.train.stage == "kto":
        ordered = asked.kto_loss_type == "kto"  # its KL comes from neighbours
        return {
            **held,
            "loss_type": asked.kto_loss_type,
            "desirable_weight": asked.desirable_weight,
            "undesirable_weight": asked.undesirable_weight,
            "train_sampling_strategy": "sequential" if ordered else "random",
        }
    both = asked.sft_loss_weight > 0
    return {
        **held,
        "loss_type": [asked.dpo_loss_type, "sft"] if both else [asked.dpo_loss_type],
        "loss_weights": [1.0, asked.sft_loss_weight] if both else None,
        "label_smoothing": asked.label_smoothing,
    }


def untaught() -> Any:
    """A context for loading a model without the head that the stage adds: no report that it has learned nothing yet."""
    return importlib.import_module("trl.trainer.reward_trainer").suppress_seqcls_warning()


def _plain(spec: RunSpec) -> dict[str, Any]:
    packing = spec.data.packing
    return {
        # Rows come as tokens with labels, already cut.
        "max_length": spec.data.max_length if packing else None,
        "packing": packing,
        "packing_strategy": "bfd",  # whole examples, each with its own positions: they do not see each other
        "eval_packing": False,
        "dataset_kwargs": None if packing else {"skip_prepare_dataset": True},
    }


def given(stage: str, reference: Any, *tables: Any) -> dict[str, Any]:
    """More for the constructor of a stage's trainer."""
    for table in tables:
        if stage == "orpo" and table is not None:
            _keep(table)
    return {"ref_model": reference} if reference is not None else {}


def _keep(table: Any) -> None:
    """ORPO's constructor would write and tokenize the rows, in three passes that nothing switches off."""
    table.map = lambda *_, **__: table
