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
from backend.runs import MODEL, RESULT
from backend.train import (
    adapters,
    checkpoints,
    data,
    device,
    engine,
    generation,
    logging_setup,
    lora,
    model,
    optimizer_utils,
    rank0_loading,
    trainers,
    universal_checkpoint,
)
from backend.train.callbacks import CheckpointCallback, ProgressCallback, compared
from backend.train.context import TrainContext
from backend.train.generation_eval import GenerationEvalCallback
from backend.train.run_log import RunLog, Stopped, TrainError, write_json
from backend.train.templates import Writer

PREPARED = ".prepared"  # tokenized rows on their way from rank 0 to the others


def train(spec: RunSpec, folder: Path, from_scratch: bool, team: device.ProcessGroup) -> None:
    """Train what `spec` says, in the run's `folder`; `from_scratch` starts at step 0. Raises TrainError."""
    deepspeed = spec.parallel.strategy in registry.DEEPSPEED
    device.settle(deepspeed)
    logging_setup.calm(spec.logging.level, team.rank, deepspeed)
    from_scratch = from_scratch or spec.save.resume_from == "scratch"
    work = TrainContext(spec, folder, from_scratch, team, RunLog(folder, team.rank))
    with engine.disk(spec):
        try:
            run(work)
        except Stopped:
            work.journal.say("Stopped.")
    team.leave()


def run(work: TrainContext) -> None:
    """The whole way, phase by phase. Raises TrainError, Stopped."""
    spec, journal, team = work.spec, work.journal, work.team
    journal.phase("preparing model", "")
    work.family = device.choose(spec)
    device.check(work.family)
    team.check(spec)
    config = trainers.arguments(spec, work.folder, work.family, team.world)
    work.precision = device.precision(spec, work.family)
    team.meet(work.folder)
    source = _source(work)
    tokens = model.tokenizer(spec, source)
    prepared = _prepared(work, tokens)
    asked = generation.questions(Writer.of(tokens, True), prepared.held_out) if prepared.held_out else []
    exam = GenerationEvalCallback(
        work, generation.Answering.of(spec, tokens, team, model.DTYPES[work.precision]), asked
    )
    reporter, keeper = ProgressCallback(journal), CheckpointCallback(spec, work.folder, team, journal)
    exam.trainer = trainer = _trainer(work, config, source, tokens, prepared, [exam, reporter, keeper])
    start = _start(work)
    lora.check_start(trainer.accelerator.unwrap_model(trainer.model), start)
    counts = model.counts(trainer.model)  # before an optimizer takes layers in turns
    if spec.parallel.strategy in registry.DEEPSPEED:
        journal.begin(
            "preparing engine", "Preparing DeepSpeed; its first use on a machine builds parts of it, minutes."
        )
    start = universal_checkpoint.fit(work, trainer, start)
    trainer.train(resume_from_checkpoint=str(start) if start else None)
    device.synchronize(work.family)
    if keeper.stopped:
        journal.say(f"Stopped after step {trainer.state.global_step}.")
        return
    trainer.settle()
    result = _result(trainer, time.time() - reporter.began, reporter.tokens, counts)
    _save(work, trainer, tokens, source)
    _finish(work, trainer, result | exam.after())


def _source(work: TrainContext) -> model.Source:
    def find() -> model.Source:
        return model.find(work.spec, work.telling("preparing model"))

    work.first(find)
    return find()


def _prepared(work: TrainContext, tokens: Any) -> data.Prepared:
    spec, team, folder = work.spec, work.team, work.folder / PREPARED
    work.journal.begin("preparing data", "Preparing data.")

    def prepare() -> data.Prepared:
        tick = work.tick("preparing data", "Preparing data.")
        made = data.prepare(spec, tokens, tick, work.journal.say)
        if team.world > 1:
            data.save(made, folder)
        return made

    made: data.Prepared | None = work.first(prepare)
    # Several ranks all read the same files: what a trainer keeps beside them is then found by each.
    return made if made is not None and team.world == 1 else data.load(folder)


