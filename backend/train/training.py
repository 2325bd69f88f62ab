"""The whole training, phase by phase."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import set_seed

from backend import registry
from backend.config import RunSpec
from backend.resolve import ResolvedRun
from backend.runs import MODEL, RESULT, health
from backend.runs.files import write_json
from backend.train import (
    adapters,
    added_tokens,
    base_weights,
    checkpoint_weights,
    checkpoints,
    continued_adapter,
    data,
    device,
    disk_space,
    end_tokens,
    generation_eval,
    logging_setup,
    lora,
    loss_weights,
    lost_points,
    model,
    optimizers,
    rank0_loading,
    rehearsal,
    resumed_options,
    sharding,
    streaming,
    template_date,
    time_limit,
    trainers,
    universal_checkpoint,
    unsharded,
    verify,
)
from backend.train.best_checkpoint import best_checkpoint_in
from backend.train.callbacks import CheckpointCallback, EarlyStopping, ProgressCallback, preference_metrics
from backend.train.context import TrainContext
from backend.train.divergence import DivergenceCallback
from backend.train.engines import train_engine
from backend.train.engines.deepspeed import TrainDeepSpeed
from backend.train.monitor import Monitor
from backend.train.patches import (
    accelerate_fsdp2_adapter_head,
    accelerate_fsdp2_addresses,
    transformers_padding_index,
    transformers_use_cache,
    trl_precompute_hooks,
)
from backend.train.run_log import RunLog, Stopped
from backend.train.skipped_steps import SkippedSteps
from backend.train.templates import ChatTokenizer, set_defaults

PREPARED = ".prepared"  # tokenized examples, from rank 0 to the others


def train(spec: RunSpec, run: ResolvedRun, folder: Path, from_scratch: bool, group: device.ProcessGroup) -> None:
    """Train what `spec` says, in the run's `folder`; `from_scratch` starts at step 0. Raises TrainError."""
    engine = train_engine(spec, run, group.world)
    device.settle(run.engine.needs_collectives)
    logging_setup.configure_logging(spec.logging.level, group.rank, isinstance(engine, TrainDeepSpeed))
    from_scratch = from_scratch or spec.save.resume_from == "scratch"
    context = TrainContext(spec, folder, from_scratch, group, RunLog(folder, group.rank), run, engine)
    template_date.fix(folder)
    if spec.save.resume_from == "path":  # a checkpoint of another run, whose texts are continued
        template_date.fix(Path(spec.save.resume_path).expanduser().resolve().parent.parent)
    if group.rank == 0:
        checkpoints.check(folder, from_scratch)
    time_limit.watch(spec.train.max_hours, run.engine.restores_optimizer(spec), context.run_log)
    with engine.scratch_folder():
        try:
            train_in_phases(context)
        except Stopped:
            context.run_log.info("Stopped.")
        except RuntimeError as error:
            group.check_timeout(error)
            raise
        finally:
            context.run_log.write_progress()
    group.leave()


def train_in_phases(context: TrainContext) -> None:
    """Prepare model and data, train, save, write the result. Raises TrainError, Stopped."""
    spec, run_log, group = context.spec, context.run_log, context.group
    verify.check_device(spec, context.run)
    verify.check_ranks(spec, context.run, group.world)
    context.engine.build_kernels(run_log)
    rehearsing = rehearsal.callbacks(context)
    run_log.progress("preparing model", "")
    config = trainers.training_arguments(context.engine, context.folder)
    verify.check_backend(context.run)
    group.meet(context.folder, spec.parallel.ddp_timeout)
    if context.run.nnodes > 1:
        verify.check_versions(group)
    source = _source(context)
    tokens = model.load_tokenizer(spec, source)
    prepared = _prepared(context, tokens)
    generation = _generation(context, tokens, prepared)
    set_defaults(spec, tokens)  # the conversations are rendered; now it is saved with the model
    monitor = Monitor(context)
    progress = ProgressCallback(run_log, monitor)
    checkpoint = CheckpointCallback(spec, context.folder, group, run_log, monitor, data.fingerprint(prepared.train))
    divergence = DivergenceCallback(spec, context.folder, group, run_log)
    skipped = SkippedSteps(context)
    callbacks = [generation, skipped, progress, checkpoint, divergence, *rehearsing, *_early_stopping(context)]
    generation.trainer = trainer = _trainer(context, config, source, tokens, prepared, callbacks)
    trainer.divergence, trainer.monitor, trainer.skipped, trainer.progress = divergence, monitor, skipped, progress
    progress.router_loss_weight = trainers.router_loss_coefficient(trainer)
    start = _start(context, checkpoint.options)
    _check_start(context, source, trainer, start)
    counts = model.count_parameters(trainer.model)  # before a block-wise optimizer freezes layers
    if context.engine.preparation:
        run_log.start_phase("preparing engine", context.engine.preparation)
    _train_from(context, trainer, start)
    device.synchronize(context.run.device)
    if checkpoint.stopped:
        run_log.info(f"Stopped after step {trainer.state.global_step}.")
        return
    skipped.check(trainer.state.global_step)
    trainer.finalize_weights()
    result = _result(trainer, progress.totals(progress.tokens), counts) | progress.mean_speed() | skipped.logged()
    _save(context, trainer, tokens)
    _finish(context, trainer, result | generation.evaluate_after())


