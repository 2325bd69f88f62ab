"""Rules of further keys that the engine refuses, or that nobody reads: tables of what does not go together.

Floor 3. Imports: below.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from backend import registry
from backend.config import merge
from backend.engines import fsdp
from backend.modelspec import ModelShape
from backend.rules.base import Case, Example, Fix, Violation, names, reasons, rule
from backend.rules.distributed.extra_config import FINE, KEYS, dropping, given_keys, value_at
from backend.rules.distributed.sharding import SMALL
from backend.rules.examples import EQUIPPED_TWO, TWO_H100

FSDP2 = {"parallel.strategy": "fsdp2"}
ZERO, BF16 = "zero_optimization", "bf16.bf16_"
TRUE, FALSE = ("true", "yes", "y", "t", "on", "1"), ("false", "no", "n", "f", "off", "0")


def _deepspeed(given: Mapping[str, Any], **more: Any) -> Example:
    return Example({"parallel.strategy": "zero2", KEYS: json.dumps(given), **more}, TWO_H100)


def _fsdp(given: Mapping[str, Any], **more: Any) -> Example:
    return Example({**FSDP2, KEYS: json.dumps(given), **more}, EQUIPPED_TWO, SMALL)


def _on(value: Any) -> bool:
    return str(value).lower() in TRUE


Refuses = Callable[[Case, Callable[[str], Any]], bool]


def _offloads(case: Case) -> bool:
    return bool(case.strategy.zero_stage) and case.spec.parallel.offload_optimizer != "none"


def _master(case: Case, at: Callable[[str], Any]) -> bool:
    """Half masters are for whole state in RAM, or for a state on the device that is as short."""
    short = at(f"{BF16}optimizer_states") is True
    return not case.strategy.zero_stage or short == _offloads(case)


def _longer(case: Case, at: Callable[[str], Any]) -> bool:
    """Whether ZeRO-1 adds the gradients of bf16 up in fp32, which is another optimizer of DeepSpeed's."""
    asked = NUMBERS.get(str(at("data_types.grad_accum_dtype")))
    return case.strategy.zero_stage == 1 and case.run.compute_dtype == "bf16" and asked == "fp32"


def _reduces(case: Case, at: Callable[[str], Any]) -> bool:
    """Whether gradients are scattered as they are averaged, of which each device would keep its part alone."""
    mean = str(at("gradient_allreduce_op")).lower() != "sum"
    return mean and case.strategy.zero_stage in (2, 3) and at(f"{ZERO}.reduce_scatter") is not False


NUMBERS = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}

# A key, when DeepSpeed refuses it (given a way to look up others), and because of what. Seen on two processes, or read
# in deepspeed 0.19 zero/config.py, runtime/config.py, runtime/base_optimizer.py, runtime/engine.py.
REFUSED: tuple[tuple[str, Refuses, str], ...] = (
    (
        f"{ZERO}.offload_optimizer.ratio",
        lambda case, at: _number(at(f"{ZERO}.offload_optimizer.ratio")) < 1 and case.strategy.zero_stage != 3,
        "only ZeRO-3 keeps a part of the state on the device",
    ),
    (
        "gradient_allreduce_op",
        lambda case, at: str(at("gradient_allreduce_op")).lower() == "sum" and case.strategy.zero_stage == 3,
        "ZeRO-3 knows the mean alone",
    ),
    (
        f"{ZERO}.compute_grad_norm",
        lambda case, at: (
            at(f"{ZERO}.compute_grad_norm") is False
            and (
                case.strategy.zero_stage not in (1, 2)
                or bool(case.spec.train.max_grad_norm)
                or _offloads(case)
                or _longer(case, at)
            )
        ),
        "it goes with ZeRO-1 and 2, without gradient clipping, offloading, or ZeRO-1's gradients in fp32",
    ),
    (
        f"{BF16}master_weights_and_grads",
        lambda case, at: at(f"{BF16}master_weights_and_grads") is True and _master(case, at),
        "it goes with optimizer state in RAM, or else with bf16_optimizer_states, and a stage above 0",
    ),
    (
        "fp16.fp16_master_weights_and_grads",
        lambda case, at: at("fp16.fp16_master_weights_and_grads") is True and not _offloads(case),
        "it goes with optimizer state in RAM",
    ),
    (
        f"{BF16}optimizer_states",
        lambda case, at: at(f"{BF16}optimizer_states") is True and at(f"{BF16}master_weights_and_grads") is not True,
        "it needs bf16_master_weights_and_grads",
    ),
    (
        "data_types.param_dtype",
        lambda case, at: (
            NUMBERS.get(str(at("data_types.param_dtype")), case.run.compute_dtype) != case.run.compute_dtype
        ),
        "the run computes in other numbers",
    ),
    (
        "data_types.grad_accum_dtype",
        lambda case, at: (
            not case.strategy.zero_stage
            and NUMBERS.get(str(at("data_types.grad_accum_dtype")), case.run.compute_dtype) != case.run.compute_dtype
        ),
        "without a stage gradients are added up as they are computed",
    ),
    (
        "gradient_predivide_factor",
        lambda case, at: _number(at("gradient_predivide_factor")) != 1 and _reduces(case, at),
        "it needs zero_optimization.reduce_scatter to be false",
    ),
    (
        "prescale_gradients",
        lambda case, at: at("prescale_gradients") is True and _reduces(case, at),
        "it needs zero_optimization.reduce_scatter to be false",
    ),
)


