"""TRL's trainer and config class for each stage, and what all trainers have in common.

Every trainer gets tokenized examples (data, preference_data), so its own preparation is skipped.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Sampler
from transformers import PreTrainedModel
from transformers.trainer_callback import ExportableState
from transformers.trainer_pt_utils import LengthGroupedSampler, nested_gather

from backend import registry
from backend.config import RunSpec
from backend.runs import resume_point
from backend.train import (
    callbacks,
    device,
    disk_space,
    end_tokens,
    lora,
    optimizers,
    resumed_position,
    streaming,
    universal_checkpoint,
    unsharded,
)
from backend.train.best_checkpoint import note_best, note_start
from backend.train.checkpoint_weights import CheckpointWeightsMixin
from backend.train.context import TrainContext
from backend.train.divergence import DivergenceCallback
from backend.train.eval_loss import EvalLossMixin, EvalPartsMixin, KtoEvalMixin, metrics_of
from backend.train.loss_weights import LossWeightsMixin
from backend.train.monitor import Monitor
from backend.train.patches import transformers_use_cache, trl_orpo_dataset, trl_totals_of_ranks
from backend.train.skipped_steps import SkippedSteps
from backend.wording import counted


@dataclass(frozen=True)
class TrlClasses:
    """Where TRL has a stage's config and trainer; only those of the run's stage are imported."""

    module: str
    config: str
    trainer: str


SFT = TrlClasses("trl.trainer.sft", "SFTConfig", "SFTTrainer")
TRL: Mapping[str, TrlClasses] = {
    "sft": SFT,
    "pretraining": SFT,
    "dpo": TrlClasses("trl.trainer.dpo", "DPOConfig", "DPOTrainer"),
    "kto": TrlClasses("trl.trainer.kto", "KTOConfig", "KTOTrainer"),
    "orpo": TrlClasses("trl.experimental.orpo.orpo", "ORPOConfig", "ORPOTrainer"),
    "reward": TrlClasses("trl.trainer.reward", "RewardConfig", "RewardTrainer"),
}


# In trainer_state.json: the sums of the losses and metrics since the last logged step, this step, and the tokens and
# seconds of all starts until the checkpoint.
UNLOGGED = "unlogged"


@dataclass(eq=False)
class SeededSampler(Sampler[int]):
    """A sampler whose order depends on the seed and the epoch only. The order of transformers' LengthGroupedSampler
    depends on the global random state, which differs after a resume, and between ranks that have drawn different
    dropout."""

    sampler: LengthGroupedSampler
    seed: int
    epoch: Callable[[], int]

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        self.sampler.generator = torch.Generator().manual_seed(self.seed + self.epoch())
        return iter(self.sampler)


class TrainerMixin(EvalPartsMixin, optimizers.OptimizerMixin, CheckpointWeightsMixin):
    """Mixin for every trainer: LoRA+, fp8, complete checkpoints, the run's own intervals after a resume, no step after
    the last one, no model cards."""

    loraplus_lr_ratio = 1.0
    context: TrainContext
    divergence: DivergenceCallback | None = None
    monitor: Monitor | None = None
    skipped: SkippedSteps | None = None
    progress: callbacks.ProgressCallback | None = None
    unlogged: dict[str, Any] | None = None
    start: Path | None = None  # the checkpoint that the run resumes from
    position: resumed_position.Position | None = None  # where the epochs continue, unless `start`'s steps say that
    owed: bool = False  # whether the model of `start` is evaluated first

    def create_optimizer(self: Any, model: Any = None) -> Any:
        """The optimizer, with LoRA+'s learning rates."""
        new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if new and self.loraplus_lr_ratio != 1:
            lora.set_loraplus_lr(optimizer, self.model if model is None else model, self.loraplus_lr_ratio)
        return optimizer

    def _prepare_inputs(self: Any, inputs: Mapping[str, Any]) -> Any:
        """The inputs on the device. With DeepSpeed, transformers 5.23 would round their numbers to 16 bits: weights of
        tokens, and precomputed log-probabilities, whose differences are much smaller than they are."""
        prepared = super()._prepare_inputs(inputs)  # type: ignore[misc]
        floats = {name: each for name, each in inputs.items() if torch.is_tensor(each) and each.is_floating_point()}
        prepared.update({name: each.to(self.args.device) for name, each in floats.items()})
        return prepared

    def training_step(self: Any, *args: Any, **more: Any) -> Any:
        """Take note of a loss that is NaN or infinite."""
        with trl_totals_of_ranks.kept(self.accelerator):
            loss = super().training_step(*args, **more)  # type: ignore[misc]
        if self.divergence is not None:
            self.divergence.add(loss)
        return loss

    def log(self: Any, logs: dict[str, float], *more: Any, **named: Any) -> None:
        """Add the skipped optimizer steps to the logs of training. An optimizer that steps in the backward pass leaves
        no gradients whose norm could be known; the Trainer logs 0."""
        if registry.OPTIMIZERS[self.context.spec.train.optim].steps_in_backward:
            logs.pop("grad_norm", None)
        if self.skipped is not None and "loss" in logs:
            logs |= self.skipped.logged()
        super().log(logs, *more, **named)

    def _get_train_sampler(self: Any, *args: Any) -> Any:
        """The order of the examples; grouped by length, it follows from the seed and the epoch."""
        sampler = super()._get_train_sampler(*args)  # type: ignore[misc]
        if not isinstance(sampler, LengthGroupedSampler):
            return sampler
        return SeededSampler(sampler, self.args.seed, lambda: int((self.state.epoch or 0) + 1e-6))

    def get_batch_samples(self: Any, epoch_iterator: Any, *args: Any, **more: Any) -> Any:
        """Measure the time that this rank waits for batches."""
        batches = self.monitor.fetch(epoch_iterator) if self.monitor is not None else epoch_iterator
        return super().get_batch_samples(batches, *args, **more)  # type: ignore[misc]

    def set_initial_training_values(self: Any, args: Any, *more: Any) -> Any:
        """The numbers of epochs and steps, also for a run that resumes with another global batch size."""
        num_epochs, per_epoch, *others, batches, max_steps = super().set_initial_training_values(args, *more)  # type: ignore[misc]
        self.position = None
        if self.start and not args.ignore_data_skip:
            step, epoch = resume_point.position(self.start)
            sizes = (per_epoch, batches, args.gradient_accumulation_steps, max_steps)
            self.position = resumed_position.find(step, epoch, *sizes, by_epochs=args.max_steps <= 0)
            if self.position:
                num_epochs, max_steps = self.position.num_epochs, self.position.max_steps
                self.context.run_log.info(
                    f"An epoch now has {counted(per_epoch, 'step')}. Training continues at epoch {epoch:.4g}, and "
                    f"ends after step {max_steps}."
                )
        return num_epochs, per_epoch, *others, batches, max_steps

    def _init_training_state(self: Any, max_steps: int, *args: Any, **more: Any) -> Any:
        """transformers 5.23 restores the logging, eval and save intervals of the checkpoint; use those of this run.
        And it saves a checkpoint only if the one before has a state of the same callbacks, which an earlier version, or
        a run without early stopping, has not written."""
        trained = super()._init_training_state(max_steps, *args, **more)  # type: ignore[misc]
        self.state.compute_steps(self.args, max_steps)
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, ExportableState):
                self.state.stateful_callbacks.setdefault(type(callback).__name__, callback.state())
        self.unlogged = self.state.stateful_callbacks.pop(UNLOGGED, None)
        if self.progress is not None:
            totals = self.unlogged or {}  # in an earlier version, only the losses
            self.progress.resume(self.state, totals.get("tokens", 0), totals.get("seconds", 0.0))
        if self.position and not self.position.batches:
            self.state.epoch = float(self.position.epochs)
        epochs, batches = (self.position.epochs, self.position.batches) if self.position else trained
        self.owed = resumed_position.owes_evaluation(self.args, self.state, ended_epoch=epochs > 0 and not batches)
        return epochs, batches

    def _run_epoch(self: Any, **more: Any) -> None:
        """transformers 5.23 checks for the last step only after a step, so a run resumed there would train another
        step. And neither it nor TRL saves the losses and metrics since the last point, so the next point would be the
        mean of fewer steps."""
        if self.unlogged:
            self._tr_loss += _loss_of_rank(self.unlogged["loss"], self.args.process_index, self.args.world_size)
            self._globalstep_last_logged = self.unlogged["since"]
            _add_sums(self, self.unlogged.get("metrics", {}))  # an earlier version has saved none
            self.unlogged = None
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        if self.owed:
            self.owed, self.control.should_evaluate = False, True
            given = (more[name] for name in ("model", "trial", "epoch", "ignore_keys_for_eval", "start_time"))
            self._maybe_log_save_evaluate(self._tr_loss, None, *given)
            note_start(self.state, self.args, self.start)
        if not self.control.should_training_stop:  # by early stopping
            super()._run_epoch(**more)  # type: ignore[misc]

    def _maybe_log_save_evaluate(self: Any, *args: Any, **more: Any) -> None:
        """transformers 5.23 logs before it evaluates, so the last steps before early stopping would have no point. They
        get it before their checkpoint is saved. It has metrics of training: TRL asks the model, which has evaluated."""
        done = super()._maybe_log_save_evaluate  # type: ignore[misc]
        if not self.control.should_evaluate or self.control.should_training_stop:
            return done(*args, **more)  # type: ignore[no-any-return]
        saves, self.control.should_save = self.control.should_save, False
        done(*args, **more)
        self.control.should_save, self.control.should_log = saves, self.control.should_training_stop
        trains = self.model.training
        self.model.train(trains or self.control.should_log)
        done(*args, **more)
        self.model.train(trains)

    def _save_checkpoint(self: Any, *args: Any) -> None:
        callbacks.show_checkpoint(self.context.run_log, self.state)
        note_best(self.state)
        losses = nested_gather(self._tr_loss, self.args.parallel_mode).flatten().tolist()  # of each rank
        totals = self.progress.totals(self._total_train_tokens) if self.progress is not None else {}
        sums = {"loss": losses, "metrics": _sums(self), "since": self._globalstep_last_logged}
        self.state.stateful_callbacks[UNLOGGED] = {**sums, **totals}
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        save = partial(super()._save_checkpoint, *args)

        def save_into_folder() -> None:
            # transformers 5.23 looks for the best checkpoint before sharded FSDP weights are written. Ranks that find
            # no folder would not load the best model at the end, and the others would wait for them.
            folder.mkdir(parents=True, exist_ok=True)
            save()

        disk_space.save_checkpoint(self.context, folder, save_into_folder)

    def _save(self: Any, output_dir: str | None = None, state_dict: Any = None) -> None:
        """The weights of a checkpoint, and the generation config of an adapter's model."""
        with transformers_use_cache.restored(self.model.config, self.context.use_cache):
            super()._save(output_dir, state_dict)  # type: ignore[misc]
        end_tokens.save(self.accelerator.unwrap_model(self.model), Path(output_dir or self.args.output_dir))

    def evaluate(self: Any, *args: Any, **more: Any) -> Any:
        """Show the evaluation from its start: ProgressCallback is called after its first batch.

        torch's DataLoader draws a random number for each evaluation. Training continues as if no number had been drawn:
        how often a run is evaluated does not change its training, and a resumed run may evaluate first.
        """
        callbacks.show_evaluation(self.context.run_log, self.state)
        with torch.random.fork_rng(devices=[]):
            found = super().evaluate(*args, **more)  # type: ignore[misc]
        unsharded.reshard(self.model)
        return found

    def _load_best_model(self) -> None:
        with universal_checkpoint.best_model(self.context, self):
            super()._load_best_model()

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    def _build_accelerator_args(self: Any, **more: Any) -> dict[str, Any]:
        """The Trainer has no option for fp8, but its accelerator has."""
        arguments: dict[str, Any] = super()._build_accelerator_args(**more)  # type: ignore[misc]
        if self.args.mixed_precision == "fp8":
            arguments["kwargs_handlers"].append(device.fp8_recipe(self.args._fp8))
        return arguments


