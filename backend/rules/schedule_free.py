"""Rules about schedule-free optimizers, which train one set of weights and evaluate their average."""

from __future__ import annotations

from backend.rules.base import Case, Example, Fix, error, warning
from backend.rules.common_fixes import ADAMW
from backend.rules.examples import EQUIPPED, full_spec
from backend.wording import counted

SHORT = full_spec("schedule_free_radam", train__duration="steps")
RECTIFIED_LENGTH = 4.0  # RAdam's updates begin where the length of its moving average of squared gradients exceeds it


@error(
    "OPT027",
    fields=("train.adam_beta1", "train.optim"),
    title="Schedule-free optimizers need a beta1 above 0",
    source="schedulefree 1.4 adamw_schedulefree.py and radam_schedulefree.py, eval(): divides by beta1",
    fixes=(Fix("Set Adam beta1 to 0.9", {"train.adam_beta1": 0.9}, safe=False), ADAMW),
    fails_on=Example(full_spec("schedule_free_adamw", train__adam_beta1=0.0), EQUIPPED),
    passes_on=Example(full_spec("schedule_free_adamw", train__adam_beta1=0.5), EQUIPPED),
    proof="launch",
)
def schedule_free_without_beta1(case: Case) -> str | None:
    """Beta1 interpolates between the weights that are trained and their average. At 0, the average cannot be computed
    from the trained weights, and the run fails when it evaluates or saves."""
    row = case.optimizer
    if not row.swaps_weights_for_eval or "adam_beta1" not in row.reads or case.spec.train.adam_beta1 > 0:
        return None
    return f"train.adam_beta1 is 0, and {row.label} divides by it."


@warning(
    "OPT030",
    fields=("train.optim", "train.max_steps", "train.num_train_epochs", "train.adam_beta2"),
    title="The run ends before RAdam's first update",
    source="schedulefree 1.4 radam_schedulefree.py, step(): with silent_sgd_phase, the learning rate is 0 as long as "
    "the length of the moving average is at most 4",
    fixes=(Fix("Use schedule-free AdamW", {"train.optim": "schedule_free_adamw"}, safe=False), ADAMW),
    manual_fix="Train for more steps.",
    fails_on=Example({**SHORT, "train.max_steps": 4}, EQUIPPED),
    passes_on=Example({**SHORT, "train.max_steps": 5}, EQUIPPED),
)
def schedule_free_radam_without_update(case: Case) -> str | None:
    """RAdam makes no update until its moving average of squared gradients is long enough: in the first 4 steps with an
    adam_beta2 of 0.999, and never with one of 0.6 or less. The run succeeds, but the saved weights are those it began
    with."""
    row, steps, beta2 = case.optimizer, case.run.total_steps, case.spec.train.adam_beta2
    if not row.waits_for_variance or steps is None or _rectified_length(steps, beta2) > RECTIFIED_LENGTH:
        return None
    return (
        f"With train.adam_beta2 {beta2:g}, {row.label} does not change the weights within the "
        f"{counted(steps, 'step')} of this run."
    )


def _rectified_length(step: int, beta2: float) -> float:
    """The length of the moving average after `step` steps, which grows with each step."""
    if beta2 in (0, 1):  # 0: the last gradient alone; 1: no gradient, and a division by 0
        return 1.0
    decayed = beta2**step
    return 2 / (1 - beta2) - 1 - 2 * step * decayed / (1 - decayed)