# What DeepSpeed takes apart as a table (runtime/config.py); a table of ours may lie there too, and would be replaced.
TABLES = (
    "activation_checkpointing", "aio", "autotuning", "bf16", "checkpoint", "comms_logger", "compile", "csv_monitor",
    "data_efficiency", "data_types", "flops_profiler", "fp16", "hybrid_engine", "optimizer", "pipeline", "scheduler",
    "tensor_parallel", "tensorboard", "wandb", "zero_optimization",
)  # fmt: skip


def _number(value: Any) -> float:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else 1


@rule(
    "STR040",
    "error",
    fields=(KEYS,),
    title="DeepSpeed refuses such keys together",
    source="deepspeed 0.19 runtime/zero/config.py, runtime/config.py, runtime/engine.py, runtime/base_optimizer.py, "
    "runtime/zero/stage_1_and_2.py: assertions and ValueError, on two processes",
    fails_on=_deepspeed({"prescale_gradients": True}),
    passes_on=_deepspeed({"prescale_gradients": True, ZERO: {"reduce_scatter": False}}),
    proof="launch",
)
def refused_together(case: Case) -> Violation | None:
    """Some keys are for one stage, or go with others alone. DeepSpeed looks when it starts, after the model was
    loaded."""
    given = given_keys(case)
    found = [
        (path, why)
        for path, refuses, why in REFUSED
        if value_at(given, path) != merge.AUTO and refuses(case, lambda path: value_at(given, path))
    ]
    found += [(name, "a table belongs there") for name in TABLES if not isinstance(given.get(name, {}), Mapping)]
    if not found:
        return None
    return Violation(reasons(found), (Fix("Without", dropping(given, [path for path, _ in found]), safe=False),))


@rule(
    "STR041",
    "error",
    fields=(KEYS, "parallel.strategy"),
    title="Slices that only DeepSpeed knows of",
    source="deepspeed 0.19 module_inject/auto_tp.py, on two processes: the trained model that is saved is the first "
    "rank's half",
    fails_on=_deepspeed({"tensor_parallel": {"autotp_size": 2}}),
    passes_on=FINE,
)
def hidden_slices(case: Case) -> Violation | None:
    """DeepSpeed slices every layer when it starts. Rows of a step, memory, and what is saved are then taken for those
    of whole layers: a part of the model would be kept, and the rest thrown away."""
    given = given_keys(case)
    path = "tensor_parallel.autotp_size"
    size = value_at(given, path)
    if size == merge.AUTO or _number(size) <= 1:
        return None
    return Violation(
        f"autotp_size is {size}.", (Fix("Whole layers", dropping(given, ["tensor_parallel"]), safe=False),)
    )


def _plain(given: Mapping[str, Any]) -> dict[str, Any]:
    """FSDP's keys as transformers reads them: without the prefix of accelerate's."""
    return {name.removeprefix("fsdp_"): value for name, value in given.items()}


def _as_given(given: Mapping[str, Any], found: list[str]) -> list[str]:
    """The names under which these keys were given."""
    return [name for name in given if name.removeprefix("fsdp_") in found]


SWITCHES = ("activation_checkpointing", "cpu_ram_efficient_loading")
FIRST_SWITCHES = ("forward_prefetch", "use_orig_params", "sync_module_states", "limit_all_gathers")
POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
SHARDINGS = (*(row.label for row in registry.SHARDINGS.values()), "HYBRID_SHARD_ZERO2")


def _classes(value: Any) -> list[str]:
    return [str(name) for name in value] if isinstance(value, list) else str(value).split(",")


def _containers(said: Mapping[str, Any], shape: ModelShape | None) -> bool:
    """Whether a whole list of layers would be wrapped, by its size."""
    size = _number(said.get("min_num_params", 0))
    by_size = said.get("auto_wrap_policy") == POLICIES[1] and "min_num_params" in said and size > 0
    return by_size and shape is not None and shape.layers * shape.layer_parameters > size