def _source(context: TrainContext) -> model.ModelSource:
    def find() -> model.ModelSource:
        return model.locate(context.spec, context.telling("preparing model"))

    context.first(find)
    return find()


def _prepared(context: TrainContext, tokens: Any) -> data.PreparedData:
    """The prepared examples. For a streamed dataset, only the first ones; its stream is in the context. Raises
    TrainError."""
    spec, folder = context.spec, context.folder / PREPARED
    context.run_log.start_phase("preparing data", "Preparing data.")

    def prepare() -> None:
        tick = context.tick("preparing data", "Preparing data.", "example")
        shutil.rmtree(folder, ignore_errors=True)
        longest = rehearsal.dataset_sizes(context.run, spec)
        if longest or spec.data.streaming:
            folder.mkdir()
            data.save(data.prepare(spec, tokens, tick, context.run_log.info, longest, folder), folder)
        else:
            data.prepare_once(spec, tokens, tick, context.run_log.info, folder)

    context.first(prepare)
    # All ranks load the same files, so that each finds the cache that a trainer keeps next to them.
    context.stream = streaming.create(context, tokens)
    prepared = data.load(folder)
    verify.check_loss_weights(spec, loss_weights.has_weights(prepared.train, prepared.validation))
    return prepared


def _generation(context: TrainContext, tokens: Any, prepared: data.PreparedData) -> Any:
    """The callback that generates outputs for validation examples."""
    spec, run, examples = context.spec, context.run, prepared.eval_examples
    chat = ChatTokenizer.create(tokens, True, spec.data.template_kwargs) if examples else None
    prompts = generation_eval.eval_prompts(chat, examples) if chat else []
    if not prompts and spec.eval.num_generations and registry.STAGES[spec.train.stage].generates:
        which = "desirable completion" if spec.train.stage == "kto" else "completion to compare with"
        context.run_log.info(f"No outputs are generated, because the validation set has no {which}.")
    generator = generation_eval.Generator.create(
        spec, tokens, context.group, device.DTYPES[run.compute_dtype], run.tensor_parallel_size
    )
    return generation_eval.GenerationEvalCallback(context, generator, prompts)


def _early_stopping(context: TrainContext) -> list[Any]:
    """The callback that ends training when the eval loss no longer improves, if that is set."""
    patience, threshold = context.spec.eval.early_stopping_patience, context.spec.eval.early_stopping_threshold
    return [EarlyStopping(patience, threshold, context.run_log)] if trainers.stops_early(context.spec) else []


