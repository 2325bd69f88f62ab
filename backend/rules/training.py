"""Rules about training length, its time limit, warmup, evaluation, checkpoints and disk space."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from backend import registry
from backend.rules.base import Case, Example, Fix, Violation, advice, error, set_to, warning
from backend.rules.data import evaluation_without_validation_set
from backend.rules.examples import DEMO, FULL_DISK, PLAIN_TEXT, TWO_H100, USER_DATA
from backend.runs.resume_point import step_of
from backend.runs.throughput import duration
from backend.wording import counted, data_size

STEPS = {"train.duration": "steps"}
MOST_HOURS = 10_000  # the largest value of train.max_hours
BEST_BY_STEPS = {"eval.strategy": "steps", "save.strategy": "steps", "save.load_best_model_at_end": True}
EVALUATED = {"eval.strategy": "steps", "eval.steps": 12}
DEFAULT_WARMUP = 0.03  # the default of train.warmup_steps


@warning(
    "TRN001",
    fields=("train.per_device_train_batch_size", "train.gradient_accumulation_steps", "launch.nproc_per_node"),
    title="Global batch size exceeds the training set",
    source="transformers 5.23 trainer.py: the last batch of an epoch is smaller, and an epoch has at least one step; "
    "accelerate 1.15 data_loader.py BatchSamplerShard: even_batches",
    fails_on=Example({"train.gradient_accumulation_steps": 64, "train.per_device_train_batch_size": 16}),
    passes_on=Example({"train.gradient_accumulation_steps": 4, "train.per_device_train_batch_size": 4}),
)
def global_batch_exceeds_dataset(case: Case) -> Violation | None:
    """With fewer training examples than the global batch size, each epoch is a single optimizer step, so the run has
    only as many steps as epochs. With one process the step has fewer examples than are set; with several, accelerate
    fills the batch of each process with examples that it repeats, some more often than others."""
    examples, batch, train = case.run.num_train_examples, case.run.global_batch_size, case.spec.train
    if examples is None or examples < 1 or batch <= examples or case.spec.data.packing:
        return None
    if not case.facts.counts_are_exact or case.spec.data.streaming:  # a stream continues with the next pass
        return None
    ranks = case.run.data_parallel_size
    message = (
        f"The global batch size is {batch:,} (per-device batch size {train.per_device_train_batch_size} x "
        f"{train.gradient_accumulation_steps} gradient accumulation steps x {counted(ranks, 'data-parallel rank')}), "
        f"and the training set has {counted(examples, 'example')}."
    )
    size = min(train.per_device_train_batch_size, max(1, examples // ranks))
    accumulation = max(1, examples // (size * ranks))
    smaller = size * accumulation * ranks
    if smaller > examples:
        return Violation(message)
    patch = {"train.per_device_train_batch_size": size, "train.gradient_accumulation_steps": accumulation}
    return Violation(message, (Fix(f"Reduce the global batch size to {smaller:,}", patch, False),))


@warning(
    "TRN002",
    fields=("train.warmup_steps",),
    title="Warmup lasts for the whole run",
    source="transformers 5.23 optimization.py: the learning rate rises linearly from 0 for num_warmup_steps; "
    "training_args.py, get_warmup_steps: a fraction is rounded up",
    fails_on=Example({**STEPS, "train.max_steps": 50, "train.warmup_steps": 100.0}),
    passes_on=Example({**STEPS, "train.max_steps": 500, "train.warmup_steps": 100.0}),
)
def warmup_exceeds_run(case: Case) -> Violation | None:
    """The learning rate rises from 0 during warmup, and a fraction of the steps is rounded up to whole steps. If warmup
    is as long as the run or longer, the learning rate never reaches train.learning_rate; in a run of one step it is 0,
    so that nothing is trained."""
    train, steps = case.spec.train, case.run.total_steps
    if steps is None or train.lr_scheduler_type == "constant":
        return None
    warmup, longest = registry.warmup_steps(train.warmup_steps, steps), steps - 1
    if train.optim.startswith("schedule_free"):  # their warmup starts above 0, and its last step has the full rate
        longest = steps
    if warmup <= longest:
        return None
    rounded = f", which is {counted(warmup, 'step')}" if train.warmup_steps < 1 else ""
    message = f"train.warmup_steps is {train.warmup_steps:,.10g}{rounded}, and the run has {counted(steps, 'step')}"
    trained = "" if steps > 1 or longest else "; the learning rate of this step is 0, so the model would not change"
    if registry.warmup_steps(DEFAULT_WARMUP, steps) <= longest:
        fix = Fix("Set warmup to 3% of the steps", {"train.warmup_steps": DEFAULT_WARMUP}, safe=False)
    else:
        fix = Fix("Disable warmup", {"train.warmup_steps": 0.0}, safe=False)
    return Violation(f"{message}{trained}.", (fix,))


@advice(
    "TRN003",
    fields=("train.lr_scheduler_type", "train.warmup_steps"),
    title="The constant schedule ignores warmup",
    source="transformers 5.23 optimization.py: get_constant_schedule has no num_warmup_steps",
    fixes=(Fix("Use constant_with_warmup", {"train.lr_scheduler_type": "constant_with_warmup"}, safe=False),),
    fails_on=Example({"train.lr_scheduler_type": "constant", "train.warmup_steps": 10.0}),
    passes_on=Example({"train.lr_scheduler_type": "constant_with_warmup", "train.warmup_steps": 10.0}),
)
def warmup_with_constant_schedule(case: Case) -> str | None:
    """The constant schedule starts at the full learning rate; only constant_with_warmup has a warmup."""
    warmup = case.spec.train.warmup_steps
    if case.spec.train.lr_scheduler_type != "constant" or warmup in (0, DEFAULT_WARMUP):
        return None
    return f"train.lr_scheduler_type is constant, so train.warmup_steps of {warmup:,.10g} has no effect."


def _interval_exceeds_run(case: Case, option: str, interval: int, consequence: str, last: int = 0) -> Violation | None:
    """What is done every `interval` steps and would not happen in the run, without its `last` steps."""
    steps = case.run.total_steps
    if steps is None or interval <= steps - last:
        return None
    shorter = max(1, steps // 4)
    message = f"{option} is {interval:,}, and the run has {counted(steps, 'step')}, so {consequence}."
    return Violation(message, (Fix(set_to(option, shorter), {option: shorter}),))


@warning(
    "TRN004",
    fields=("eval.steps",),
    title="No evaluation before the end of the run",
    source="arithmetic",
    fails_on=Example({**STEPS, "train.max_steps": 20, "eval.strategy": "steps"}),
    passes_on=Example({**STEPS, "train.max_steps": 100, "eval.strategy": "steps"}),
)
def eval_interval_exceeds_run(case: Case) -> Violation | None:
    """A single evaluation at the end gives no eval curve, so overfitting cannot be seen."""
    if case.spec.eval.strategy != "steps" or case.spec.save.load_best_model_at_end:
        return None
    if evaluation_without_validation_set(case):  # the final model is not evaluated either
        return None
    return _interval_exceeds_run(case, "eval.steps", case.spec.eval.steps, "only the final model is evaluated")


@advice(
    "TRN005",
    fields=("save.steps",),
    title="No checkpoint before the end of the run",
    source="transformers 5.23 trainer_callback.py: a checkpoint is also written at the end",
    fails_on=Example({**STEPS, "train.max_steps": 20, "save.strategy": "steps"}),
    passes_on=Example({**STEPS, "train.max_steps": 200, "save.strategy": "steps"}),
)
def save_interval_exceeds_run(case: Case) -> Violation | None:
    """A run that fails before its first checkpoint has to start from scratch."""
    if case.spec.save.strategy != "steps" or case.spec.save.load_best_model_at_end:
        return None
    return _interval_exceeds_run(case, "save.steps", case.spec.save.steps, "only the last step is saved")


@advice(
    "TRN012",
    fields=("eval.early_stopping_patience", "eval.strategy", "eval.steps"),
    title="Too few evaluations for early stopping",
    source="arithmetic: the evaluations before the last step, of which the first can only be the best so far",
    fails_on=Example({**STEPS, **EVALUATED, "train.max_steps": 40, "eval.early_stopping_patience": 4}),
    passes_on=Example({**STEPS, **EVALUATED, "train.max_steps": 61, "eval.early_stopping_patience": 4}),
)
def patience_exceeds_evaluations(case: Case) -> Violation | None:
    """Early stopping needs a first evaluation and then as many without improvement as the patience, all before the last
    step. A run with fewer evaluations cannot stop early."""
    evaluation, steps = case.spec.eval, case.run.total_steps
    patience = evaluation.early_stopping_patience
    if not patience or steps is None or evaluation.strategy == "no" or evaluation_without_validation_set(case):
        return None
    by_steps = evaluation.strategy == "steps"
    interval = evaluation.steps if by_steps else case.run.steps_per_epoch
    if not interval or (before := (steps - 1) // interval) > patience:
        return None
    message = (
        f"eval.early_stopping_patience is {patience:,}, so the run can stop early only after {patience + 1:,} "
        f"evaluations, and it has {before:,} before its last step."
    )
    shorter = (steps - 1) // (patience + 1)
    if shorter and not case.spec.save.load_best_model_at_end:
        patch = {"eval.strategy": "steps", "eval.steps": shorter}
        label = f"Evaluate every {counted(shorter, 'step')}"
        return Violation(message, (Fix(label, patch, False, "the run may end earlier"),))
    return Violation(message, (Fix("Disable early stopping", {"eval.early_stopping_patience": 0}),))


@advice(
    "TRN013",
    fields=("logging.steps",),
    title="No metrics between the first and the last step",
    source="arithmetic: metrics are logged at the first step, every logging.steps steps, and at the end; LLaMA-Factory "
    "does not log the first step",
    fails_on=Example({**STEPS, "train.max_steps": 20, "logging.steps": 50}),
    passes_on=Example({**STEPS, "train.max_steps": 200, "logging.steps": 50}),
)
def logging_interval_exceeds_run(case: Case) -> Violation | None:
    """One or two points do not show how the loss changes, and a loss that rises in between is not noticed."""
    if (case.run.total_steps or 0) < 3:
        return None  # no step is between the first and the last one
    logged = "its last step is" if case.spec.launch.trainer == "llamafactory" else "its first and last step are"
    # The last step is logged anyway, so an interval as long as the run adds no point.
    return _interval_exceeds_run(case, "logging.steps", case.spec.logging.steps, f"only {logged} logged", 1)


@error(
    "TRN006",
    fields=("save.load_best_model_at_end", "eval.strategy", "eval.steps", "save.strategy", "save.steps"),
    title="load_best_model_at_end needs an evaluation at every checkpoint",
    source="transformers 5.23 training_args.py: load_best_model_at_end needs evaluations and checkpoints at the same "
    "steps",
    fails_on=Example({**BEST_BY_STEPS, "eval.steps": 40, "save.steps": 100}),
    passes_on=Example({**BEST_BY_STEPS, "eval.steps": 50, "save.steps": 100}),
    proof="launch",
)
def best_model_without_matching_eval(case: Case) -> Violation | None:
    """The best checkpoint is the one with the lowest eval loss, so every checkpoint must be evaluated at the step where
    it is saved."""
    save, evaluation = case.spec.save, case.spec.eval
    if not save.load_best_model_at_end:
        return None
    if save.strategy != evaluation.strategy:
        interval = f"every {counted(save.steps, 'step')}" if save.strategy == "steps" else "every epoch"
        patch = {"eval.strategy": save.strategy, "eval.steps": save.steps}
        message = f"save.strategy is {save.strategy} and eval.strategy is {evaluation.strategy}."
        return Violation(message, (Fix(f"Evaluate {interval}", patch),))
    if save.strategy != "steps" or save.steps % evaluation.steps == 0:
        return None
    multiple = max(1, round(save.steps / evaluation.steps)) * evaluation.steps
    message = f"save.steps is {save.steps:,}, which is not a multiple of eval.steps, {evaluation.steps:,}."
    return Violation(message, (Fix(f"Save every {counted(multiple, 'step')}", {"save.steps": multiple}),))


@advice(
    "TRN007",
    fields=("save.only_model",),
    title="Checkpoints with only the model cannot be resumed",
    source="transformers 5.23 trainer.py: without optimizer.pt the optimizer silently starts from scratch",
    fixes=(Fix("Save complete checkpoints", {"save.only_model": False}),),
    fails_on=Example({"save.only_model": True}),
    passes_on=Example(),
)
def model_only_checkpoints(case: Case) -> str | None:
    """Without optimizer and scheduler state, a run that stops or fails has to start again at step 0."""
    if not case.spec.save.only_model or case.spec.save.strategy == "no":
        return None
    if not case.run.engine.restores_optimizer(case.spec):  # another rule refuses complete checkpoints
        return None
    return "save.only_model is on, so checkpoints would not contain the optimizer, scheduler and random states."


LONGER = "Train longer, or use an earlier checkpoint."


@error(
    "TRN008",
    fields=("save.resume_path",),
    title="The checkpoint to resume from cannot be used",
    source="the folder itself",
    fixes=(Fix("Start at step 0", {"save.resume_from": "latest"}, False, "the checkpoint is not used"),),
    fails_on=Example(
        {"save.resume_from": "path"},
        facts=replace(DEMO, checkpoint_problem="save.resume_path is empty: set the path of a checkpoint-N folder."),
    ),
    passes_on=Example({"save.resume_from": "path", "save.resume_path": "runs/a/checkpoints/checkpoint-20"}),
    proof="launch",
)
def unusable_checkpoint(case: Case) -> str | Violation | None:
    """A run can resume only from a complete checkpoint-N folder that a run with the same training method, adapter
    options and model has saved, at a step before the end of the resumed run. A DeepSpeed checkpoint also has to be from
    a run with the same compute dtype: the names and the content of its files depend on it."""
    if case.spec.save.resume_from != "path":
        return None
    path, last, train = Path(case.spec.save.resume_path), case.run.total_steps, case.spec.train
    if not case.facts.checkpoint_problem and case.facts.checkpoint_dtype not in ("", case.run.compute_dtype):
        dtype, precision = case.facts.checkpoint_dtype, "precision.compute"
        problem = (
            f"{path} was saved by a run that computed in {dtype}, and this run computes in {case.run.compute_dtype}: "
            "DeepSpeed resumes only in the same dtype."
        )
        return Violation(
            problem, (Fix(set_to(precision, dtype), {precision: dtype}, False),), ("save.resume_path", precision)
        )
    by_epochs = train.duration == "epochs" and case.spec.launch.trainer == "footplate"
    epoch = case.facts.checkpoint_epoch if by_epochs else 0
    if epoch and not case.facts.checkpoint_problem:  # its steps may have had another number of examples
        trains = epoch < train.num_train_epochs
        end = f"the run ends after epoch {train.num_train_epochs:,.10g}, so no step would be trained"
        return None if trains else f"{path} is at epoch {epoch:.4g}, and {end}. {LONGER}"
    # Pretraining splits long texts: the number of sequences is known only once all texts are tokenized.
    is_exact = train.duration == "steps" or (case.facts.counts_are_exact and train.stage != "pretraining")
    if case.facts.checkpoint_problem or last is None or not is_exact or step_of(path) < last:
        options, problem = dict(case.facts.checkpoint_options), case.facts.checkpoint_problem
        fix = Fix("Use the options of the checkpoint", options, False, "those of this run are not used")
        return Violation(problem, (fix,) if options else (), tuple(options)) if problem else None
    end = f"the run ends at step {last}, so no step would be trained"
    return f"{path} is at step {step_of(path)}, and {end}. {LONGER}"


MAX_EPOCHS = 100


@warning(
    "TRN009",
    fields=("train.max_steps",),
    title="max_steps covers more than 100 epochs",
    source="arithmetic; small models memorize their training set within about ten epochs",
    fails_on=Example({**STEPS, "train.max_steps": 100_000}),
    passes_on=Example({**STEPS, "train.max_steps": 500}),
)
def too_many_epochs(case: Case) -> Violation | None:
    """After many epochs the model memorizes the training examples and generalizes worse."""
    examples, steps, batch = case.run.num_train_examples, case.run.total_steps, case.run.global_batch_size
    if not examples or not steps or case.spec.train.duration != "steps" or case.spec.data.packing:
        return None
    per_step = min(batch, examples)  # a step never goes beyond the end of an epoch
    epochs = steps * per_step / examples
    if epochs <= MAX_EPOCHS or not case.facts.counts_are_exact:
        return None
    enough = max(1, 10 * examples // per_step)
    message = (
        f"{counted(steps, 'step')} with a global batch size of {batch:,} are {epochs:,.0f} epochs over "
        f"{counted(examples, 'training example')}."
    )
    return Violation(message, (Fix(set_to("train.max_steps", enough), {"train.max_steps": enough}, False),))


@warning(
    "TRN010",
    fields=("train.max_hours",),
    title="The max run time is shorter than the predicted time of the run",
    source="the time estimate",
    fails_on=Example({**STEPS, "train.max_steps": 1_000_000, "train.max_hours": 0.1}, TWO_H100, DEMO),
    passes_on=Example({**STEPS, "train.max_steps": 1_000_000}, TWO_H100, DEMO),
)
def max_hours_shorter_than_run(case: Case) -> Violation | None:
    """At its max run time, a run saves a checkpoint and stops without a final model; Resume continues it. The max run
    time is compared with the lower end of the predicted time."""
    hours, limit = case.spec.train.max_hours, case.time.time_limit
    if not hours or case.spec.launch.trainer != "footplate" or limit is None or case.time.run_seconds is None:
        return None
    least, predicted, most = case.time.run_seconds
    if least <= 3600 * hours:
        return None
    message = (
        f"train.max_hours stops the run after {duration(3600 * hours)}. It is predicted to take {duration(predicted)}, "
        f"at least {duration(least)} and at most {duration(most)}, so it would stop unfinished."
    )
    enough = limit / 3600
    set_enough = Fix(f"Set max run time to {enough:g} hours", {"train.max_hours": enough})
    unlimited = Fix("Remove the max run time", {"train.max_hours": 0.0}, False)
    return Violation(message, (set_enough if enough <= MOST_HOURS else unlimited,))


@warning(
    "TRN011",
    fields=("train.half_lr_retries", "save.strategy", "save.steps", "save.only_model"),
    title="Retries have no checkpoint to continue from",
    source="Footplate's own: a retry continues from a checkpoint with optimizer state from before the problem",
    fails_on=Example({**STEPS, "train.max_steps": 200, "train.half_lr_retries": 1, "save.strategy": "no"}),
    passes_on=Example(
        {**STEPS, "train.max_steps": 200, "train.half_lr_retries": 1, "save.strategy": "steps", "save.steps": 50}
    ),
)
def retries_without_checkpoint(case: Case) -> Violation | None:
    """A retry starts from a checkpoint from before the problem, with half the learning rate. Without such a checkpoint
    there is no retry: the run ends as diverged."""
    save, steps = case.spec.save, case.run.total_steps
    if not case.spec.train.half_lr_retries or save.resume_from == "path" or case.spec.launch.trainer != "footplate":
        return None
    interval = {"steps": save.steps, "epoch": case.run.steps_per_epoch}.get(save.strategy)
    if not case.run.engine.restores_optimizer(case.spec):
        return Violation(f"{case.strategy.label} cannot restore the optimizer state of this run, so it has no retries.")
    if save.strategy == "no":
        why = "save.strategy is no"
    elif save.only_model:
        why = "save.only_model is on"
    elif interval and steps and interval >= steps:
        why = f"the first checkpoint is that of the last step, {steps:,}"
    else:
        return None
    often = min(save.steps, max(1, (steps or save.steps) // 4))
    patch = {"save.strategy": "steps", "save.steps": often, "save.only_model": False}
    fix = Fix(f"Save full checkpoints every {counted(often, 'step')}", patch)
    has_room = case.estimated(case.with_patch(patch)).disk_bytes <= case.machine.disk_free_bytes
    return Violation(f"train.half_lr_retries is set, but {why}.", (fix,) if has_room else ())


@error(
    "OUT001",
    fields=("save.total_limit", "save.strategy", "save.final_model"),
    title="Not enough free disk space for the checkpoints",
    source="arithmetic: the disk part of the estimate, compared with the free space",
    fails_on=Example({"method.kind": "full", "train.learning_rate": 2e-5}, FULL_DISK),
    passes_on=Example(machine=FULL_DISK),
    at_start=True,
)
def insufficient_disk_space(case: Case) -> Violation | None:
    """If the disk fills up, the run fails while it saves, and the checkpoint that it writes is incomplete."""
    need, free = case.estimate.disk_bytes, case.machine.disk_free_bytes
    if need <= free:
        return None
    last = {"save.total_limit": 1} | ({"save.keep_best": 0} if case.spec.save.keep_best else {})
    candidates = [
        Fix("Keep only the last checkpoint", last, cost="no earlier checkpoint to go back to"),
        Fix("Save only the model", {**last, "save.only_model": True}, False, "cannot be resumed"),
        Fix(
            "Write no checkpoints",
            {"save.strategy": "no", "save.final_model": True, "save.load_best_model_at_end": False},
            False,
            "nothing is saved before the end",
        ),
        Fix(
            "Save nothing",
            {"save.strategy": "no", "save.final_model": False, "save.load_best_model_at_end": False},
            False,
            "only metrics and logs are kept",
        ),
    ]
    fixes = [fix for fix in candidates if case.estimated(case.with_patch(fix.patch)).disk_bytes <= free][:2]
    what = "Checkpoints and the final model" if case.spec.save.final_model else "Checkpoints"
    text = f"{what} need {data_size(need)}, and {data_size(free)} is free"
    if not case.machine.name:
        return Violation(f"{text}.", tuple(fixes))
    text += f" according to the description of the machine ({case.machine.name})."
    return Violation(f"{text} If it has more, describe it with more free disk space (disk_gib).", tuple(fixes))


@warning(
    "OUT002",
    fields=("save.strategy", "save.final_model"),
    title="The trained model would not be saved",
    source="arithmetic: neither checkpoints nor the final model are saved",
    fixes=(Fix("Save the final model", {"save.final_model": True}),),
    fails_on=Example({"save.strategy": "no", "save.final_model": False}),
    passes_on=Example({"save.strategy": "no"}),
)
def nothing_saved(case: Case) -> str | None:
    """Only metrics, logs and generations remain after the run."""
    if case.spec.save.strategy != "no" or case.spec.save.final_model:
        return None
    return "save.strategy is no and save.final_model is off."


@warning(
    "DAT040",
    fields=("eval.num_generations", "data.format"),
    title="Plain text has no prompts to generate from",
    source="the examples: plain text does not mark any part as a prompt",
    fixes=(Fix("Disable generations", {"eval.num_generations": 0}),),
    fails_on=Example({**USER_DATA, "data.format": "text", "eval.num_generations": 4}, facts=PLAIN_TEXT),
    passes_on=Example({**USER_DATA, "data.format": "text", "eval.num_generations": 0}, facts=PLAIN_TEXT),
)
def generations_from_plain_text(case: Case) -> str | None:
    """Generations continue the prompts of validation examples, and plain text is not divided into prompts and
    completions."""
    count, facts = case.spec.eval.num_generations, case.facts
    if not registry.STAGES[case.spec.train.stage].generates or not count or case.run.num_eval_examples == 0:
        return None
    if any(each.format != "text" for each in facts.datasets or (facts,)):
        return None
    return f"eval.num_generations is {count}, but the data is plain text without prompts: nothing would be generated."
