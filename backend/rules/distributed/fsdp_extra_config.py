"""Rules of extra config for fsdp.json: values that FSDP refuses, and keys that the Trainer ignores."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from backend.engines.fsdp_keys import SHARDING_STRATEGIES, STATE_DICTS
from backend.modelspec import ModelShape
from backend.rules.base import Case, Example, Fix, Violation, error, names, reasons, warning
from backend.rules.distributed.examples import TINY_FACTS
from backend.rules.distributed.extra_config import EXTRA_CONFIG, extra_config, number, without_keys
from backend.rules.examples import EQUIPPED_TWO, TWO_H100
from backend.runs import FSDP

FSDP2 = {"parallel.strategy": "fsdp2"}
ACTIVATION_CHECKPOINTING = "activation_checkpointing"
# What strtobool of accelerate accepts.
TRUE, FALSE = ("true", "yes", "y", "t", "on", "1"), ("false", "no", "n", "f", "off", "0")
BOOLEAN_KEYS = (ACTIVATION_CHECKPOINTING, "cpu_ram_efficient_loading")
FSDP1_BOOLEAN_KEYS = ("forward_prefetch", "use_orig_params", "sync_module_states", "limit_all_gathers")
TRANSFORMER_WRAP, SIZE_WRAP, NO_WRAP = WRAP_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
# The keys that transformers 5.23 training_args.py, _process_fsdp_args, reads, and those it reads for FSDP1 only.
KNOWN_KEYS = {
    "version", "min_num_params", "transformer_layer_cls_to_wrap", "xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt",
    "xla_fsdp_settings", "cpu_offload", "auto_wrap_policy", "cpu_ram_efficient_loading", "state_dict_type",
    ACTIVATION_CHECKPOINTING, "reshard_after_forward",
}  # fmt: skip
FSDP1_KEYS = {*FSDP1_BOOLEAN_KEYS, "backward_prefetch"}


def _example(extra: Mapping[str, Any]) -> Example:
    return Example({**FSDP2, EXTRA_CONFIG: json.dumps(extra)}, EQUIPPED_TWO, TINY_FACTS)


def _without_prefix(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The keys as transformers reads them: without accelerate's prefix fsdp_."""
    return {name.removeprefix("fsdp_"): value for name, value in extra.items()}


def _with_prefix(extra: Mapping[str, Any], keys: list[str]) -> list[str]:
    """These keys as they are written in the extra config, with or without the prefix."""
    return [name for name in extra if name.removeprefix("fsdp_") in keys]


def _is_boolean(value: Any) -> bool:
    return str(value).lower() in (*TRUE, *FALSE)


@error(
    "STR039",
    fields=(EXTRA_CONFIG, "train.activation_checkpointing"),
    title="FSDP's activation checkpointing gives wrong gradients with dropout",
    source="accelerate 1.15 utils/fsdp_utils.py: preserve_rng_state=False, so dropout differs in the recomputation; "
    "transformers 5.23 trainer.py refuses it together with the Trainer's activation checkpointing",
    fails_on=Example({**FSDP2, EXTRA_CONFIG: '{"activation_checkpointing": true}'}, TWO_H100),
    passes_on=Example({**FSDP2, "train.activation_checkpointing": True}, TWO_H100),
)
def fsdp_activation_checkpointing(case: Case) -> Violation | None:
    """accelerate's activation checkpointing for FSDP does not restore the random state for the recomputation in the
    backward pass, so dropout masks differ from the forward pass. train.activation_checkpointing restores it, and is
    correct with and without dropout."""
    extra = extra_config(case, FSDP)
    keys = (ACTIVATION_CHECKPOINTING, f"fsdp_{ACTIVATION_CHECKPOINTING}")
    found = [name for name in keys if str(extra.get(name)).lower() in TRUE]
    if not found:
        return None
    patch = {**without_keys(extra, found), "train.activation_checkpointing": True}
    message = (
        f"The extra config turns {found[0]} on, which recomputes dropout with different random numbers. Footplate "
        "cannot tell whether the model itself uses dropout, so this is an error even if lora.dropout is 0."
    )
    return Violation(message, (Fix("Use train.activation_checkpointing", patch),))


def _wraps_layer_list(values: Mapping[str, Any], shape: ModelShape | None) -> bool:
    """Whether the ModuleList of all layers is large enough to be wrapped by its size."""
    size = number(values.get("min_num_params", 0))
    by_size = values.get("auto_wrap_policy") == SIZE_WRAP and "min_num_params" in values and size > 0
    return by_size and shape is not None and shape.layers * shape.layer_parameters > size


def _class_names(value: Any) -> list[str]:
    return [str(name) for name in value] if isinstance(value, list) else str(value).split(",")


def _invalid_choices(values: Mapping[str, Any], is_fsdp2: bool) -> dict[str, str]:
    """Keys whose value is none of the allowed ones, and what is wrong."""
    found: dict[str, str] = {}
    state_dicts = (*STATE_DICTS.values(), *(() if is_fsdp2 else ("LOCAL_STATE_DICT",)))
    state_dict = values.get("state_dict_type", state_dicts[0])
    if str(state_dict).upper() not in state_dicts:
        found["state_dict_type"] = f"{state_dict} is not one of {names(state_dicts)}"
    reshard = str(values.get("reshard_after_forward", "true" if is_fsdp2 else SHARDING_STRATEGIES[0]))
    if is_fsdp2 and not _is_boolean(reshard):
        found["reshard_after_forward"] = f"FSDP2 requires true or false, not {reshard}"
    if not is_fsdp2 and reshard.upper() not in SHARDING_STRATEGIES:
        found["reshard_after_forward"] = f"{reshard} is not a sharding strategy of FSDP1"
    for name in (*BOOLEAN_KEYS, *(() if is_fsdp2 else FSDP1_BOOLEAN_KEYS)):
        if not _is_boolean(values.get(name, "true")):
            found[name] = "must be true or false"
    policy = values.get("auto_wrap_policy", TRANSFORMER_WRAP)
    if policy not in WRAP_POLICIES:
        found["auto_wrap_policy"] = f"{policy} is not one of {names(WRAP_POLICIES)}"
    return found


