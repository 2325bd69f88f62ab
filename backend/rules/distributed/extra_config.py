"""Rules of further keys for DeepSpeed and FSDP: an imported file, or keys of one's own, that speak against the form.

Floor 3. Imports: below. What the form cannot say is kept and laid over the engine's file (deepspeed.py, fsdp.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from backend import registry
from backend.config import merge
from backend.rules.base import Case, Example, Fix, Violation, names, rule
from backend.rules.examples import TWO_H100

ZERO2, ZERO3 = {"parallel.strategy": "zero2"}, {"parallel.strategy": "zero3"}
KEYS = "parallel.extra_config"
FINE = Example({**ZERO2, KEYS: '{"wall_clock_breakdown": true}'}, TWO_H100)
# deepspeed 0.19 runtime/config.py raises where it finds one of these.
REMOVED = (
    "nebula", "compression_training", "amp", "quantize_training", "sparse_gradients", "eigenvalue",
    "sparse_attention", "elasticity", "graph_harvesting", "curriculum_learning", "progressive_layer_drop",
    "zero_optimization.mics_shard_size", "zero_optimization.mics_hierarchical_params_gather",
    "zero_optimization.zeropp_loco_param",
)  # fmt: skip
GATHER = "zero_optimization.stage3_gather_16bit_weights_on_model_save"


def _bad(given: Mapping[str, Any], **more: Any) -> Example:
    return Example({**ZERO3, KEYS: json.dumps(given), **more}, TWO_H100)


def given_keys(case: Case, engine: str = "deepspeed") -> dict[str, Any]:
    """The further keys of a run by this engine."""
    return merge.parse(case.spec.parallel.extra_config) if case.strategy.engine == engine else {}


def value_at(table: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path; "auto" where there is none."""
    for name in path.split("."):
        if not isinstance(table, Mapping) or name not in table:
            return merge.AUTO
        table = table[name]
    return table


def dropping(given: Mapping[str, Any], paths: list[str], field: str = KEYS) -> dict[str, Any]:
    """A patch: the further keys `given` without what stands at these paths."""

    def left(table: Mapping[str, Any], before: str) -> dict[str, Any]:
        found = {}
        for name, value in table.items():
            path = f"{before}{name}"
            if path in paths:
                continue
            inner = left(value, f"{path}.") if isinstance(value, Mapping) else value
            if inner != {} or value == {}:
                found[name] = inner
        return found

    rest = left(given, "")
    return {field: json.dumps(rest, indent=2) if rest else ""}


@rule(
    "STR032",
    "error",
    fields=(KEYS,),
    title="Two numbers for one thing",
    source="transformers 5.23 integrations/deepspeed.py: values that mismatch TrainingArguments raise ValueError",
    fails_on=_bad({"gradient_clipping": 0.5}),
    passes_on=_bad({"gradient_clipping": 1.0}),
    proof="launch",
)
def two_numbers(case: Case) -> Violation | None:
    """What the form has a field for stands as auto in deepspeed.json, and the trainer fills it in. A number of one's
    own must be the same, or the start is refused."""
    spec, train, given = case.spec, case.spec.train, given_keys(case)
    form = {
        "train_micro_batch_size_per_gpu": train.per_device_train_batch_size,
        "gradient_accumulation_steps": train.gradient_accumulation_steps,
        "train_batch_size": train.per_device_train_batch_size * train.gradient_accumulation_steps * case.run.world_size,
        "gradient_clipping": train.max_grad_norm,
        "fp16.enabled": case.run.compute_dtype == "fp16",
        "optimizer.params.lr": train.learning_rate,
        "optimizer.params.betas": [train.adam_beta1, train.adam_beta2],
        "optimizer.params.eps": train.adam_epsilon,
        "optimizer.params.weight_decay": train.weight_decay,
        "scheduler.params.warmup_max_lr": train.learning_rate,
    }
    if registry.PRECISIONS[spec.precision.compute].fp32_master_weights:
        form["bf16.enabled"] = case.run.compute_dtype == "bf16"
    wrong = [path for path, value in form.items() if value_at(given, path) not in (merge.AUTO, value)]
    if not wrong:
        return None
    said = f"{wrong[0]} is {value_at(given, wrong[0])} there and {form[wrong[0]]} in the form"
    more = f", and so on: {names(wrong[1:])}" if wrong[1:] else ""
    return Violation(f"{said}{more}.", (Fix("As the form says", dropping(given, wrong), safe=False),))


