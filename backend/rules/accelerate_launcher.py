"""Rules about extra config for the accelerate launcher: keys that it refuses, ignores, or that change the run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from backend import registry
from backend.config import merge
from backend.launch import accelerate_config
from backend.rules.base import Case, Example, Fix, Violation, error, names, reasons, warning
from backend.rules.distributed.extra_config import without_keys
from backend.rules.examples import TWO_H100

EXTRA_ACCELERATE_CONFIG = "launch.extra_accelerate_config"
# accelerate 1.15 commands/config/config_args.py, ClusterConfig: any other key is refused.
ACCELERATE_KEYS = {
    "command_file", "commands", "compute_environment", "debug", "deepspeed_config", "distributed_type",
    "downcast_bf16", "dynamo_config", "enable_cpu_affinity", "fp8_config", "fsdp_config", "gpu_ids", "machine_rank",
    "main_process_ip", "main_process_port", "main_training_function", "megatron_lm_config", "mixed_precision",
    "mpirun_config", "num_machines", "num_processes", "parallelism_config", "rdzv_backend", "same_network", "tpu_env",
    "tpu_name", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_zone", "use_cpu",
}  # fmt: skip
PROCESS_KEYS = ("num_processes", "num_machines", "distributed_type", "compute_environment", "gpu_ids")
RENDEZVOUS_KEYS = ("main_process_ip", "main_process_port", "rdzv_backend", "same_network")
# accelerate 1.15 utils/dataclasses.py, _deepspeed_config_checks: these belong in DeepSpeed's own file.
DEEPSPEED_FILE_KEYS = {
    "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device",
    "offload_param_device", "offload_param_nvme_path", "offload_optimizer_nvme_path", "zero3_save_16bit_model",
}  # fmt: skip
IGNORED_KEYS = ("fp8_config", "megatron_lm_config", "mpirun_config", "tpu_env", "tpu_name", "tpu_vm", "tpu_zone")
# accelerate 1.15 utils/dataclasses.py, FullyShardedDataParallelPlugin: it reads these from the environment where the
# trainer does not set them. Most have an option.
USE_ACTIVATION_CHECKPOINTING = "use train.activation_checkpointing, which restores the RNG state for dropout"
FSDP_OPTIONS = {
    "activation_checkpointing": USE_ACTIVATION_CHECKPOINTING,
    "activation_checkpointing_offload": USE_ACTIVATION_CHECKPOINTING,
    "offload_params": "use parallel.cpu_offload",
    "transformer_layer_cls_to_wrap": "use parallel.transformer_layer_cls_to_wrap",
}
FSDP_ENVIRONMENT_KEYS = (*FSDP_OPTIONS, "ignored_modules")
DDP_SPEC, FSDP2_SPEC = {"parallel.strategy": "ddp"}, {"parallel.strategy": "fsdp2"}


def _example(extra: Mapping[str, Any], **more: Any) -> Example:
    spec = {**DDP_SPEC, "launch.launcher": "accelerate", EXTRA_ACCELERATE_CONFIG: json.dumps(extra), **more}
    return Example(spec, TWO_H100)


def _extra_config(case: Case) -> dict[str, Any]:
    launch = case.spec.launch
    return merge.parse(launch.extra_accelerate_config) if launch.launcher == "accelerate" else {}


def _section(config: Mapping[str, Any], name: str, prefix: str = "") -> dict[str, Any]:
    """A section of the config, its keys without the prefix that accelerate gives them."""
    found = config.get(name)
    return {key.removeprefix(prefix): value for key, value in found.items()} if isinstance(found, Mapping) else {}


def _is_single_process(case: Case) -> bool:
    """Whether the launcher starts one plain process; only then does it pass on the choice of a device."""
    return bool(accelerate_config.configuration(case.spec, case.run)["distributed_type"] == "NO")


def _conflicting_keys(case: Case, extra: Mapping[str, Any]) -> dict[str, str]:
    """Top-level keys that would start a different run than the options, and why."""
    ours = accelerate_config.configuration(case.spec, case.run)
    compared = (*PROCESS_KEYS, *RENDEZVOUS_KEYS) if case.run.nnodes > 1 else PROCESS_KEYS
    found = {
        name: f"the extra config has {extra[name]}, the options result in {ours[name]}"
        for name in compared
        if extra.get(name) is not None and name in ours and extra[name] != ours[name]
    }
    if str(extra.get("gpu_ids")).replace(" ", "") == ",".join(map(str, case.run.device_ids)):
        found.pop("gpu_ids", None)
    if extra.get("use_cpu") is True and _is_single_process(case) and case.run.device != "cpu":
        found["use_cpu"] = f"the options select {registry.DEVICES[case.run.device].label}"
    if extra.get("mpirun_config") and _is_single_process(case):
        found["mpirun_config"] = "accelerate would start the run with mpirun"
    if extra.get("parallelism_config"):
        found["parallelism_config"] = "the device mesh follows from the parallel options"
    if case.strategy.engine == "deepspeed":
        if extra.get("mixed_precision") is not None:
            found["mixed_precision"] = "with DeepSpeed, precision is set in deepspeed.json"
    elif extra.get("mixed_precision") not in (None, "no") and ours.get("mixed_precision") == "no":
        precision = registry.PRECISIONS[case.spec.precision.compute].label
        found["mixed_precision"] = f"the extra config has {extra['mixed_precision']}, precision.compute is {precision}"
    return found


def _conflicting_engine_keys(case: Case, extra: Mapping[str, Any]) -> dict[str, str]:
    """Keys of the engine's section that accelerate refuses or that would change the training, and why."""
    found: dict[str, str] = {}
    if case.strategy.engine == "deepspeed":
        section = _section(extra, "deepspeed_config")
        refused = [name for name in section if name in DEEPSPEED_FILE_KEYS]
        found |= {
            f"deepspeed_config.{name}": "accelerate requires this key in deepspeed.json instead" for name in refused
        }
        if case.run.nnodes > 1 and section.get("deepspeed_multinode_launcher", "standard") != "standard":
            found["deepspeed_config.deepspeed_multinode_launcher"] = "each node starts its own processes"
    if case.strategy.engine == "fsdp":
        section = _section(extra, "fsdp_config", "fsdp_")
        ours = _fsdp_config(case)
        loads_on_rank0 = section.get("cpu_ram_efficient_loading", ours["cpu_ram_efficient_loading"])
        if section.get("sync_module_states") is False and loads_on_rank0:
            found["fsdp_config.fsdp_sync_module_states"] = "it must be true when only rank 0 loads the weights"
        for name, advice in FSDP_OPTIONS.items():
            if section.get(name) and not ours.get(name):
                found[f"fsdp_config.fsdp_{name}"] = advice
    return found


