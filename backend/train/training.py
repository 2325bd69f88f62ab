"""The whole training, phase by phase.

Beside the floors. Imports run, spec and all of train.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from transformers import set_seed

from backend import registry
from backend.config import RunSpec
from backend.resolve import ResolvedRun
from backend.runs import DEEPSPEED, MODEL, RESULT
from backend.train import (
    adapters,
    checkpoints,
    data,
    device,
    generation_eval,
    logging_setup,
    lora,
    model,
    optimizers,
    rank0_loading,
    sharding,
    trainers,
    universal_checkpoint,
    verify,
)
from backend.train.callbacks import CheckpointCallback, ProgressCallback, preference_metrics
from backend.train.context import TrainContext
from backend.train.engines import train_engine
from backend.train.patches import accelerate_fsdp2_addresses
from backend.train.run_log import RunLog, Stopped, TrainError, write_json
from backend.train.templates import ChatTokenizer

PREPARED = ".prepared"  # tokenized rows on their way from rank 0 to the others


def train(spec: RunSpec, run: ResolvedRun, folder: Path, from_scratch: bool, group: device.ProcessGroup) -> None:
    """Train what `spec` says, in the run's `folder`; `from_scratch` starts at step 0. Raises TrainError."""
    deepspeed = run.engine.config_file == DEEPSPEED
    device.settle(deepspeed)
    logging_setup.configure_logging(spec.logging.level, group.rank, deepspeed)
    from_scratch = from_scratch or spec.save.resume_from == "scratch"
    engine = train_engine(spec, run, group.world)
    work = TrainContext(spec, folder, from_scratch, group, RunLog(folder, group.rank), run, engine)
    with engine.scratch_folder():
        try:
            train_in_phases(work)
        except Stopped:
            work.run_log.info("Stopped.")
    group.leave()


def train_in_phases(work: TrainContext) -> None:
    """The whole way, phase by phase. Raises TrainError, Stopped."""
    spec, run_log, group = work.spec, work.run_log, work.group
    run_log.progress("preparing model", "")
    verify.check_device(work.run)
    verify.check_ranks(spec, work.run, group.world)
    config = trainers.training_arguments(work.engine, work.folder)
    verify.check_backend(work.run)
    group.meet(work.folder)
    source = _source(work)
    tokens = model.load_tokenizer(spec, source)
    prepared = _prepared(work, tokens)
    asked = (
        generation_eval.eval_prompts(ChatTokenizer.create(tokens, True), prepared.eval_examples)
        if prepared.eval_examples
        else []
    )
    exam = generation_eval.GenerationEvalCallback(
        work,
        generation_eval.Generator.create(
            spec, tokens, group, device.DTYPES[work.precision], work.run.tensor_parallel_size
        ),
        asked,
    )
    reporter, keeper = ProgressCallback(run_log), CheckpointCallback(spec, work.folder, group, run_log)
    exam.trainer = trainer = _trainer(work, config, source, tokens, prepared, [exam, reporter, keeper])
    start = _start(work)
    lora.check_checkpoint(trainer.accelerator.unwrap_model(trainer.model), start)
    counts = model.count_parameters(trainer.model)  # before an optimizer takes layers in turns
    if work.run.engine.config_file == DEEPSPEED:
        run_log.start_phase(
            "preparing engine", "Preparing DeepSpeed; its first use on a machine builds parts of it, minutes."
        )
    start = universal_checkpoint.convert_if_resized(work, trainer, start)
    trainer.train(resume_from_checkpoint=str(start) if start else None)
    device.synchronize(work.family)
    if keeper.stopped:
        run_log.info(f"Stopped after step {trainer.state.global_step}.")
        return
    trainer.finalize_weights()
    result = _result(trainer, time.time() - reporter.began, reporter.tokens, counts)
    _save(work, trainer, tokens, source)
    _finish(work, trainer, result | exam.evaluate_after())


def _source(work: TrainContext) -> model.ModelSource:
    def find() -> model.ModelSource:
        return model.locate(work.spec, work.telling("preparing model"))

    work.first(find)
    return find()


def _prepared(work: TrainContext, tokens: Any) -> data.PreparedData:
    spec, group, folder = work.spec, work.group, work.folder / PREPARED
    work.run_log.start_phase("preparing data", "Preparing data.")

    def prepare() -> data.PreparedData:
        tick = work.tick("preparing data", "Preparing data.")
        made = data.prepare(spec, tokens, tick, work.run_log.info)
        if group.world > 1:
            data.save(made, folder)
        return made

    made: data.PreparedData | None = work.first(prepare)
    # Several ranks all read the same files: what a trainer keeps beside them is then found by each.
    return made if made is not None and group.world == 1 else data.load(folder)


