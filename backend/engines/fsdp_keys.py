"""FSDP's settings as accelerate, the Trainer and axolotl write them, as options.

Keys may have accelerate's prefix fsdp_, and choices may be numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backend import registry
from backend.config.options import Problem, SpecError

# accelerate 1.15 utils/constants.py; it also accepts a name's position, from 1.
SHARDING_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
STATE_DICTS = {"full": "FULL_STATE_DICT", "sharded": "SHARDED_STATE_DICT"}
NUMBERED = {
    "sharding_strategy": SHARDING_STRATEGIES,
    "state_dict_type": ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"),
    "backward_prefetch": ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"),
}
SWITCHES = (
    "activation_checkpointing", "activation_checkpointing_offload", "cpu_offload", "cpu_ram_efficient_loading",
    "forward_prefetch", "offload_params", "sync_module_states", "use_orig_params",
)  # fmt: skip
FORMER = {"backward_prefetch_policy": "backward_prefetch"}
# Keys that `options_of` reads.
WITH_OPTIONS = {
    "version", "sharding_strategy", "reshard_after_forward", "offload_params", "cpu_offload", "state_dict_type",
    "transformer_layer_cls_to_wrap", "activation_checkpointing",
}  # fmt: skip
TRUE, FALSE = ("true", "t", "yes", "y", "on", "1"), ("false", "f", "no", "n", "off", "0")  # accelerate's str_to_bool
Patch = dict[str, Any]
Table = Mapping[str, Any]


def unprefixed(settings: Table) -> dict[str, Any]:
    """Settings whose keys do not have accelerate's prefix fsdp_; a prefixed key replaces one without it."""
    settings = {str(key): value for key, value in settings.items()}  # a key of a YAML file may be a number
    bare = {key: value for key, value in settings.items() if not key.startswith("fsdp_")}
    return {**bare, **{key.removeprefix("fsdp_"): value for key, value in settings.items() if key not in bare}}


def contradictions(settings: Table) -> list[str]:
    """Sentences about the keys that are there with accelerate's prefix and without it, with different values."""
    pairs = ((key, f"fsdp_{key}", value) for key, value in settings.items())
    return [
        f"fsdp_config has {key}: {value} and {prefixed}: {settings[prefixed]}; {prefixed} is imported"
        for key, prefixed, value in pairs
        if prefixed in settings and settings[prefixed] != value
    ]


def as_switch(value: Any) -> bool | None:
    """True or false from a boolean, 0 or 1, or text; None for anything else."""
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower() if isinstance(value, str | int) else ""
    return True if text in TRUE else False if text in FALSE else None


def normalize(settings: Table) -> dict[str, Any]:
    """Settings without the prefix, with names in place of numbers and booleans in place of text. Raises SpecError."""
    found = unprefixed(settings)
    for former, key in FORMER.items():
        if former in found:
            found.setdefault(key, found.pop(former))
    for key in SWITCHES:
        found |= {key: switch} if (switch := as_switch(found.get(key))) is not None else {}
    if isinstance(policy := found.get("auto_wrap_policy"), str):
        found["auto_wrap_policy"] = policy.upper()
    for key, choices in NUMBERED.items():
        if found.get(key) is not None:
            found[key] = _choice(f"fsdp_config.fsdp_{key}", found[key], choices)
    return found


def _choice(path: str, value: Any, choices: tuple[str, ...]) -> str:
    """One of accelerate's names, for a name in any case or its number. Raises SpecError."""
    name = str(value).upper()
    if name in choices:
        return name
    if name.isdigit() and 0 < int(name) <= len(choices):
        return choices[int(name) - 1]
    known = ", ".join(f"{name} ({number})" for number, name in enumerate(choices, 1))
    raise SpecError([Problem("", f"{path} must be one of {known}, not {value!r}")])


def options_of(config: Table, default_version: int = 1) -> tuple[Patch, list[str]]:
    """(the options that normalized settings set, those that mean something different in Footplate). Raises
    SpecError."""
    version = 2 if str(config.get("version", default_version)) == "2" else 1
    patch: Patch = {"parallel.strategy": f"fsdp{version}"}
    found, different = (_fsdp2 if version == 2 else _fsdp1)(config)
    for key in ("offload_params", "cpu_offload"):
        if isinstance(config.get(key), bool):
            patch["parallel.cpu_offload"] = config[key]
    formats = {value: key for key, value in STATE_DICTS.items()}
    if (name := str(config.get("state_dict_type"))) in formats:
        patch["parallel.state_dict_type"] = formats[name]
    elif config.get("state_dict_type"):
        different.append(f"fsdp_state_dict_type: {name}: checkpoints are sharded here")
        patch["parallel.state_dict_type"] = "sharded"
    patch["parallel.transformer_layer_cls_to_wrap"] = config.get("transformer_layer_cls_to_wrap") or ""
    if isinstance(config.get("activation_checkpointing"), bool):
        patch["train.activation_checkpointing"] = config["activation_checkpointing"]
    return patch | found, different


def _fsdp1(config: Table) -> tuple[Patch, list[str]]:
    """The sharding strategy, which newer files call reshard_after_forward."""
    reshard = config.get("reshard_after_forward")
    switch = None if str(reshard).isdigit() else as_switch(reshard)  # 1 is FULL_SHARD, not true
    given = "SHARD_GRAD_OP" if switch is False else SHARDING_STRATEGIES[0] if switch or reshard is None else reshard
    name = _choice("fsdp_config.fsdp_sharding_strategy", config.get("sharding_strategy") or given, SHARDING_STRATEGIES)
    if name.lower() in registry.SHARDINGS:
        return {"parallel.sharding_strategy": name.lower()}, []
    different = f"fsdp_sharding_strategy: {name}: HYBRID_SHARD here, which also reshards after the forward pass"
    return {"parallel.sharding_strategy": "hybrid_shard"}, [different]


def _fsdp2(config: Table) -> tuple[Patch, list[str]]:
    """Whether FSDP2 reshards after the forward pass, also from FSDP1's sharding strategy."""
    given, sharding = config.get("reshard_after_forward"), config.get("sharding_strategy")
    if (reshard := as_switch(given)) is not None:
        implied = "SHARD_GRAD_OP" if not reshard else "FULL_SHARD"
        text = f"fsdp_sharding_strategy: {sharding}: FSDP2 ignores it; parallel.replicate_size sets the replicas"
        is_ignored = sharding is not None and sharding != implied
        return {"parallel.reshard_after_forward": reshard}, [text] if is_ignored else []
    if given is not None:
        message = f"fsdp_reshard_after_forward must be true or false with FSDP2, not {given!r}"
        raise SpecError([Problem("", message)])
    if sharding in (None, "FULL_SHARD"):
        return {}, []
    is_full = sharding == "HYBRID_SHARD"
    different = (
        f"fsdp_sharding_strategy: {sharding}: FSDP2 has no sharding strategy; parallel.reshard_after_forward is "
        f"{str(is_full).lower()}, and parallel.replicate_size sets the replicas"
    )
    return {"parallel.reshard_after_forward": is_full}, [different]
