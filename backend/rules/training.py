"""Rules of the training's arithmetic: steps, warm-up, evaluation, checkpoints, disk.

Floor 3. Imports: below.
"""

from __future__ import annotations

from dataclasses import replace

from backend.rules.base import Case, Example, Fix, Violation, amount, counted, rule
from backend.rules.examples import DEMO, FULL_DISK

STEPS = {"train.duration": "steps"}
BY_STEPS = {"eval.strategy": "steps", "save.strategy": "steps", "save.load_best_model_at_end": True}


@rule(
    "TRN001",
    "warning",
    fields=("train.per_device_train_batch_size", "train.gradient_accumulation_steps", "launch.nproc_per_node"),
    title="One step takes more rows than there are",
    source="transformers 5.23 trainer.py: the last batch of a pass is smaller, and a pass is at least one step",
    fails_on=Example({"train.gradient_accumulation_steps": 64, "train.per_device_train_batch_size": 16}),
    passes_on=Example({"train.gradient_accumulation_steps": 4, "train.per_device_train_batch_size": 4}),
)
def batch_beyond_data(case: Case) -> Violation | None:
    """A pass over the data is then a single step, smaller than asked for: the run takes as many steps as passes."""
    rows, batch = case.run.num_train_examples, case.run.global_batch_size
    if rows is None or rows < 1 or batch <= rows or case.spec.data.packing or not case.facts.exact:
        return None
    size = min(case.spec.train.per_device_train_batch_size, max(1, rows // case.run.data_parallel_size))
    accumulation = max(1, rows // (size * case.run.data_parallel_size))
    patch = {"train.per_device_train_batch_size": size, "train.gradient_accumulation_steps": accumulation}
    if size * accumulation * case.run.data_parallel_size > rows:
        patch = {}
    fixes = (
        (Fix(f"{counted(size * accumulation * case.run.data_parallel_size, 'row')} a step", patch, False),)
        if patch
        else ()
    )
    return Violation(f"{counted(batch, 'row')} a step, and {counted(rows, 'row')} in all.", fixes)


@rule(
    "TRN002",
    "warning",
    fields=("train.warmup_steps",),
    title="Warm-up longer than the run",
    source="transformers 5.23 optimization.py: the rate rises for so many steps",
    fixes=(Fix("3 % of the steps", {"train.warmup_steps": 0.03}, safe=False),),
    fails_on=Example({**STEPS, "train.max_steps": 50, "train.warmup_steps": 100.0}),
    passes_on=Example({**STEPS, "train.max_steps": 500, "train.warmup_steps": 100.0}),
)
def long_warmup(case: Case) -> str | None:
    """The learning rate would never reach its peak."""
    warmup, steps = case.spec.train.warmup_steps, case.run.total_steps
    if steps is None or warmup < 1 or warmup < steps or case.spec.train.lr_scheduler_type == "constant":
        return None
    return f"{warmup:g} steps of warm-up, in a run of {steps:,}."


@rule(
    "TRN003",
    "advice",
    fields=("train.lr_scheduler_type", "train.warmup_steps"),
    title="This schedule has no warm-up",
    source="transformers 5.23 optimization.py: get_constant_schedule takes no warm-up",
    fixes=(Fix("Constant after warm-up", {"train.lr_scheduler_type": "constant_with_warmup"}, safe=False),),
    fails_on=Example({"train.lr_scheduler_type": "constant", "train.warmup_steps": 10.0}),
    passes_on=Example({"train.lr_scheduler_type": "constant_with_warmup", "train.warmup_steps": 10.0}),
)
def ignored_warmup(case: Case) -> str | None:
    """The constant schedule begins at its peak, whatever warm-up says."""
    train = case.spec.train
    asked = train.warmup_steps not in (0, 0.03)  # 0.03 is the default, which nobody asked for
    return (
        f"Warm-up of {train.warmup_steps:g} has no effect." if train.lr_scheduler_type == "constant" and asked else None
    )


def _interval(case: Case, every: int, name: str, what: str) -> Violation | None:
    steps = case.run.total_steps
    if steps is None or every <= steps:
        return None
    sooner = max(1, steps // 4)
    return Violation(
        f"Every {counted(every, 'step')}, in a run of {steps:,}: {what}.",
        (Fix(f"Every {counted(sooner, 'step')}", {name: sooner}),),
    )


@rule(
    "TRN004",
    "warning",
    fields=("eval.steps",),
    title="The run ends before the first evaluation",
    source="arithmetic",
    fails_on=Example({**STEPS, "train.max_steps": 20, "eval.strategy": "steps"}),
    passes_on=Example({**STEPS, "train.max_steps": 100, "eval.strategy": "steps"}),
)
def no_evaluation(case: Case) -> Violation | None:
    """Only the end would be evaluated, so there is no curve."""
    if case.spec.eval.strategy != "steps" or case.spec.save.load_best_model_at_end:
        return None
    return _interval(case, case.spec.eval.steps, "eval.steps", "only its end is evaluated")


@rule(
    "TRN005",
    "advice",
    fields=("save.steps",),
    title="The run ends before the first checkpoint",
    source="transformers 5.23 trainer_callback.py: a checkpoint is also written at the end",
    fails_on=Example({**STEPS, "train.max_steps": 20, "save.strategy": "steps"}),
    passes_on=Example({**STEPS, "train.max_steps": 200, "save.strategy": "steps"}),
)
def no_checkpoint(case: Case) -> Violation | None:
    """A run that fails on the way could only begin again."""
    if case.spec.save.strategy != "steps" or case.spec.save.load_best_model_at_end:
        return None
    return _interval(case, case.spec.save.steps, "save.steps", "only its end is saved")


@rule(
    "TRN006",
    "error",
    fields=("save.load_best_model_at_end", "eval.strategy", "eval.steps", "save.strategy", "save.steps"),
    title="Checkpoints that are never evaluated",
    source="transformers 5.23 training_args.py: load_best_model_at_end needs both at the same steps",
    fails_on=Example({**BY_STEPS, "eval.steps": 40, "save.steps": 100}),
    passes_on=Example({**BY_STEPS, "eval.steps": 50, "save.steps": 100}),
    proof="launch",
)
def best_unseen(case: Case) -> Violation | None:
    """The best checkpoint is the one with the lowest validation loss, so each must be evaluated when it is saved."""
    if not case.spec.save.load_best_model_at_end:
        return None
    if case.spec.save.strategy != case.spec.eval.strategy:
        words = {"steps": f"every {counted(case.spec.save.steps, 'step')}", "epoch": "every epoch"}
        patch = {"eval.strategy": case.spec.save.strategy, "eval.steps": case.spec.save.steps}
        return Violation(
            "One goes by steps and the other by epochs.", (Fix(f"Evaluate {words[case.spec.save.strategy]}", patch),)
        )
    if case.spec.save.strategy != "steps" or case.spec.save.steps % case.spec.eval.steps == 0:
        return None
    fitting = max(1, round(case.spec.save.steps / case.spec.eval.steps)) * case.spec.eval.steps
    message = f"Saved every {counted(case.spec.save.steps, 'step')}, evaluated every {case.spec.eval.steps:,}."
    return Violation(message, (Fix(f"Save every {counted(fitting, 'step')}", {"save.steps": fitting}),))


@rule(
    "TRN007",
    "advice",
    fields=("save.only_model",),
    title="These checkpoints cannot be resumed from",
    source="transformers 5.23 trainer.py: without optimizer.pt the optimizer would silently begin anew",
    fixes=(Fix("Whole checkpoints", {"save.only_model": False}),),
    fails_on=Example({"save.only_model": True}),
    passes_on=Example(),
)
def weights_only(case: Case) -> str | None:
    """A run that stops or fails begins again at step 0."""
    return "They hold weights alone." if case.spec.save.only_model and case.spec.save.strategy != "no" else None


@rule(
    "TRN008",
    "error",
    fields=("save.resume_path",),
    title="The checkpoint cannot be used",
    source="the folder itself",
    fixes=(Fix("Without it", {"save.resume_from": "latest"}, safe=False),),
    fails_on=Example({"save.resume_from": "path"}, facts=replace(DEMO, checkpoint="No checkpoint folder is named.")),
    passes_on=Example({"save.resume_from": "path", "save.resume_path": "runs/a/checkpoints/checkpoint-20"}),
    proof="launch",
)
def bad_checkpoint(case: Case) -> str | None:
    """It must be a whole checkpoint-N folder of a run with the same method."""
    return case.facts.checkpoint if case.spec.save.resume_from == "path" and case.facts.checkpoint else None


@rule(
    "TRN009",
    "warning",
    fields=("train.max_steps",),
    title="Very many passes over the data",
    source="arithmetic; small models learn by heart within some ten passes",
    fails_on=Example({**STEPS, "train.max_steps": 100_000}),
    passes_on=Example({**STEPS, "train.max_steps": 500}),
)
def many_passes(case: Case) -> Violation | None:
    """A model that sees the same rows too often repeats them instead of learning from them."""
    rows, steps = case.run.num_train_examples, case.run.total_steps
    if not rows or not steps or case.spec.train.duration != "steps" or case.spec.data.packing or not case.facts.exact:
        return None
    passes = steps * case.run.global_batch_size / rows
    if passes <= 100:
        return None
    enough = max(1, 10 * rows // case.run.global_batch_size)
    return Violation(
        f"{passes:,.0f} passes over {counted(rows, 'row')}.",
        (Fix(counted(enough, "step"), {"train.max_steps": enough}, False),),
    )


@rule(
    "OUT001",
    "error",
    fields=("save.total_limit", "save.strategy", "save.final_model"),
    title="The disk is too small",
    source="arithmetic: the estimate's rows of disk against what is free",
    fails_on=Example({"method.kind": "full", "train.learning_rate": 2e-5}, FULL_DISK),
    passes_on=Example(machine=FULL_DISK),
)
def full_disk(case: Case) -> Violation | None:
    """A disk that fills up ends the run while it saves, and may cut a checkpoint off."""
    need, free = case.estimate.disk_bytes, case.machine.disk_free_bytes
    if need <= free:
        return None
    saved = case.spec.save.final_model
    once = case.spec.launch.rendezvous != "elastic"  # a run that starts again by itself needs them
    tries = [
        Fix("Keep one checkpoint", {"save.total_limit": 1}, cost="no way further back"),
        Fix("Weights only", {"save.total_limit": 1, "save.only_model": True}, False, "cannot be resumed"),
        Fix(
            "No checkpoints",
            {"save.strategy": "no", "save.final_model": True, "save.load_best_model_at_end": False},
            once,
            "nothing before the end",
        ),
        Fix(
            "Save nothing",
            {"save.strategy": "no", "save.final_model": False, "save.load_best_model_at_end": False},
            False,
            "keeps nothing but the log",
        ),
    ]
    fixes = [f for f in tries if case.estimated(case.with_patch(f.patch)).disk_bytes <= free][:2]
    kept = "checkpoints and the trained model" if saved else "checkpoints"
    return Violation(f"{amount(need)} for {kept}, and {amount(free)} free.", tuple(fixes))


@rule(
    "OUT002",
    "warning",
    fields=("save.strategy", "save.final_model"),
    title="Nothing will be kept",
    source="arithmetic: neither checkpoints nor the model are saved",
    fixes=(Fix("Save the trained model", {"save.final_model": True}),),
    fails_on=Example({"save.strategy": "no", "save.final_model": False}),
    passes_on=Example({"save.strategy": "no"}),
)
def nothing_kept(case: Case) -> str | None:
    """The run ends with its curves and answers, and without what it learned."""
    return "No checkpoints, no model." if case.spec.save.strategy == "no" and not case.spec.save.final_model else None
