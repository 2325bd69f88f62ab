"""RunSpec -> TrainingArguments and trainer.

TRL's trainers get tokenized examples, so that labels are decided in one place (data, preference_data, templates).
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from transformers import PrinterCallback

from backend import registry
from backend.config import RunSpec
from backend.runs import CHECKPOINTS
from backend.train import (
    device,
    eval_loss,
    kernels,
    loss_weights,
    optimizers,
    rehearsal,
    streaming,
    trl_trainers,
    unsloth,
)
from backend.train.data import PreparedData
from backend.train.engines import TrainEngine
from backend.train.patches import (
    accelerate_absent_layers,
    torch_inductor_sums,
    trl_adapter_dtype,
    trl_expert_count,
    trl_frozen_blocks,
    trl_functional_dropout,
    trl_logit_scaling,
    trl_loss_positions,
    trl_missing_router,
    trl_router_logits,
    trl_token_mean,
    ulysses_token_mean,
)


def training_arguments(engine: TrainEngine, run: Path) -> Any:
    """The TrainingArguments; creating them also starts the process group of several ranks. Raises TrainError."""
    spec = engine.spec
    precision, kind = engine.run.compute_dtype, registry.PRECISIONS[spec.precision.compute]
    if spec.logging.report_to == "tensorboard":
        os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(run / "tensorboard"))
    fp8 = spec.precision.compute == "fp8"
    requested = dict(
        output_dir=str(run / CHECKPOINTS),
        use_cpu=engine.run.device == "cpu",
        bf16=precision == "bf16" and kind.fp32_master_weights and not fp8,
        fp16=precision == "fp16",
        tf32=True if spec.precision.compute == "tf32" else None,
        disable_tqdm=True,
        **{**_training(spec), **trl_trainers.stage_arguments(spec), **rehearsal.trainer_arguments()},
        neftune_noise_alpha=_noise_alpha(engine),
        **optimizers.arguments(spec),
        **_eval_save_logging(spec),
        **engine.trainer_arguments(run),
    )
    config = trl_trainers.config_class(spec)(**requested)
    unsloth.check_arguments(spec, requested, config)
    engine.start(config)
    if fp8:
        config.mixed_precision, config._fp8 = "fp8", spec.precision.fp8_backend
    if config.device.type != "cpu":
        config._n_gpu = (
            1  # one process uses one device, however many are visible; otherwise the Trainer uses DataParallel
        )
    return config


def _training(spec: RunSpec) -> dict[str, Any]:
    train = spec.train
    return {
        "num_train_epochs": train.num_train_epochs,
        "max_steps": train.max_steps if train.duration == "steps" else -1,
        "per_device_train_batch_size": train.per_device_train_batch_size,
        "gradient_accumulation_steps": train.gradient_accumulation_steps,
        "learning_rate": train.learning_rate,
        "warmup_steps": train.warmup_steps if train.warmup_steps < 1 else int(train.warmup_steps),
        "train_sampling_strategy": train.train_sampling_strategy,
        "activation_checkpointing": train.activation_checkpointing,
        "gradient_checkpointing": train.activation_checkpointing,  # TRL 1.16 reads the old name
        "torch_compile": train.torch_compile,
        # New workers for each epoch: persistent ones draw a random number only in the first epoch and after a resume.
        "dataloader_num_workers": train.dataloader_num_workers,
        "ignore_data_skip": streaming.is_streamed(spec),  # a stream itself continues after the last place
        "seed": train.seed,
        "data_seed": train.seed,
    }


def _noise_alpha(engine: TrainEngine) -> float | None:
    """train.neftune_noise_alpha; None without noise. transformers 5.23 (integrations/neftune.py) divides it by the root
    of the length that it sees, which is that of a rank's part where ranks share the tokens of a sequence."""
    return engine.spec.train.neftune_noise_alpha / math.sqrt(engine.run.token_shards) or None


def stops_early(spec: RunSpec) -> bool:
    """Whether training ends when the eval loss no longer improves."""
    return spec.eval.strategy != "no" and spec.eval.early_stopping_patience > 0


