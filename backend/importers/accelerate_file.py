"""accelerate's configuration file as options: values with an option set it, the rest becomes extra config.

DeepSpeed's own keys inside of deepspeed_config, which accelerate ignores, are imported as DeepSpeed's configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from backend.config import RunSpec, merge
from backend.config.options import Problem, SpecError, edit
from backend.engines import deepspeed_keys, fsdp_keys
from backend.engines.deepspeed_keys import as_boolean
from backend.importers import deepspeed_file
from backend.importers.deepspeed_file import Patch, Table, as_json, is_number, number_patch, table_at
from backend.importers.foreign import TENSOR_WITH_FSDP, Imported
from backend.launch import accelerate_config
from backend.machine import Machine
from backend.resolve import resolve

# Keys that options express under other names.
OPTIONS = {
    "distributed_type", "mixed_precision", "gpu_ids", "use_cpu", "num_processes", "num_machines",
    "fsdp_config.fsdp_activation_checkpointing", "fsdp_config.fsdp_sharding_strategy",
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap", "fsdp_config.fsdp_state_dict_type",
    "fsdp_config.fsdp_reshard_after_forward",
    *(f"deepspeed_config.{key}" for key in (
        "zero_stage", "gradient_accumulation_steps", "gradient_clipping", "deepspeed_config_file",
        "offload_optimizer_device", "offload_optimizer_nvme_path", "offload_param_device", "offload_param_nvme_path",
        "zero3_init_flag", "zero3_save_16bit_model",  # always on in Footplate's deepspeed.json
    )),
}  # fmt: skip
DISTRIBUTED_TYPES = {"NO": "single", "MULTI_GPU": "ddp", "MULTI_CPU": "ddp", "MULTI_XPU": "ddp", "MULTI_NPU": "ddp"}
NO_OFFLOAD = {"device": "none"}
# Sizes of parallelism_config, without the prefix parallelism_config_, and the options that they set.
SIZES = {
    "dp_replicate_size": "parallel.replicate_size", "tp_size": "parallel.tensor_parallel_size",
    "cp_size": "parallel.context_parallel_size", "sp_size": "parallel.sequence_parallel_size",
}  # fmt: skip
# Keys in each file that `accelerate config` writes, with the values that change nothing.
WITHOUT_EFFECT = {"tpu_env": [], "tpu_use_cluster": False, "tpu_use_sudo": False}
# Keys of deepspeed_config about a launcher that starts the processes of all nodes from the first one.
OVER_SSH = (
    "deepspeed_multinode_launcher", "deepspeed_hostfile", "deepspeed_inclusion_filter", "deepspeed_exclusion_filter",
)  # fmt: skip
PRECISIONS = ("no", "bf16", "fp16", "fp8")


def is_accelerate(found: Table) -> bool:
    """Whether a table is a configuration of accelerate."""
    return bool({"compute_environment", "distributed_type"} & found.keys())


@dataclass
class _Reading:
    """What an accelerate configuration sets so far."""

    patch: Patch = field(default_factory=dict)
    different: list[str] = field(default_factory=list)


def read(given: Table, spec: RunSpec) -> Imported:
    """`spec` with the values of an accelerate configuration. Raises SpecError."""
    imported, reading = _normalize(given), _Reading()
    reading.different += fsdp_keys.contradictions(table_at(given, "fsdp_config"))
    kept: list[str] = []
    if own := _own_deepspeed_keys(imported, reading):
        found = deepspeed_file.read(own, spec)
        spec, kept = found.spec, [f"deepspeed_config.{path}" for path in found.kept]
        reading.different += found.different
        table = imported["deepspeed_config"]
        imported["deepspeed_config"] = {k: v for k, v in table.items() if not _is_deepspeeds_own(k)}
    _launch(imported, reading, has_own_keys=bool(own))
    result = edit(spec, reading.patch)
    imported.pop("parallelism_config", None)
    _drop_ways_to_start_nodes(imported, reading)
    if reading.patch.get("parallel.strategy") == "tensor":
        imported.pop("fsdp_config", None)
    extra = merge.additions(imported, accelerate_config.configuration(result, resolve(result, Machine())))
    extra = without(extra, OPTIONS)
    result = edit(result, {"launch.extra_accelerate_config": as_json(extra)})
    return Imported(result, [*kept, *merge.paths(extra)], reading.different)


def _drop_ways_to_start_nodes(imported: dict[str, Any], reading: _Reading) -> None:
    """Take out how the nodes are started and find each other, which Footplate's scripts decide."""
    if "launch.nnodes" not in reading.patch:
        if imported.get("rdzv_backend") == "static":
            imported.pop("rdzv_backend")  # the processes of one node find each other without it
        return
    if imported.get("rdzv_backend") not in (None, "static"):
        text = "Footplate starts the nodes with accelerate's static rendezvous"
        reading.different.append(f"rdzv_backend: {imported.pop('rdzv_backend')}: {text}")
    table = table_at(imported, "deepspeed_config")
    text = "in Footplate, each node starts its own processes"
    if given := {key: table[key] for key in OVER_SSH if table.get(key) not in (None, "", "standard")}:
        imported["deepspeed_config"] = {key: value for key, value in table.items() if key not in OVER_SSH}
        reading.different += [f"deepspeed_config.{key}: {value}: {text}" for key, value in given.items()]
    if host := table_at(imported, "mpirun_config").get("mpirun_hostfile"):
        imported.pop("mpirun_config")
        reading.different.append(f"mpirun_config.mpirun_hostfile: {host}: {text}")


