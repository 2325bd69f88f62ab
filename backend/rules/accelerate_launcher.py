"""Rules of further keys for accelerate's launcher: what it refuses, and what would run something else than the form.

Floor 3. Imports: below.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from backend import registry
from backend.config import merge
from backend.launch import accelerate_config
from backend.rules.base import Case, Example, Fix, Violation, names, reasons, rule
from backend.rules.distributed.extra_config import dropping
from backend.rules.examples import TWO_H100

KEYS = "launch.extra_accelerate_config"
# accelerate 1.15 commands/config/config_args.py, ClusterConfig: any other name is refused.
KNOWN = {
    "command_file", "commands", "compute_environment", "debug", "deepspeed_config", "distributed_type",
    "downcast_bf16", "dynamo_config", "enable_cpu_affinity", "fp8_config", "fsdp_config", "gpu_ids", "machine_rank",
    "main_process_ip", "main_process_port", "main_training_function", "megatron_lm_config", "mixed_precision",
    "mpirun_config", "num_machines", "num_processes", "parallelism_config", "rdzv_backend", "same_network", "tpu_env",
    "tpu_name", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_zone", "use_cpu",
}  # fmt: skip
WORLD = ("num_processes", "num_machines", "distributed_type", "compute_environment", "gpu_ids")
MEETING = ("main_process_ip", "main_process_port", "rdzv_backend", "same_network")
# utils/dataclasses.py, _deepspeed_config_checks: they stand in DeepSpeed's own file.
TWICE = {
    "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device",
    "offload_param_device", "offload_param_nvme_path", "offload_optimizer_nvme_path", "zero3_save_16bit_model",
}  # fmt: skip
UNREAD = ("fp8_config", "megatron_lm_config", "mpirun_config", "tpu_env", "tpu_name", "tpu_vm", "tpu_zone")
# accelerate 1.15 utils/dataclasses.py, FullyShardedDataParallelPlugin: what the environment says where the trainer says
# nothing. For most the form has a field.
AGAIN = "use train.activation_checkpointing, which draws dropout alike"
FIELDS = {
    "activation_checkpointing": AGAIN,
    "activation_checkpointing_offload": AGAIN,
    "offload_params": "use parallel.cpu_offload",
    "transformer_layer_cls_to_wrap": "use parallel.transformer_layer_cls_to_wrap",
}
HEARD = (*FIELDS, "ignored_modules")
DDP, FSDP2 = {"parallel.strategy": "ddp"}, {"parallel.strategy": "fsdp2"}


def _bad(given: Mapping[str, Any], **more: Any) -> Example:
    return Example({**DDP, "launch.launcher": "accelerate", KEYS: json.dumps(given), **more}, TWO_H100)


def _given(case: Case) -> dict[str, Any]:
    launch = case.spec.launch
    return merge.parse(launch.extra_accelerate_config) if launch.launcher == "accelerate" else {}


def _table(given: Mapping[str, Any], name: str, prefix: str = "") -> dict[str, Any]:
    """A table among the keys, by names without the prefix that accelerate puts before them."""
    found = given.get(name)
    return {k.removeprefix(prefix): v for k, v in found.items()} if isinstance(found, Mapping) else {}


def _alone(case: Case) -> bool:
    """Whether the launcher starts one plain process: with several it tells them of no device."""
    return bool(accelerate_config.configuration(case.spec, case.run)["distributed_type"] == "NO")


def _otherwise(case: Case, given: Mapping[str, Any]) -> dict[str, str]:
    """Keys at the top that ask for another run than the form, and why."""
    ours = accelerate_config.configuration(case.spec, case.run)
    asked = (*WORLD, *MEETING) if case.run.nnodes > 1 else WORLD
    found = {
        name: f"{given[name]} there, {ours[name]} in the form"
        for name in asked
        if given.get(name) is not None and name in ours and given[name] != ours[name]
    }
    if str(given.get("gpu_ids")).replace(" ", "") == ",".join(map(str, case.run.device_ids)):
        found.pop("gpu_ids", None)
    if given.get("use_cpu") is True and _alone(case) and case.run.device != "cpu":
        found["use_cpu"] = f"the form takes {registry.DEVICES[case.run.device].label}"
    if given.get("mpirun_config") and _alone(case):
        found["mpirun_config"] = "mpirun would start it"
    if given.get("parallelism_config"):
        found["parallelism_config"] = "the mesh is the form's"
    if case.strategy.engine == "deepspeed":
        if given.get("mixed_precision") is not None:
            found["mixed_precision"] = "it stands in DeepSpeed's file"
    elif given.get("mixed_precision") not in (None, "no") and ours.get("mixed_precision") == "no":
        found["mixed_precision"] = "the form computes in other numbers"
    return found


def _inside(case: Case, given: Mapping[str, Any]) -> dict[str, str]:
    """Keys within the engine's table that are refused, or change what is learned, and why."""
    found: dict[str, str] = {}
    if case.strategy.engine == "deepspeed":
        zero = _table(given, "deepspeed_config")
        found |= {f"deepspeed_config.{name}": "it stands in DeepSpeed's file" for name in zero if name in TWICE}
        if case.run.nnodes > 1 and zero.get("deepspeed_multinode_launcher", "standard") != "standard":
            found["deepspeed_config.deepspeed_multinode_launcher"] = "each node starts its own part"
    if case.strategy.engine == "fsdp":
        shards = _table(given, "fsdp_config", "fsdp_")
        ours = _shards(case)
        once = shards.get("cpu_ram_efficient_loading", ours["cpu_ram_efficient_loading"])
        if shards.get("sync_module_states") is False and once:
            found["fsdp_config.fsdp_sync_module_states"] = "it must be on where one process reads the weights"
        for name, why in FIELDS.items():
            if shards.get(name) and not ours.get(name):
                found[f"fsdp_config.fsdp_{name}"] = why
    return found