def _trainer(
    context: TrainContext,
    config: Any,
    source: model.ModelSource,
    tokens: Any,
    prepared: data.PreparedData,
    callbacks: list[Any],
) -> Any:
    """Load the model, and the reference model if the stage needs one, and build the trainer."""
    spec, precision = context.spec, context.run.compute_dtype
    context.run_log.start_phase("loading model", f"Loading {spec.model.name} for {context.run.device}, {precision}.")
    set_seed(spec.train.seed)
    sliced = context.engine.load_arguments()
    whole = rank0_loading.load(context, config, source, tokens, sliced)
    context.engine.check_model(whole)
    verify.check_positions(spec, whole.config.get_text_config(), prepared.longest)
    context.engine.prepare_config(whole.config)
    end_tokens.apply(whole, tokens, prepared.end_tokens)
    if not registry.STAGES[spec.train.stage].is_reward_model:  # a reward model finds the end of a text by this token
        callbacks = [*callbacks, transformers_padding_index.PaddingIndex(whole.config.get_text_config())]
    rows = added_tokens.ids(spec, tokens)
    context.use_cache = getattr(whole.config, "use_cache", None)
    weights = adapters.apply_method(spec, whole, precision, context.run.device, rows)
    context.loaded_bytes, context.saved_dtype = sharding.loaded_bytes(weights), model.saved_dtype(spec, source)
    accelerate_fsdp2_addresses.apply(weights)
    accelerate_fsdp2_adapter_head.apply()
    context.check_stop()
    reference = model.load(spec, source, precision, tokens, sliced, frozen=True) if spec.needs_reference_model else None
    trainer = trainers.build_trainer(spec, config, weights, tokens, prepared, callbacks, reference)
    trl_precompute_hooks.apply(trainer)
    trainer.context, trainer.stream = context, context.stream
    trained, count = model.count_parameters(trainer.model)
    which = " (adapters included)" if spec.method.kind == "lora" else ""
    context.run_log.info(f"{trained:,} of {count:,} parameters are trainable{which}: {trained / count:.2%}.")
    context.group.agree()
    if context.group.rank == 0:
        # The memory-mapped files stay readable until the last rank closes them.
        shutil.rmtree(context.folder / PREPARED, ignore_errors=True)
    return trainer


def _start(context: TrainContext, options: Mapping[str, Any]) -> Path | None:
    """The checkpoint to resume from; None for step 0. Marks the resume in metrics.jsonl, and logs how `options` differ
    from those of the checkpoint."""

    def choose() -> Path | None:
        start = checkpoints.latest(context.folder, context.run_log, context.from_scratch)
        if start is None and context.spec.save.resume_from == "path":
            start = checkpoints.at_path(context.spec.save.resume_path)
        if start is None and context.from_scratch:
            context.run_log.info("Restarted from scratch, at step 0.")
        elif start is None and checkpoints.complete(context.folder):
            context.run_log.info(
                "The checkpoints contain the weights without an optimizer state, so training starts at step 0."
            )
        step = checkpoints.step_of(start) if start else 0
        lost = lost_points.find(context.folder, start, own=context.spec.save.resume_from != "path") if start else []
        context.run_log.mark_resumed(step, lost)
        checkpoints.delete_incomplete(context.folder, context.from_scratch)  # after the mark, which explains this
        if start:
            context.run_log.info(f"Resuming from {start.name}.")
            edited, other_examples = resumed_options.differences(start, options)
            if edited:
                context.run_log.info(edited)
            if other_examples:  # options are edited on purpose; a data file may have changed unnoticed
                context.run_log.info(other_examples)
                context.run_log.event(health.EXAMPLES, step, other_examples)
        return start

    chosen: Path | None = context.group.share(context.first(choose))
    return chosen


def _train_from(context: TrainContext, trainer: Any, start: Path | None) -> None:
    """Train, after the checkpoint `start` if there is one."""
    trainer.start = start
    with best_checkpoint_in(start):
        usable = universal_checkpoint.convert_if_resized(context, trainer, _still_own(context, start))
        trainer.train(resume_from_checkpoint=str(usable) if usable else None)
    if context.stream:
        streaming.report(context, context.stream)


def _still_own(context: TrainContext, start: Path | None) -> Path | None:
    """`start`, right before it is loaded: loading model and data may have taken long. Raises TrainError."""
    if start:
        checkpoints.check_owner(context.folder, start)
    return start