def _fsdp_config(case: Case) -> dict[str, Any]:
    """The generated fsdp_config, its keys without prefix."""
    return _section(accelerate_config.configuration(case.spec, case.run), "fsdp_config", "fsdp_")


def _with_bare_keys(paths: Mapping[str, str]) -> list[str]:
    """The paths with and without FSDP's prefix: accelerate accepts both."""
    return [spelling for path in paths for spelling in (path, path.replace(".fsdp_", "."))]


@error(
    "LCH013",
    fields=(EXTRA_ACCELERATE_CONFIG,),
    title="The extra accelerate config is refused or conflicts with the options",
    source="accelerate 1.15 commands/config/config_args.py from_yaml_file, utils/launch.py prepare_multi_gpu_env and "
    "utils/dataclasses.py _deepspeed_config_checks: ValueError; mixed_precision silently replaces fp32",
    fails_on=_example({"ipex_config": {}}),
    passes_on=_example({"downcast_bf16": "no"}),
)
def extra_accelerate_config_conflicts(case: Case) -> Violation | None:
    """The launcher refuses keys that it does not know and values that are set in two places. Other keys override the
    options, for example the number of processes, the device or the precision."""
    extra = _extra_config(case)
    if not extra:
        return None
    found = {name: "accelerate does not know this key" for name in extra if name not in ACCELERATE_KEYS}
    found |= _conflicting_keys(case, extra) | _conflicting_engine_keys(case, extra)
    if not found:
        return None
    patch = without_keys(extra, _with_bare_keys(found), EXTRA_ACCELERATE_CONFIG)
    return Violation(reasons(found.items()), (Fix("Remove these keys", patch, safe=False),))