def _shards(case: Case) -> dict[str, Any]:
    """What the form says of FSDP, in the launcher's words."""
    return _table(accelerate_config.configuration(case.spec, case.run), "fsdp_config", "fsdp_")


def _paths(given: Mapping[str, Any], found: Mapping[str, str]) -> list[str]:
    """As they were given: accelerate takes FSDP's names with and without the prefix."""
    return [path for name in found for path in (name, name.replace(".fsdp_", "."))]


@rule(
    "LCH013",
    "error",
    fields=(KEYS,),
    title="The launcher would refuse this, or start another run",
    source="accelerate 1.15 commands/config/config_args.py from_yaml_file, utils/launch.py prepare_multi_gpu_env and "
    "utils/dataclasses.py _deepspeed_config_checks: ValueError; mixed_precision replaces fp32 without a word",
    fails_on=_bad({"ipex_config": {}}),
    passes_on=_bad({"downcast_bf16": "no"}),
)
def other_launch(case: Case) -> Violation | None:
    """The launcher refuses names that its version does not know, and values that stand twice. Others win over the form:
    another number of processes, another device, another precision."""
    given = _given(case)
    if not given:
        return None
    found = {name: "accelerate does not know it" for name in given if name not in KNOWN}
    found |= _otherwise(case, given) | _inside(case, given)
    if not found:
        return None
    fix = Fix("As the form says", dropping(given, _paths(given, found), KEYS), safe=False)
    return Violation(reasons(found.items()), (fix,))


@rule(
    "LCH014",
    "warning",
    fields=(KEYS,),
    title="Keys of accelerate's without effect",
    source="transformers 5.23 training_args.py _process_fsdp_args: fsdp.json is read, and not the launcher's words; "
    "accelerate 1.15 utils/launch.py hands other tables on for their own kind of run alone",
    fails_on=_bad({"fsdp_config": {"fsdp_backward_prefetch": "BACKWARD_PRE"}}, **FSDP2),
    passes_on=_bad({"fsdp_config": {"fsdp_ignored_modules": "lm_head"}}, **FSDP2),
)
def unheard(case: Case) -> Violation | None:
    """What FSDP is told stands in fsdp.json: parallel.extra_config lays keys over that. Tables of other engines are
    passed over."""
    given = _given(case)
    if not given:
        return None
    shards = given.get("fsdp_config")
    inner = shards if isinstance(shards, Mapping) and case.strategy.engine == "fsdp" else {}
    refused = _inside(case, given) if inner else {}
    found = [name for name in given if name in UNREAD and given[name] and name not in _otherwise(case, given)]
    if given.get("use_cpu") is True and not _alone(case) and case.run.device != "cpu":
        found.append("use_cpu")
    ours = _shards(case) if inner else {}
    for name in inner:
        bare = name.removeprefix("fsdp_")
        if (bare not in HEARD or (bare in FIELDS and ours.get(bare))) and f"fsdp_config.fsdp_{bare}" not in refused:
            found.append(f"fsdp_config.{name}")
    return Violation(f"{names(found)}.", (Fix("Without", dropping(given, found, KEYS)),)) if found else None


@rule(
    "LCH015",
    "warning",
    fields=(KEYS, "train.torch_compile"),
    title="The launcher would compile the model",
    source="accelerate 1.15 utils/launch.py prepare_multi_gpu_env: ACCELERATE_DYNAMO_BACKEND, which prepare_model "
    "follows",
    fails_on=_bad({"dynamo_config": {"dynamo_backend": "INDUCTOR"}}),
    passes_on=_bad({"dynamo_config": {"dynamo_backend": "NO"}}),
)
def compiled_by_launcher(case: Case) -> Violation | None:
    """Checks and estimate know of train.torch_compile alone, and a run looks whether that was done."""
    given = _given(case)
    backend = str(_table(given, "dynamo_config", "dynamo_").get("backend", "NO")).upper()
    if backend == "NO":
        return None
    patch: dict[str, Any] = dropping(given, ["dynamo_config"], KEYS)
    if case.strategy.engine in ("", "ddp"):
        patch["train.torch_compile"] = True
    return Violation(f"dynamo_config asks for {backend}.", (Fix("By the form", patch),))
