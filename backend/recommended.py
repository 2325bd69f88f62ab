"""Values that a demo preset chose for its own model and data, and the usual ones for another model or other data.

A demo preset trains on built-in data: a small model for a few steps, with a high learning rate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from backend.config import RunSpec
from backend.config.options import by_name, edit, get, shown
from backend.registry import usual_learning_rate

DEMO_VALUES = (
    "train.learning_rate",
    "train.duration",
    "data.max_length",
    "eval.steps",
    "save.steps",
)
GENERATIONS = "eval.num_generations"


def recommended_values(
    spec: RunSpec,
    preset: RunSpec,
    num_eval_examples: int | None = None,
    total_steps: Callable[[RunSpec], int | None] = lambda spec: None,
) -> dict[str, Any]:
    """The usual values for what `spec` still has from `preset`, by option; {} unless it is a demo preset whose model or
    data was replaced. There are at most as many generations as validation examples (None: unknown). A run that
    `total_steps` knows to be short is evaluated four times, and saved twice."""
    is_demo = all(dataset.source == "builtin" for dataset in preset.data.datasets)
    if not is_demo or (spec.model, spec.data.name) == (preset.model, preset.data.name):
        return {}
    usual = {name: by_name()[name].default for name in DEMO_VALUES}
    usual["train.learning_rate"] = usual_learning_rate(spec.train.stage, spec.method.kind)
    if num_eval_examples is not None:
        usual[GENERATIONS] = min(get(preset, GENERATIONS), num_eval_examples)
    kept = {name: get(preset, name) for name in usual if shown(spec, by_name()[name])}
    kept = {name: value for name, value in kept.items() if get(spec, name) == value}
    steps = total_steps(edit(spec, {name: usual[name] for name in kept}))
    if steps is not None:
        usual["eval.steps"] = min(usual["eval.steps"], max(1, steps // 4))
        usual["save.steps"] = min(usual["save.steps"], 2 * usual["eval.steps"])
    return {name: usual[name] for name, value in kept.items() if value != usual[name]}