def _trainer(
    work: TrainContext, config: Any, source: model.Source, tokens: Any, prepared: data.Prepared, callbacks: list[Any]
) -> Any:
    """The weights, what they are held to if the stage wants that, and the trainer of both."""
    spec, precision = work.spec, work.precision
    work.journal.begin("loading model", f"Loading {spec.model.name} for {work.family}, {precision}.")
    set_seed(spec.train.seed)
    sliced = engine.slices(spec, work.team.world, precision)
    whole = rank0_loading.load(work, config, source, tokens, sliced)
    engine.check_layers(spec, whole)
    weights = adapters.adapt(spec, whole, precision)
    work.loaded = engine.loaded(weights)
    rank0_loading.stand_in(weights)
    work.check_stop()
    reference = model.load(spec, source, precision, tokens, sliced, frozen=True) if spec.needs_reference_model else None
    trainer = trainers.build(spec, config, weights, tokens, prepared, callbacks, reference)
    trainer.work = work
    trained, count = model.counts(trainer.model)
    work.journal.say(f"Training {trained:,} of {count:,} weights ({trained / count:.2%}).")
    work.team.agree()
    if work.team.rank == 0:
        shutil.rmtree(work.folder / PREPARED, ignore_errors=True)  # mapped files live on until the last rank lets go
    return trainer


def _start(work: TrainContext) -> Path | None:
    """The checkpoint to go on from; None for step 0. Tells readers of the curves."""

    def choose() -> Path | None:
        checkpoints.sweep(work.folder, work.from_scratch)
        start = checkpoints.last(work.folder)
        if start is None and work.spec.save.resume_from == "path":
            start = checkpoints.named(work.spec.save.resume_path)
        if start is None and checkpoints.complete(work.folder):
            work.journal.say("The checkpoints hold weights only, so training begins at step 0.")
        step = checkpoints.step_of(start) if start else 0
        work.journal.resumed(step)
        if start:
            work.journal.say(f"Going on from {start.name}.")
        return start

    chosen: Path | None = work.team.share(work.first(choose))
    return chosen


def _result(trainer: Any, seconds: float, tokens: int, counts: tuple[int, int]) -> dict[str, Any]:
    """What came out of the training; the last evaluation is made where it is missing."""
    evaluated = [point for point in trainer.state.log_history if "eval_loss" in point]
    if trainer.args.eval_strategy != "no" and (not evaluated or evaluated[-1]["step"] < trainer.state.global_step):
        evaluated = [trainer.evaluate()]
    losses = [point["loss"] for point in trainer.state.log_history if "loss" in point]
    figures = {key: _finite(value) for key, value in compared(evaluated[-1] if evaluated else {}).items()}
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
    result["held"] = work.team.gather({**engine.held(trainer), "loaded": work.loaded})
    result["optimizer"] = work.team.gather(optimizer_utils.held(trainer.optimizer))
    result["peak_bytes"] = work.team.gather(device.peak_bytes(work.family))
    result["reserved_bytes"] = work.team.gather(device.reserved_bytes(work.family))
    if work.team.rank == 0:
        write_json(work.folder / RESULT, result)
    work.journal.begin("done", "Done.", fraction=1.0, step=state.global_step, max_steps=state.max_steps)


def _save(work: TrainContext, trainer: Any, tokens: Any, source: model.Source) -> None:
    if not work.spec.save.final_model:
        return
    work.journal.begin("saving", "Saving the trained model.")
    if work.spec.save.merge_adapter:
        trainer.model = trainer.accelerator.unwrap_model(trainer.model).merge_and_unload()
    weights = trainer.accelerator.unwrap_model(trainer.model)
    state = engine.whole(work.spec, trainer)
    error = ""
    if work.team.rank == 0:
        try:
            model.save(weights, tokens, work.folder / MODEL, model.saved_dtype(work.spec, source), state)
        except TrainError as caught:
            error = str(caught)
    if error := work.team.share(error):
        raise TrainError(error)
    if registry.STAGES[work.spec.train.stage].scores and hasattr(weights, "peft_config"):
        work.journal.say("It loads with AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).")


def _finite(value: float) -> float | None:
    return value if value == value and abs(value) != float("inf") else None