def _loss_of_rank(losses: list[float] | float, rank: int, ranks: int) -> float:
    """The sum of losses with which a rank continues: its own, so that the next point is rounded as without a stop. If
    the number of ranks has changed, the mean; an earlier version has saved only that."""
    each = losses if isinstance(losses, list) else [losses]
    return each[rank] if len(each) == ranks else sum(each) / len(each)


def _sums(trainer: Any) -> dict[str, tuple[float, int]]:
    """The sum and the number of the values of each metric since the last logged step."""
    return {name: (sum(values), len(values)) for name, values in metrics_of(trainer, "train").items() if values}


def _add_sums(trainer: Any, sums: Mapping[str, tuple[float, int]]) -> None:
    """Count the values of which `_sums` was made: the next point is the mean of them and of those that follow."""
    for name, (total, count) in sums.items():
        metrics_of(trainer, "train")[name][:0] = [total, *[0.0] * (count - 1)]


class PretokenizedMixin(TrainerMixin):
    """Mixin for trainers that would tokenize the examples again."""

    def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
        return dataset

    def _set_signature_columns_if_needed(self: Any) -> None:
        super()._set_signature_columns_if_needed()  # type: ignore[misc]
        if "length" not in self._signature_columns:
            self._signature_columns.append("length")  # read by train_sampling_strategy group_by_length


