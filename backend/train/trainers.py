"""RunSpec -> the Trainer: every option under the name that the library knows.

Beside the floors. Imports spec, catalog, run, stages, data, journal. TRL's trainers do the work; rows
come to them as tokens, so that what is learned is decided in one place (data, pairs, templates).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import trl.trainer.utils
from transformers import PrinterCallback

from backend import registry
from backend.config import RunSpec
from backend.runs import CHECKPOINTS
from backend.train import kernels, optimizers, quantized, trl_trainers, unsloth
from backend.train.data import PreparedData
from backend.train.engines import TrainEngine
from backend.train.run_log import TrainError

BALANCE = "output_router_logits"
FLOOR = {"cosine_with_min_lr": {"min_lr_rate": 0.1}}


def arguments(engine: TrainEngine, run: Path) -> Any:
    """The Trainer's arguments; making them also starts the process group of several ranks. Raises TrainError."""
    spec, family = engine.spec, engine.run.device
    _check(spec)
    quantized.check(spec)
    optimizers.check(spec, family)
    precision, kind = engine.run.compute_dtype, registry.PRECISIONS[spec.precision.compute]
    kernels.check(spec, family, precision)
    if spec.logging.report_to == "tensorboard":
        os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(run / "tensorboard"))
    fp8 = spec.precision.compute == "fp8"
    asked = dict(
        output_dir=str(run / CHECKPOINTS),
        use_cpu=family == "cpu",
        bf16=precision == "bf16" and kind.fp32_master_weights and not fp8,
        fp16=precision == "fp16",
        tf32=True if spec.precision.compute == "tf32" else None,
        disable_tqdm=True,
        **{**_training(spec), **trl_trainers.arguments(spec)},
        **optimizers.arguments(spec),
        **_keeping(spec),
        **engine.trainer_arguments(run),
    )
    config = trl_trainers.config(spec)(**asked)
    unsloth.check(spec, asked, config)
    engine.start(config)
    if fp8:
        config.mixed_precision, config._fp8 = "fp8", spec.precision.fp8_backend
    if config.device.type != "cpu":
        config._n_gpu = 1  # one process drives one device, however many it sees
    return config


def _training(spec: RunSpec) -> dict[str, Any]:
    train = spec.train
    return {
        "num_train_epochs": train.num_train_epochs,
        "max_steps": train.max_steps if train.duration == "steps" else -1,
        "per_device_train_batch_size": train.per_device_train_batch_size,
        "gradient_accumulation_steps": train.gradient_accumulation_steps,
        "learning_rate": train.learning_rate,
        "lr_scheduler_kwargs": FLOOR.get(train.lr_scheduler_type),
        "warmup_steps": train.warmup_steps if train.warmup_steps < 1 else int(train.warmup_steps),
        "neftune_noise_alpha": train.neftune_noise_alpha or None,
        "train_sampling_strategy": train.train_sampling_strategy,
        "activation_checkpointing": train.activation_checkpointing,
        "gradient_checkpointing": train.activation_checkpointing,  # TRL reads, and switches on, the old name
        "torch_compile": train.torch_compile,
        "dataloader_num_workers": train.dataloader_num_workers,
        "dataloader_persistent_workers": train.dataloader_num_workers > 0,
        "seed": train.seed,
        "data_seed": train.seed,
    }


def _keeping(spec: RunSpec) -> dict[str, Any]:
    """Evaluation, checkpoints and logging."""
    logging = spec.logging
    return {
        "eval_strategy": spec.eval.strategy,
        "eval_steps": spec.eval.steps,
        "per_device_eval_batch_size": spec.eval.per_device_eval_batch_size,
        "prediction_loss_only": True,
        "save_strategy": spec.save.strategy,
        "save_steps": spec.save.steps,
        "save_total_limit": None,  # Keeper deletes: only once the newer one is complete
        "save_only_model": spec.save.only_model,
        "load_best_model_at_end": spec.save.load_best_model_at_end,
        "metric_for_best_model": "eval_loss" if spec.save.load_best_model_at_end else None,
        "greater_is_better": False if spec.save.load_best_model_at_end else None,
        "logging_steps": logging.steps,
        "logging_first_step": True,
        "logging_nan_inf_filter": False,  # a loss that is no number must be seen
        "log_level": logging.level,
        "report_to": [] if logging.report_to == "none" else [logging.report_to],
        "run_name": logging.run_name or None,
    }