def _eval_save_logging(spec: RunSpec) -> dict[str, Any]:
    """The TrainingArguments of evaluation, checkpoints and logging."""
    logging = spec.logging
    compares_evaluations = spec.save.load_best_model_at_end or stops_early(spec)
    return {
        "eval_strategy": spec.eval.strategy,
        "eval_steps": spec.eval.steps,
        "per_device_eval_batch_size": spec.eval.per_device_eval_batch_size,
        "prediction_loss_only": True,
        "save_strategy": spec.save.strategy,
        "save_steps": spec.save.steps,
        "save_total_limit": None,  # CheckpointCallback deletes old ones once a newer one is complete
        "save_only_model": spec.save.only_model,
        "load_best_model_at_end": spec.save.load_best_model_at_end,
        "metric_for_best_model": "eval_loss" if compares_evaluations else None,
        "greater_is_better": False if compares_evaluations else None,
        "logging_steps": logging.steps,
        "logging_first_step": True,
        "logging_nan_inf_filter": False,  # a loss that is NaN must be visible
        "log_level": logging.level,
        "report_to": [] if logging.report_to == "none" else [logging.report_to],
        "run_name": logging.run_name or None,
    }


def router_loss_coefficient(trainer: Any) -> float:
    """The weight with which the trainer adds the router's auxiliary loss to the training loss; 0 if not."""
    if not getattr(trainer, "aux_loss_enabled", False):
        return 0.0
    is_orpo = hasattr(trainer, "aux_loss_coef")
    return float(trainer.aux_loss_coef if is_orpo else trainer.router_aux_loss_coef)


def build_trainer(
    spec: RunSpec,
    config: Any,
    model: Any,
    tokenizer: Any,
    prepared: PreparedData,
    callbacks: list[Any],
    reference: Any = None,
) -> Any:
    """The trainer, with the model on its device; `reference` is the reference model, if the stage has one."""
    if prepared.validation is None:
        config.eval_strategy = "no"
    if config.device.type == "cpu":
        trl_loss_positions.apply()
    accelerate_absent_layers.apply(model)
    if spec.train.optim == "badam":
        trl_frozen_blocks.apply()
    next_token = spec.train.stage in registry.NEXT_TOKEN_STAGES
    trl_expert_count.apply(model)
    trl_missing_router.apply(config, model, reference)
    if reference is not None and spec.precision.compute == "fp8":
        device.to_fp8(reference, spec.precision.fp8_backend)
    with trl_adapter_dtype.kept(model), trl_router_logits.kept(model), trl_logit_scaling.named(model, reference):
        trainer = trl_trainers.trainer_class(spec.train.stage)(
            model=model,
            args=config,
            train_dataset=prepared.train,
            eval_dataset=prepared.validation,
            processing_class=tokenizer,
            callbacks=callbacks,
            **trl_trainers.constructor_arguments(spec.train.stage, reference, prepared.train, prepared.validation),
        )
    trl_functional_dropout.apply(config, trainer.model, getattr(trainer, "ref_model", None))
    if prepared.validation is not None:  # TRL has left out examples without labels and added columns
        multiple = config.per_device_eval_batch_size * config.world_size if next_token else 1
        trainer.eval_parts = eval_loss.parts(trainer.eval_dataset, prepared.validation_sizes, multiple)
        trainer.eval_dataset = eval_loss.completed(trainer.eval_dataset, multiple)
    if next_token and not spec.train.use_unsloth:
        trl_token_mean.apply(trainer)
        ulysses_token_mean.apply(trainer)
    if streaming.is_streamed(spec) or loss_weights.has_weights(prepared.train, prepared.validation):
        trainer.data_collator = loss_weights.Collator(trainer.data_collator)
    if spec.train.torch_compile:
        torch_inductor_sums.apply()
        trainer.add_callback(kernels.CompileCheckCallback(trainer))
    trainer.spec = spec
    trainer.loraplus_lr_ratio = spec.lora.loraplus_lr_ratio
    if reference is not None and spec.preference.precompute_ref_log_probs:
        trainer.ref_model = None  # its log probabilities are computed; this frees its memory
    trainer.remove_callback(PrinterCallback)  # it prints dicts; ProgressCallback writes the log lines
    return trainer