class TokenCountMixin(TrainerMixin):
    """Mixin for ORPO's trainer, which does not log num_tokens, and computes its loss of the logits as they are."""

    _total_train_tokens = 0  # named as in TRL's other trainers

    def compute_loss(self: Any, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
        """Count the tokens of training batches."""
        if self.model.training:
            local = inputs["chosen_attention_mask"].sum() + inputs["rejected_attention_mask"].sum()
            # The ranks of a tensor parallel group have the same batch.
            same = self.context.run.tensor_parallel_size
            self._total_train_tokens += int(self.accelerator.gather(local).sum()) // same
        return super().compute_loss(model, inputs, *more, **named)  # type: ignore[misc]

    def concatenated_forward(self: Any, model: Any, batch: Any) -> Any:
        """The loss of logits in fp32."""
        return super().concatenated_forward(partial(_with_fp32_logits, model), batch)  # type: ignore[misc]

    def log(self: Any, logs: dict[str, float], *more: Any, **named: Any) -> None:
        """Log the count, as TRL's other trainers do."""
        if "loss" in logs or "eval_loss" in logs:
            logs["num_tokens" if "loss" in logs else "eval_num_tokens"] = self._total_train_tokens
        super().log(logs, *more, **named)


class KtoMixin(KtoEvalMixin, PretokenizedMixin):
    """Mixin for KTO's trainer."""


class RewardMixin(PretokenizedMixin):
    """Mixin for the trainer of reward models."""

    def compute_loss(self: Any, model: Any, *args: Any, **named: Any) -> Any:
        """The loss of rewards in fp32."""
        return super().compute_loss(partial(_with_fp32_logits, model), *args, **named)  # type: ignore[misc]


def _with_fp32_logits(model: Any, *args: Any, margin: Any = None, **named: Any) -> Any:
    """The outputs of a forward pass. Without autocast, as with DeepSpeed and pure bf16, the logits have 16 bits: TRL
    1.16's ORPO and reward trainers would round losses and rewards to two or three digits. `margin`, which TRL passes to
    the model too, is only for the loss."""
    outputs = model(*args, **named)
    outputs.logits = outputs.logits.float()
    return outputs


class NextTokenMixin(streaming.StreamMixin, LossWeightsMixin, EvalLossMixin, TrainerMixin):
    """Mixin for the trainer of SFT and pretraining."""


MIXINS: Mapping[str, type] = {
    "sft": NextTokenMixin,
    "pretraining": NextTokenMixin,
    "kto": KtoMixin,
    "orpo": TokenCountMixin,
    "reward": RewardMixin,
}


def config_class(spec: RunSpec) -> Any:
    """The class of the TrainingArguments."""
    classes = TRL[spec.train.stage]
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # the help of the stage says that it is experimental
    return getattr(importlib.import_module(f"{classes.module}_config"), classes.config)


def trainer_class(stage: str) -> Any:
    """The class of the trainer."""
    classes = TRL[stage]
    trl_class = getattr(importlib.import_module(f"{classes.module}_trainer"), classes.trainer)
    return type("Trainer", (MIXINS.get(stage, PretokenizedMixin), trl_class), {})


def stage_arguments(spec: RunSpec) -> dict[str, Any]:
    """The TrainingArguments that belong to the stage."""
    if spec.train.stage in registry.NEXT_TOKEN_STAGES:
        return _next_token_arguments(spec)
    preference = spec.preference
    if spec.train.stage == "reward":
        return {"max_length": None, "center_rewards_coefficient": preference.center_rewards_coefficient or None}
    if spec.train.stage == "orpo":
        return {"max_length": spec.data.max_length, "beta": preference.beta, "remove_unused_columns": False}
    found = {
        "max_length": None,
        "beta": preference.beta,
        "precompute_ref_log_probs": preference.precompute_ref_log_probs,
    }
    os.environ.setdefault("TQDM_DISABLE", "1")  # a progress bar is a hundred lines in a log
    if spec.train.stage == "kto":
        ordered = preference.kto_loss_type == "kto"  # its KL estimate needs neighbors in the same batch
        return {
            **found,
            # A prompt with the completion of its neighbor, of which the KL estimate is made, may be longer than both
            # examples.
            "max_length": spec.data.max_length,
            "loss_type": preference.kto_loss_type,
            "desirable_weight": preference.desirable_weight,
            "undesirable_weight": preference.undesirable_weight,
            "train_sampling_strategy": "sequential" if ordered else "random",
        }
    with_sft = preference.sft_loss_weight > 0
    return {
        **found,
        "loss_type": [preference.dpo_loss_type, "sft"] if with_sft else [preference.dpo_loss_type],
        "loss_weights": [1.0, preference.sft_loss_weight] if with_sft else None,
        "label_smoothing": preference.label_smoothing,
    }


@contextmanager
def without_new_head_warning() -> Iterator[None]:
    """For loading a model whose head the stage adds: transformers does not report that the new head has random weights
    and that the head of the language model is not used. TRL 1.16 does this only for the classes that inherit from
    GenericForSequenceClassification, which those of GPT-2, Bloom, Falcon, MPT and OPT do not."""
    adjust = PreTrainedModel._adjust_missing_and_unexpected_keys

    def without_heads(model: Any, loaded: Any) -> None:
        adjust(model, loaded)
        base = f"{model.base_model_prefix}."
        loaded.missing_keys = {name for name in loaded.missing_keys if name.startswith(base)}
        unexpected = (name for name in loaded.unexpected_keys if name.startswith(base) or name.count(".") > 1)
        loaded.unexpected_keys = set(unexpected)

    PreTrainedModel._adjust_missing_and_unexpected_keys = without_heads
    try:
        yield
    finally:
        PreTrainedModel._adjust_missing_and_unexpected_keys = adjust


def _next_token_arguments(spec: RunSpec) -> dict[str, Any]:
    packing = spec.data.packing
    return {
        # The examples are tokenized with labels, and truncated.
        "max_length": spec.data.max_length if packing else None,
        "packing": packing,
        "packing_strategy": streaming.PACKING,
        "eval_packing": False,
        "dataset_kwargs": None if packing else {"skip_prepare_dataset": True},
    }


def constructor_arguments(stage: str, reference: Any, *datasets: Any) -> dict[str, Any]:
    """More arguments of the trainer's constructor."""
    for dataset in datasets:
        if stage == "orpo" and dataset is not None:
            trl_orpo_dataset.apply(dataset)
    return {"ref_model": reference} if reference is not None else {}