def _check(spec: RunSpec) -> None:
    """Raise TrainError for what the library would refuse in words of its own."""
    if spec.save.load_best_model_at_end and (
        spec.save.strategy != spec.eval.strategy
        or (spec.save.strategy == "steps" and spec.save.steps % spec.eval.steps)
    ):
        raise TrainError(
            "save.load_best_model_at_end compares checkpoints by their validation loss: save at steps that are also evaluated "
            "(the same choice of when, and save.steps a multiple of eval.steps)."
        )
    _check_preference(spec)
    tracker = registry.REPORTERS[spec.logging.report_to]
    if tracker.package and importlib.util.find_spec(tracker.package) is None:
        raise TrainError(f"logging.report_to: {tracker.label} is not installed: pip install {tracker.package}")


def _check_preference(spec: RunSpec) -> None:
    asked, stage = spec.preference, spec.train.stage
    if stage == "kto" and asked.kto_loss_type == "kto" and spec.train.per_device_train_batch_size == 1:
        raise TrainError(
            "train.per_device_train_batch_size: KTO compares the rows of a batch, so it must be 2 or more."
        )
    if stage == "dpo" and asked.dpo_loss_type == "exo_pair" and not asked.label_smoothing:
        raise TrainError("preference.label_smoothing must be above 0 for the EXO loss; 0.001 is usual.")
    if (
        registry.STAGES[stage].uses_reference_model
        and asked.precompute_ref_log_probs
        and spec.parallel.strategy == "tensor"
    ):
        raise TrainError(
            "preference.precompute_ref_log_probs: tensor parallel slices every layer, of which TRL takes no sum."
        )


def _score_learned_tokens_only() -> None:
    """On a CPU, where most tokens of a row are not learned, this is a third of the time, with equal losses: TRL
    scores every position on devices without Triton, for the sake of compilers that want fixed shapes, and a CPU has
    no such compiler."""
    if hasattr(trl.trainer.utils, "_use_triton"):
        trl.trainer.utils._use_triton = lambda device: True


@contextlib.contextmanager
def _as_configured(model: Any) -> Iterator[None]:
    """TRL's SFT asks a mixture's routers for their loss at each call, and in its configuration, which is saved with
    the model: with it a trained model could not be asked for an answer."""
    config = model.config.get_text_config()
    before = getattr(config, BALANCE, None)
    yield
    if before is not None:
        setattr(config, BALANCE, before)


def build(
    spec: RunSpec,
    config: Any,
    model: Any,
    tokens: Any,
    prepared: PreparedData,
    callbacks: list[Any],
    reference: Any = None,
) -> Any:
    """The trainer, with the model on its device, and beside it the one that it is held to, if there is one."""
    if prepared.validation is None:
        config.eval_strategy = "no"
    if config.device.type == "cpu":
        _score_learned_tokens_only()
    with quantized.exact(model), _as_configured(model):
        trainer = trl_trainers.trainer(spec.train.stage)(
            model=model,
            args=config,
            train_dataset=prepared.train,
            eval_dataset=prepared.validation,
            processing_class=tokens,
            callbacks=callbacks,
            **trl_trainers.given(spec.train.stage, reference, prepared.train, prepared.validation),
        )
    if spec.train.torch_compile:
        trainer.add_callback(kernels.Compiled(trainer))
    trainer.spec = spec
    trainer.lora_plus = spec.lora.loraplus_lr_ratio
    if reference is not None and spec.preference.precompute_ref_log_probs:
        trainer.ref_model = None  # it was asked about every row
    trainer.remove_callback(PrinterCallback)  # its lines are dicts; ours can be read
    return trainer