def _invalid_values(case: Case, values: Mapping[str, Any]) -> dict[str, str]:
    """Keys with values that end the run with an error, and what is wrong."""
    is_fsdp2, classes = case.run.fsdp_version == 2, case.facts.module_classes
    found = _invalid_choices(values, is_fsdp2)
    missing = [name for name in _class_names(values.get("transformer_layer_cls_to_wrap", [])) if name not in classes]
    if values.get("transformer_layer_cls_to_wrap") == []:
        found["transformer_layer_cls_to_wrap"] = "must name a class"
    elif classes and missing:
        found["transformer_layer_cls_to_wrap"] = f"the model has no layers of class {names(missing)}"
    if str(values.get("cpu_ram_efficient_loading")).lower() in TRUE and case.spec.precision.compute == "fp8":
        found["cpu_ram_efficient_loading"] = "fp8 requires that every rank loads the weights"
    found.update({name: "it is for TPUs only" for name in ("xla", "xla_fsdp_v2") if values.get(name)})
    if values.get("auto_wrap_policy") == SIZE_WRAP and not isinstance(values.get("min_num_params", 0), int):
        found["min_num_params"] = "must be an integer"
    elif is_fsdp2 and _wraps_layer_list(values, case.shape):
        found["min_num_params"] = "the ModuleList of all layers is larger than this, and FSDP2 cannot wrap a ModuleList"
    return found


@error(
    "STR042",
    fields=(EXTRA_CONFIG,),
    title="FSDP does not accept these values",
    source="transformers 5.23 training_args.py _process_fsdp_args, accelerate 1.15 utils/dataclasses.py "
    "FullyShardedDataParallelPlugin, torch 2.13 distributed/fsdp fully_shard: ValueError",
    fails_on=_example({"state_dict_type": "LOCAL_STATE_DICT"}),
    passes_on=_example({"state_dict_type": "FULL_STATE_DICT"}),
    proof="launch",
)
def invalid_fsdp_values(case: Case) -> Violation | None:
    """Files written for FSDP1 or for other programs have values that FSDP2, or the Trainer, refuses with a
    ValueError."""
    extra = extra_config(case, FSDP)
    found = _invalid_values(case, _without_prefix(extra)) if extra else {}
    if not found:
        return None
    fix = Fix("Remove these keys", without_keys(extra, _with_prefix(extra, list(found))))
    return Violation(f"FSDP would refuse the extra config. {reasons(found.items())}", (fix,))


@warning(
    "STR043",
    fields=(EXTRA_CONFIG,),
    title="The Trainer ignores these FSDP keys",
    source="transformers 5.23 training_args.py _process_fsdp_args passes on known keys and ignores the rest",
    fails_on=_example({"ignored_modules": "lm_head"}),
    passes_on=_example({"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}),
)
def ignored_fsdp_keys(case: Case) -> Violation | None:
    """The Trainer silently ignores unknown FSDP keys: keys of FSDP1, keys of accelerate's own configuration file, and
    misspelled keys."""
    extra = extra_config(case, FSDP)
    known = KNOWN_KEYS if case.run.fsdp_version == 2 else KNOWN_KEYS | FSDP1_KEYS
    found = [name for name in extra if name.removeprefix("fsdp_") not in known]
    if not found:
        return None
    fix = Fix("Remove these keys", without_keys(extra, found))
    return Violation(f"The extra config sets {names(found)}, which would have no effect.", (fix,))


@warning(
    "STR044",
    fields=(EXTRA_CONFIG,),
    title="FSDP would gather the whole model at once",
    source="accelerate 1.15 utils/fsdp_utils.py fsdp2_prepare_auto_wrap_policy; utils/dataclasses.py "
    "set_auto_wrap_policy: a min_num_params of zero is silently ignored",
    fails_on=_example({"auto_wrap_policy": "NO_WRAP"}),
    passes_on=_example({"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}),
)
def fsdp_without_layer_wrapping(case: Case) -> Violation | None:
    """FSDP gathers the parameters of one wrapped module at a time. Without wrapped layers the model is one unit, so
    each device must hold all parameters during a step, which is more than the memory estimate assumes."""
    extra = extra_config(case, FSDP)
    values = _without_prefix(extra)
    policy = values.get("auto_wrap_policy")
    has_no_size = policy == SIZE_WRAP and not values.get("min_num_params")
    if policy != NO_WRAP and not has_no_size:
        return None
    fix = Fix("Wrap each layer", without_keys(extra, _with_prefix(extra, ["auto_wrap_policy", "min_num_params"])))
    size = " without min_num_params" if has_no_size else ""
    message = f"The extra config sets auto_wrap_policy to {policy}{size}, so no layer is wrapped on its own."
    return Violation(message, (fix,))