def _is_deepspeeds_own(key: str) -> bool:
    """Whether a key of deepspeed_config belongs to DeepSpeed's own file."""
    known = deepspeed_keys.is_known(key) or deepspeed_keys.is_known(key, "zero_optimization")
    return known and key not in accelerate_config.DEEPSPEED_ARGUMENTS


def without(table: Table, removed: set[str], prefix: str = "") -> dict[str, Any]:
    """`table` without the leaves at these dotted paths."""
    found = {}
    for key, value in table.items():
        inner = without(value, removed, f"{prefix}{key}.") if isinstance(value, Mapping) else value
        if f"{prefix}{key}" not in removed and (inner or not isinstance(value, Mapping)):
            found[key] = inner
    return found


# -- reading --------------------------------------------------------------------------------------------------------


def _normalize(given: Table) -> dict[str, Any]:
    """The configuration with one spelling of each key, with names in place of numbers, and with booleans in place of
    text. YAML turns an unquoted NO, yes or on into a boolean; accelerate accepts both forms."""
    table = accelerate_config.normalize(given).items()
    found = {key: value for key, value in table if value is not None and WITHOUT_EFFECT.get(key) != value}
    for key, word in (("distributed_type", "NO"), ("mixed_precision", "no"), ("downcast_bf16", "no")):
        if found.get(key) is False:
            found[key] = word
    for key in ("distributed_type", "compute_environment"):
        if isinstance(found.get(key), str):
            found[key] = found[key].upper()
    for key in ("use_cpu", "debug", "same_network", "enable_cpu_affinity"):
        found |= {key: switch} if (switch := as_boolean(found.get(key))) is not None else {}
    if isinstance(found.get("mixed_precision"), str):
        found["mixed_precision"] = found["mixed_precision"].lower()
    if isinstance(deepspeed := found.get("deepspeed_config"), Mapping):
        unset = (None, "none", "None")  # "none" is how accelerate writes a missing file
        kept = {key: value for key, value in deepspeed.items() if key != "deepspeed_config_file" or value not in unset}
        found["deepspeed_config"] = kept
    if isinstance(found.get("fsdp_config"), Mapping):
        settings = fsdp_keys.normalize(found["fsdp_config"])
        found["fsdp_config"] = {f"fsdp_{key}": value for key, value in settings.items()}
    return found


def _own_deepspeed_keys(imported: Table, reading: _Reading) -> dict[str, Any]:
    """DeepSpeed's configuration if deepspeed_config has keys of it, with what accelerate's own keys say; else empty."""
    if imported.get("distributed_type") != "DEEPSPEED":
        return {}
    table = table_at(imported, "deepspeed_config")
    theirs = {key: value for key, value in table.items() if key not in accelerate_config.DEEPSPEED_ARGUMENTS}
    inner = {key: value for key, value in theirs.items() if deepspeed_keys.is_known(key, "zero_optimization")}
    outer = {key: value for key, value in theirs.items() if key not in inner and deepspeed_keys.is_known(key)}
    if table.get("deepspeed_config_file") or not {**inner, **outer}:
        return {}
    zero = {**inner, **table_at(outer, "zero_optimization", "deepspeed_config.")}
    stage, given = zero.get("stage", 2), table.get("zero_stage")
    names = ", ".join({**inner, **outer})
    reading.different.append(
        f"deepspeed_config has keys of DeepSpeed's own file ({names}): accelerate ignores them; they are imported"
    )
    if given is not None and "stage" in zero and given != stage:
        reading.different.append(
            f"deepspeed_config.zero_optimization.stage: {stage}: accelerate uses zero_stage: {given}, and so does the "
            "import"
        )
    elif given is None and stage != 2:
        reading.different.append(
            f"deepspeed_config has no zero_stage: accelerate uses ZeRO-2, and ZeRO-{stage} is imported"
        )
    arguments = _deepspeed_file({**table, "zero_stage": stage if given is None else given})
    offload = {key: value for key, value in arguments["zero_optimization"].items() if value != NO_OFFLOAD}
    rest = {key: value for key, value in arguments.items() if value is not None}
    return {**rest, **outer, "zero_optimization": {**zero, **offload}}


# -- options --------------------------------------------------------------------------------------------------------