def _check_start(context: TrainContext, source: model.ModelSource, trainer: Any, start: Path | None) -> None:
    """Raise TrainError for a checkpoint of other weights that an engine would load anyway, or of another base model.
    Without a checkpoint, load the adapter that the run continues."""
    context.first(lambda: base_weights.record(context, source, start))
    weights = trainer.accelerator.unwrap_model(trainer.model)
    lora.check_checkpoint(weights, start)
    if start and (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
        context.first(lambda: checkpoint_weights.check_engine_names(weights, start))
        continued_adapter.restore_reference(context, weights, start)
    elif start is None:
        continued_adapter.load(context, source, weights)


def _result(trainer: Any, totals: Mapping[str, Any], counts: tuple[int, int]) -> dict[str, Any]:
    """The figures of the training, over all starts, and of the last evaluation of the model as it is now, which is
    saved."""
    step, evaluated = _last_evaluation(trainer)
    loss = _mean_loss(trainer.state.log_history)
    figures = {key: _finite(value) for key, value in preference_metrics(evaluated).items()}
    return {
        **figures,
        "train_loss": None if loss is None else _finite(loss),
        "steps": trainer.state.global_step,
        **totals,
        "eval_loss": _finite(evaluated["eval_loss"]) if evaluated else None,
        "model_step": step,
        **({"router_loss_weight": coef} if (coef := trainers.router_loss_coefficient(trainer)) else {}),
        "trainable_parameters": counts[0],
        "parameters": counts[1],
    }


def _mean_loss(history: Sequence[Mapping[str, Any]]) -> float | None:
    """The mean loss of all steps. Each logged loss is the mean of the steps since the one before."""
    total, done = 0.0, 0
    for point in history:
        if "loss" in point:
            total, done = total + point["loss"] * (point["step"] - done), point["step"]
    return total / done if done else None


def _last_evaluation(trainer: Any) -> tuple[int, dict[str, Any]]:
    """The step whose weights the model has, that of the best checkpoint if it was loaded, and what the evaluation after
    this step found. Evaluates if there was none; empty without evaluations."""
    state, arguments = trainer.state, trainer.args
    best = state.best_model_checkpoint if arguments.load_best_model_at_end else None
    step = checkpoints.step_of(Path(best)) if best else int(state.global_step)
    found = [point for point in state.log_history if "eval_loss" in point and point["step"] == step]
    if not found and arguments.eval_strategy != "no":
        found = [trainer.evaluate()]
    return step, found[-1] if found else {}


def _finish(context: TrainContext, trainer: Any, result: dict[str, Any]) -> None:
    """Write result.json, with the local sizes of each rank."""
    state = trainer.state
    result["model"] = MODEL if context.spec.save.final_model else None
    result["ranks"] = context.group.gather({**sharding.summary(trainer), "loaded_bytes": context.loaded_bytes})
    result["optimizer"] = context.group.gather(optimizers.state_summary(trainer.optimizer))
    result["peak_bytes"] = context.group.gather(device.peak_bytes(context.run.device))
    result["reserved_bytes"] = context.group.gather(device.reserved_bytes(context.run.device))
    result["device_bytes"] = context.group.gather(device.used_bytes(context.run.device))
    result["host_bytes"] = context.group.gather(device.peak_bytes("cpu"))

    def write() -> None:
        context.run_log.flush()
        write_json(context.folder / RESULT, result)

    disk_space.on_rank_0(context.group, lambda: disk_space.retry(context.run_log, "The result", write))
    context.run_log.start_phase("done", "Done.", fraction=1.0, step=state.global_step, max_steps=state.max_steps)


def _save(context: TrainContext, trainer: Any, tokens: Any) -> None:
    if not context.spec.save.final_model:
        return
    context.run_log.start_phase("saving", "Saving the trained model.")
    if context.spec.save.merge_adapter:
        unsharded.merge_adapter(trainer)
    weights = trainer.accelerator.unwrap_model(trainer.model)
    state = context.engine.full_state_dict(trainer)
    folder, dtype = context.folder / MODEL, context.saved_dtype

    def save() -> None:
        with transformers_use_cache.restored(weights.config, context.use_cache):
            model.save(weights, tokens, folder, dtype, state)
        if not hasattr(weights, "peft_config"):
            base_weights.copy_tokenizer_files(base_weights.recorded_folder(context.folder), folder)

    def write() -> None:
        disk_space.retry(context.run_log, "The model", save)

    disk_space.on_rank_0(context.group, write)
    if not hasattr(weights, "peft_config") and (problem := model.rounding_problem(weights, dtype)):
        context.run_log.info(problem)
    if registry.STAGES[context.spec.train.stage].is_reward_model and hasattr(weights, "peft_config"):
        context.run_log.info(
            "Load the reward model with AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, "
            f"pad_token_id={tokens.pad_token_id})."
        )


def _finite(value: float) -> float | None:
    return value if value == value and abs(value) != float("inf") else None
