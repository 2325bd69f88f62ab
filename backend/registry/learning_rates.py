"""Arguments of schedules, and usual learning rates by stage and method; sources: peft's, trl's and LLaMA-Factory's
examples, and the papers that the rules MTH010 and STG008 cite."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from backend.registry.optimizers import OPTIMIZERS


class Rates(NamedTuple):
    """Learning rates of a method: the limits beyond which a rate is most likely a mistake, the usual range, and the
    rate to start with."""

    lowest: float
    highest: float
    usual: tuple[float, float]
    first: float

    def raised(self, factor: float) -> Rates:
        """Those of models that need `factor` times as high a rate, but for the lower limits."""
        least, most = self.usual
        return Rates(self.lowest, factor * self.highest, (least, factor * most), factor * self.first)


SFT_RATES: Mapping[str, Rates] = {
    "lora": Rates(2e-5, 5e-3, (1e-4, 5e-4), 2e-4),
    "freeze": Rates(1e-7, 1e-3, (1e-5, 1e-4), 5e-5),
    "full": Rates(1e-7, 5e-4, (1e-5, 5e-5), 2e-5),
}
LARGE, HIGHEST_OF_LARGE = 10**9, 1e-4  # parameters of a large model, and the highest rate for its full SFT
# Small models from random weights need high rates; the first one is that of the method.
PRETRAINING_RATES = Rates(0.0, 1e-2, (1e-5, 1e-3), 2e-5)
PREFERENCE_RATES: Mapping[str, Rates] = {
    "lora": Rates(1e-7, 1e-4, (1e-6, 2e-5), 5e-6),
    "freeze": Rates(1e-8, 2e-5, (5e-7, 5e-6), 1e-6),
    "full": Rates(1e-9, 1e-5, (5e-7, 5e-6), 5e-7),
}
LOW_RATE_STAGES = ("dpo", "kto", "orpo")


def usual_learning_rate(stage: str, method: str) -> float:
    """The learning rate to start with."""
    return (PREFERENCE_RATES if stage in LOW_RATE_STAGES else SFT_RATES)[method].first


def lower_learning_rate(stage: str, method: str, optimizer: str, rate: float, factor: float) -> float:
    """A learning rate for a run that diverged with `rate`: `factor` x the rate, or the usual rate if that product is
    still above the highest one."""
    rates = (PREFERENCE_RATES if stage in LOW_RATE_STAGES else SFT_RATES)[method]
    highest = PRETRAINING_RATES.highest if stage == "pretraining" else rates.highest
    lower = float(f"{rate * factor:.3g}")
    return rates.first if lower > highest and OPTIMIZERS[optimizer].is_adaptive else lower


def warmup_steps(option: float, steps: int) -> int:
    """The number of steps that train.warmup_steps stands for, as in transformers' TrainingArguments."""
    return int(option) if option >= 1 else math.ceil(steps * option)


def scheduler_arguments(schedule: str, steps: int, warmup: int) -> dict[str, Any]:
    """The arguments of transformers' scheduler for a run of `steps` with `warmup` steps; empty for most schedules."""
    if schedule == "cosine_with_min_lr":
        return {"min_lr_rate": 0.1}
    if schedule == "warmup_stable_decay":
        return {"num_decay_steps": min(math.ceil(steps / 10), max(0, steps - warmup)), "decay_type": "linear"}
    return {}