def _launch(imported: Table, reading: _Reading, has_own_keys: bool) -> None:
    kind = str(imported.get("distributed_type", "NO"))
    reading.patch["launch.launcher"] = "accelerate"
    if kind == "DEEPSPEED":
        table = table_at(imported, "deepspeed_config")
        reading.patch |= {} if has_own_keys else _deepspeed(table)
        if table.get("zero_stage") == 3 and as_boolean(table.get("zero3_save_16bit_model")) is False:
            reading.different.append("zero3_save_16bit_model: false: Footplate gathers the weights to save the model")
    elif kind == "FSDP":
        _fsdp(table_at(imported, "fsdp_config"), reading)
    elif kind in DISTRIBUTED_TYPES:
        reading.patch["parallel.strategy"] = DISTRIBUTED_TYPES[kind]
    else:
        names = ", ".join([*DISTRIBUTED_TYPES, "FSDP", "DEEPSPEED"])
        raise SpecError([Problem("", f"distributed_type {kind} is not supported; supported are {names}")])
    _sizes(imported, reading)
    reading.patch |= _processes(imported, reading)
    precision = imported.get("mixed_precision")
    if precision in PRECISIONS:
        reading.patch["precision.compute"] = str(precision).replace("no", "fp32")
    elif precision is not None:
        known = ", ".join(PRECISIONS)
        raise SpecError([Problem("", f"mixed_precision {precision} is not supported; supported are {known}")])
    if imported.get("use_cpu") is True:
        reading.patch["launch.device"] = "cpu"
    ids = str(imported.get("gpu_ids", "all"))
    reading.patch |= {"launch.devices": ids} if ids not in ("all", "None") else {}


def _sizes(imported: Table, reading: _Reading) -> None:
    """The sizes of the device mesh; the size of its sharding dimension follows from the number of processes."""
    prefix = "parallelism_config_"
    table = {key.removeprefix(prefix): value for key, value in table_at(imported, "parallelism_config").items()}
    for key, value in table.items():
        if key in SIZES and is_number(value) and value > 1:
            reading.patch[SIZES[key]] = value
        elif key not in SIZES and key != "dp_shard_size" and value not in (None, False, 1, "none"):
            reading.different.append(f"{prefix}{key}: {value}: Footplate chooses how groups of devices communicate")
    if "parallel.tensor_parallel_size" in reading.patch:
        reading.patch["parallel.strategy"] = "tensor"
        reading.different.append(TENSOR_WITH_FSDP)


def _processes(imported: Table, reading: _Reading) -> Patch:
    """Processes, nodes, and where they meet."""
    machines = _count(imported, "num_machines", 1)
    processes = _count(imported, "num_processes", machines)
    if imported.get("distributed_type", "NO") == "NO" and processes > 1:
        reading.different.append(f"num_processes: {processes}: with distributed_type NO accelerate starts one process")
        machines = processes = 1
    patch = number_patch("launch.nproc_per_node", processes // machines)
    if machines > 1:
        patch |= {"launch.rendezvous": "static", "launch.nnodes": machines}
        patch |= {"launch.master_addr": str(imported.get("main_process_ip") or "")}
        patch |= number_patch("launch.node_rank", imported.get("machine_rank"))
    return patch | number_patch("launch.master_port", imported.get("main_process_port"))


def _count(imported: Table, key: str, default: int) -> int:
    """A number of machines or processes. Raises SpecError."""
    value = imported.get(key) or default
    if not is_number(value) or value < 1:
        raise SpecError([Problem("", f"{key} must be a positive integer, not {value!r}")])
    return int(value)


def _deepspeed(table: Table) -> Patch:
    if table.get("deepspeed_config_file"):
        if table.get("zero_stage") is None:
            file = table["deepspeed_config_file"]
            raise SpecError([Problem("", f"deepspeed_config refers to {file}: import that file instead")])
        return {"parallel.strategy": f"zero{table['zero_stage']}"}
    return deepspeed_file.options_of(_deepspeed_file(table))


def _deepspeed_file(table: Table) -> dict[str, Any]:
    """The DeepSpeed configuration that accelerate creates from its own keys."""
    zero: dict[str, Any] = {"stage": table.get("zero_stage", 2)}
    for key in ("optimizer", "param"):
        path = table.get(f"offload_{key}_nvme_path", "")
        device = {"device": table.get(f"offload_{key}_device", "none")}
        zero[f"offload_{key}"] = {**device, "nvme_path": path} if path else device
    same = ("gradient_accumulation_steps", "gradient_clipping")
    return {"zero_optimization": zero, **{key: table.get(key) for key in same}}


def _fsdp(table: Table, reading: _Reading) -> None:
    config = fsdp_keys.unprefixed(table)
    patch, different = fsdp_keys.options_of(config)
    reading.patch |= {"train.activation_checkpointing": False, **patch}
    reading.different += different
    if patch["parallel.strategy"] == "fsdp2" and config.get("cpu_ram_efficient_loading") is False:
        # So that fsdp.json agrees.
        reading.patch["parallel.extra_config"] = as_json({"cpu_ram_efficient_loading": False})