def _trainer(
    work: TrainContext,
    config: Any,
    source: model.ModelSource,
    tokens: Any,
    prepared: data.PreparedData,
    callbacks: list[Any],
) -> Any:
    """The weights, what they are held to if the stage wants that, and the trainer of both."""
    spec, precision = work.spec, work.precision
    work.run_log.start_phase("loading model", f"Loading {spec.model.name} for {work.family}, {precision}.")
    set_seed(spec.train.seed)
    sliced = work.engine.load_arguments()
    whole = rank0_loading.load(work, config, source, tokens, sliced)
    work.engine.check_model(whole)
    work.engine.prepare_config(whole.config)
    weights = adapters.apply_method(spec, whole, precision)
    work.loaded_bytes = sharding.loaded_bytes(weights)
    accelerate_fsdp2_addresses.apply(weights)
    work.check_stop()
    reference = model.load(spec, source, precision, tokens, sliced, frozen=True) if spec.needs_reference_model else None
    trainer = trainers.build_trainer(spec, config, weights, tokens, prepared, callbacks, reference)
    trainer.context = work
    trained, count = model.count_parameters(trainer.model)
    work.run_log.info(f"Trainable parameters: {trained:,} of {count:,} ({trained / count:.2%}).")
    work.group.agree()
    if work.group.rank == 0:
        shutil.rmtree(work.folder / PREPARED, ignore_errors=True)  # mapped files live on until the last rank lets go
    return trainer


def _start(work: TrainContext) -> Path | None:
    """The checkpoint to go on from; None for step 0. Tells readers of the curves."""

    def choose() -> Path | None:
        checkpoints.delete_incomplete(work.folder, work.from_scratch)
        start = checkpoints.latest(work.folder)
        if start is None and work.spec.save.resume_from == "path":
            start = checkpoints.at_path(work.spec.save.resume_path)
        if start is None and checkpoints.complete(work.folder):
            work.run_log.info("The checkpoints contain weights only (save.only_model), so training starts at step 0.")
        step = checkpoints.step_of(start) if start else 0
        work.run_log.mark_resumed(step)
        if start:
            work.run_log.info(f"Resuming from {start.name}.")
        return start

    chosen: Path | None = work.group.share(work.first(choose))
    return chosen


def _result(trainer: Any, seconds: float, tokens: int, counts: tuple[int, int]) -> dict[str, Any]:
    """What came out of the training; the last evaluation is made where it is missing."""
    evaluated = [point for point in trainer.state.log_history if "eval_loss" in point]
    if trainer.args.eval_strategy != "no" and (not evaluated or evaluated[-1]["step"] < trainer.state.global_step):
        evaluated = [trainer.evaluate()]
    losses = [point["loss"] for point in trainer.state.log_history if "loss" in point]
    figures = {key: _finite(value) for key, value in preference_metrics(evaluated[-1] if evaluated else {}).items()}
    return {
        **figures,
        "train_loss": _finite(sum(losses) / len(losses)) if losses else None,
        "steps": trainer.state.global_step,
        "seconds": round(seconds, 2),
        "tokens": tokens,
        "eval_loss": _finite(evaluated[-1]["eval_loss"]) if evaluated else None,
        "trainable_parameters": counts[0],
        "parameters": counts[1],
    }


def _finish(work: TrainContext, trainer: Any, result: dict[str, Any]) -> None:
    """Write down what came out, with what each rank held."""
    state = trainer.state
    result["model"] = MODEL if work.spec.save.final_model else None
    result["ranks"] = work.group.gather({**sharding.summary(trainer), "loaded_bytes": work.loaded_bytes})
    result["optimizer"] = work.group.gather(optimizers.state_summary(trainer.optimizer))
    result["peak_bytes"] = work.group.gather(device.peak_bytes(work.family))
    result["reserved_bytes"] = work.group.gather(device.reserved_bytes(work.family))
    if work.group.rank == 0:
        write_json(work.folder / RESULT, result)
    work.run_log.start_phase("done", "Done.", fraction=1.0, step=state.global_step, max_steps=state.max_steps)


def _save(work: TrainContext, trainer: Any, tokens: Any, source: model.ModelSource) -> None:
    if not work.spec.save.final_model:
        return
    work.run_log.start_phase("saving", "Saving the trained model.")
    if work.spec.save.merge_adapter:
        trainer.model = trainer.accelerator.unwrap_model(trainer.model).merge_and_unload()
    weights = trainer.accelerator.unwrap_model(trainer.model)
    state = work.engine.full_state_dict(trainer)
    error = ""
    if work.group.rank == 0:
        try:
            model.save(weights, tokens, work.folder / MODEL, model.saved_dtype(work.spec, source), state)
        except TrainError as caught:
            error = str(caught)
    if error := work.group.share(error):
        raise TrainError(error)
    if registry.STAGES[work.spec.train.stage].is_reward_model and hasattr(weights, "peft_config"):
        work.run_log.info(
            "Load the reward model with AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)."
        )


def _finite(value: float) -> float | None:
    return value if value == value and abs(value) != float("inf") else None