@warning(
    "LCH014",
    fields=(EXTRA_ACCELERATE_CONFIG,),
    title="Keys of the extra accelerate config have no effect",
    source="transformers 5.23 training_args.py _process_fsdp_args: fsdp.json is read, not the launcher's variables; "
    "accelerate 1.15 utils/launch.py passes the section of an engine on only to runs of that engine",
    fails_on=_example({"fsdp_config": {"fsdp_backward_prefetch": "BACKWARD_PRE"}}, **FSDP2_SPEC),
    passes_on=_example({"fsdp_config": {"fsdp_ignored_modules": "lm_head"}}, **FSDP2_SPEC),
)
def extra_accelerate_config_ignored(case: Case) -> Violation | None:
    """The Trainer takes FSDP settings from fsdp.json, to which parallel.extra_config adds keys, and ignores most of
    those in the launcher's config. Sections of other engines are ignored too."""
    extra = _extra_config(case)
    if not extra:
        return None
    section = extra.get("fsdp_config")
    fsdp = section if isinstance(section, Mapping) and case.strategy.engine == "fsdp" else {}
    refused = _conflicting_engine_keys(case, extra) if fsdp else {}
    found = [
        name for name in extra if name in IGNORED_KEYS and extra[name] and name not in _conflicting_keys(case, extra)
    ]
    if extra.get("use_cpu") is True and not _is_single_process(case) and case.run.device != "cpu":
        found.append("use_cpu")
    ours = _fsdp_config(case) if fsdp else {}
    for name in fsdp:
        bare = name.removeprefix("fsdp_")
        ignored = bare not in FSDP_ENVIRONMENT_KEYS or (bare in FSDP_OPTIONS and ours.get(bare))
        if ignored and f"fsdp_config.fsdp_{bare}" not in refused:
            found.append(f"fsdp_config.{name}")
    if case.strategy.engine == "deepspeed":
        section = _section(extra, "deepspeed_config")
        found += [f"deepspeed_config.{name}" for name in section if name not in accelerate_config.DEEPSPEED_ARGUMENTS]
    if not found:
        return None
    fix = Fix("Remove these keys", without_keys(extra, found, EXTRA_ACCELERATE_CONFIG))
    return Violation(f"launch.extra_accelerate_config sets {names(found)}, which this run ignores.", (fix,))


@warning(
    "LCH015",
    fields=(EXTRA_ACCELERATE_CONFIG, "train.torch_compile"),
    title="The extra accelerate config turns on torch.compile",
    source="accelerate 1.15 utils/launch.py prepare_multi_gpu_env: ACCELERATE_DYNAMO_BACKEND, which prepare_model "
    "follows",
    fails_on=_example({"dynamo_config": {"dynamo_backend": "INDUCTOR"}}),
    passes_on=_example({"dynamo_config": {"dynamo_backend": "NO"}}),
)
def dynamo_backend_in_extra_config(case: Case) -> Violation | None:
    """The launcher compiles the model when dynamo_backend is set. The preflight check, the memory estimate and the
    trainer's own checks consider only train.torch_compile."""
    extra = _extra_config(case)
    backend = str(_section(extra, "dynamo_config", "dynamo_").get("backend", "NO")).upper()
    if backend == "NO":
        return None
    patch: dict[str, Any] = without_keys(extra, ["dynamo_config"], EXTRA_ACCELERATE_CONFIG)
    if case.strategy.engine in ("", "ddp"):
        patch["train.torch_compile"] = True
    fix = Fix("Use train.torch_compile instead" if "train.torch_compile" in patch else "Remove dynamo_config", patch)
    return Violation(
        f"dynamo_config turns on torch.compile with the backend {backend}, without train.torch_compile.", (fix,)
    )