@rule(
    "STR033",
    "error",
    fields=(KEYS, "train.optim", "train.lr_scheduler_type"),
    title="DeepSpeed would bring its own",
    source="transformers 5.23 integrations/deepspeed.py deepspeed_optim_sched: with them the trainer makes none",
    fails_on=_bad({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}),
    passes_on=FINE,
)
def own_optimizer(case: Case) -> Violation | None:
    """An optimizer or scheduler in DeepSpeed's file takes the place of the form's, without a word: train.optim,
    LoRA+, what is not decayed, warm-up and schedule have no effect, and its Adam is compiled on first use."""
    given = given_keys(case)
    found: list[str] = [name for name in ("optimizer", "scheduler") if name in given]
    if not found:
        return None
    types = [str(value_at(given, f"{name}.type")) for name in found]
    fix = Fix("The form's", dropping(given, found), safe=types == ["AdamW"])
    return Violation(
        f"The further keys have {names(types)}, so the form's {names(found)} would have no effect.", (fix,)
    )


@rule(
    "STR034",
    "error",
    fields=(KEYS,),
    title="DeepSpeed has removed this",
    source="deepspeed 0.19 runtime/config.py: DeepSpeedConfigError",
    fails_on=_bad({"elasticity": {"enabled": False}}),
    passes_on=FINE,
    proof="launch",
)
def removed_keys(case: Case) -> Violation | None:
    """Older files still have them, and the start ends with an error, also where they are switched off."""
    given = given_keys(case)
    found = [path for path in REMOVED if value_at(given, path) != merge.AUTO]
    return Violation(f"{names(found)} is no more.", (Fix("Without", dropping(given, found)),)) if found else None


@rule(
    "STR035",
    "error",
    fields=(KEYS, "save.final_model"),
    title="The trained model could not be put together",
    source="accelerate 1.15 accelerator.py get_state_dict: Cannot get 16bit model weights because ... is False",
    fails_on=_bad({"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": False}}),
    passes_on=_bad({"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": True}}),
    proof="launch",
)
def ungathered(case: Case) -> Violation | None:
    """Under ZeRO-3 each device has a part of each weight. Where gathering is switched off the run trains to its end,
    and fails when it saves."""
    if (
        case.strategy.zero_stage != 3
        or not case.spec.save.final_model
        or value_at(given_keys(case), GATHER) is not False
    ):
        return None
    fixes = (
        Fix("Gather them", dropping(given_keys(case), [GATHER])),
        Fix("Save checkpoints alone", {"save.final_model": False}, cost="to put together by hand"),
    )
    return Violation("Gathering is switched off in the further keys.", fixes)


@rule(
    "STR036",
    "error",
    fields=(KEYS, "parallel.strategy"),
    title="Further keys change the strategy",
    source="Footplate lays them over the form's file; rules and estimate are about the form",
    fails_on=_bad({"zero_optimization": {"stage": 2}}),
    passes_on=_bad({"zero_optimization": {"stage": 3}}),
)
def other_strategy(case: Case) -> Violation | None:
    """The stage or version, and where optimizer state and weights lie, have fields in the form: another value behind it
    would run what nobody has checked."""
    parallel, row = case.spec.parallel, case.strategy
    given = given_keys(case, row.engine) if row.engine in ("deepspeed", "fsdp") else {}
    form: dict[str, Any] = {
        "zero_optimization.stage": row.zero_stage,
        "zero_optimization.offload_optimizer.device": parallel.offload_optimizer if row.zero_stage else "none",
        "zero_optimization.offload_param.device": parallel.offload_param if row.zero_stage == 3 else "none",
    }
    if row.engine == "fsdp":
        said = {"version": row.fsdp_version, "cpu_offload": parallel.cpu_offload}
        form = {**said, **{f"fsdp_{name}": value for name, value in said.items()}}
    wrong = [path for path, value in form.items() if value_at(given, path) not in (merge.AUTO, value)]
    if not isinstance(given.get("zero_optimization", {}), Mapping):
        wrong = ["zero_optimization"]
    if not wrong:
        return None
    fix = Fix("As the form says", dropping(given, [path.removesuffix(".device") for path in wrong]))
    return Violation(f"{names(wrong)} is another than in the form.", (fix,))


AGAIN = "activation_checkpointing"


@rule(
    "STR039",
    "error",
    fields=(KEYS, "train.activation_checkpointing"),
    title="FSDP's own checkpointing computes other numbers",
    source="accelerate 1.15 utils/fsdp_utils.py: preserve_rng_state=False, so dropout differs the second time; "
    "transformers 5.23 trainer.py refuses it beside the trainer's",
    fails_on=Example({"parallel.strategy": "fsdp2", KEYS: '{"activation_checkpointing": true}'}, TWO_H100),
    passes_on=Example({"parallel.strategy": "fsdp2", "train.activation_checkpointing": True}, TWO_H100),
)
def checkpointed_twice(case: Case) -> Violation | None:
    """It computes a layer's activations again in the backward pass, as train.activation_checkpointing does, but with
    fresh random numbers."""
    given = given_keys(case, "fsdp")
    found = [name for name in (AGAIN, f"fsdp_{AGAIN}") if given.get(name) is True]
    if not found:
        return None
    patch = {**dropping(given, found), "train.activation_checkpointing": True}
    return Violation(f"{found[0]} is on in the further keys.", (Fix("The trainer's instead", patch),))