def _impossible(case: Case, said: Mapping[str, Any]) -> dict[str, str]:
    """Keys with values that end the run, and why."""
    second, known = case.strategy.fsdp_version == 2, case.facts.classes
    found: dict[str, str] = {}
    states = (*fsdp.STATE_DICTS.values(), *(() if second else ("LOCAL_STATE_DICT",)))
    if str(said.get("state_dict_type", states[0])).upper() not in states:
        found["state_dict_type"] = f"{said['state_dict_type']} is none of {names(states)}"
    reshard = str(said.get("reshard_after_forward", "true" if second else SHARDINGS[0]))
    if reshard.lower() not in (*TRUE, *FALSE) if second else reshard.upper() not in SHARDINGS:
        found["reshard_after_forward"] = f"{reshard} is " + ("neither true nor false" if second else "no way to shard")
    for name in (*SWITCHES, *(() if second else FIRST_SWITCHES)):
        if str(said.get(name, "true")).lower() not in (*TRUE, *FALSE):
            found[name] = "it is neither true nor false"
    if said.get("auto_wrap_policy", POLICIES[0]) not in POLICIES:
        found["auto_wrap_policy"] = f"{said['auto_wrap_policy']} is none of {names(POLICIES)}"
    missing = [name for name in _classes(said.get("transformer_layer_cls_to_wrap", [])) if name not in known]
    if known and missing:
        found["transformer_layer_cls_to_wrap"] = f"the model has no {names(missing)}"
    if _on(said.get("cpu_ram_efficient_loading")) and case.spec.precision.compute == "fp8":
        found["cpu_ram_efficient_loading"] = "fp8 takes weights that every rank has read"
    if said.get("xla"):
        found["xla"] = "it is for TPUs"
    if second and _containers(said, case.shape):
        found["min_num_params"] = "the list of layers is larger, and FSDP2 takes no list for a layer"
    return found


@rule(
    "STR042",
    "error",
    fields=(KEYS,),
    title="FSDP does not take these values",
    source="transformers 5.23 training_args.py _process_fsdp_args, accelerate 1.15 utils/dataclasses.py "
    "FullyShardedDataParallelPlugin, torch 2.13 distributed/fsdp fully_shard: ValueError",
    fails_on=_fsdp({"state_dict_type": "LOCAL_STATE_DICT"}),
    passes_on=_fsdp({"state_dict_type": "SHARDED_STATE_DICT"}),
    proof="launch",
)
def impossible_values(case: Case) -> Violation | None:
    """Files for the first FSDP, and for other programs, have values that the second one, or the trainer, refuses."""
    given = given_keys(case, "fsdp")
    found = _impossible(case, _plain(given)) if given else {}
    if not found:
        return None
    return Violation(reasons(found.items()), (Fix("Without", dropping(given, _as_given(given, list(found)))),))


# What transformers 5.23 training_args.py, _process_fsdp_args, looks at.
READ = {
    "version", "min_num_params", "transformer_layer_cls_to_wrap", "xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt",
    "xla_fsdp_settings", "cpu_offload", "auto_wrap_policy", "cpu_ram_efficient_loading", "state_dict_type",
    "activation_checkpointing", "reshard_after_forward",
}  # fmt: skip
READ_ONCE = {*FIRST_SWITCHES, "backward_prefetch"}


@rule(
    "STR043",
    "warning",
    fields=(KEYS,),
    title="Keys that nobody reads",
    source="transformers 5.23 training_args.py _process_fsdp_args hands on what it knows, and passes over the rest",
    fails_on=_fsdp({"ignored_modules": "lm_head"}),
    passes_on=_fsdp({"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}),
)
def unread(case: Case) -> Violation | None:
    """The trainer passes over keys of FSDP's that it does not know, without a word: some are for the first FSDP, some
    for accelerate's own file, some are typing errors."""
    given = given_keys(case, "fsdp")
    known = READ if case.strategy.fsdp_version == 2 else READ | READ_ONCE
    found = [name for name in given if name.removeprefix("fsdp_") not in known]
    return (
        Violation(f"{names(found)} would have no effect.", (Fix("Without", dropping(given, found)),)) if found else None
    )


@rule(
    "STR044",
    "warning",
    fields=(KEYS,),
    title="FSDP would gather the whole model at once",
    source="accelerate 1.15 utils/fsdp_utils.py fsdp2_prepare_auto_wrap_policy; utils/dataclasses.py "
    "set_auto_wrap_policy: a size of zero is ignored in silence",
    fails_on=_fsdp({"auto_wrap_policy": "NO_WRAP"}),
    passes_on=_fsdp({"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}),
)
def one_unit(case: Case) -> Violation | None:
    """Weights are gathered unit by unit. Where the model is one unit, each device has to hold all of it in a step, and
    the estimate is about layers."""
    given = given_keys(case, "fsdp")
    said = _plain(given)
    policy = said.get("auto_wrap_policy")
    sized = policy == POLICIES[1] and not said.get("min_num_params")
    if policy != POLICIES[2] and not sized:
        return None
    fix = Fix("Layer by layer", dropping(given, _as_given(given, ["auto_wrap_policy", "min_num_params"])))
    return Violation(f"auto_wrap_policy is {policy}{' without a size' if sized else ''}.", (fix,))
