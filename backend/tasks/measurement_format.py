"""The format of measurement reports: which values they can have, so that nothing else can be in one.

Each value is a number, a boolean, a version, the model number of a device, or one of a fixed set of words. Anything
else becomes null, or "other" where a word is expected. Reports are filtered both when they are written and when they
are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from packaging.version import InvalidVersion, Version

from backend import registry
from backend.config.options import Option, options
from backend.machine.packages import PACKAGES
from backend.memory.kinds import KIND_OF
from backend.modelspec import ARCHITECTURES
from backend.registry import architectures
from backend.runs import failure
from backend.runs.folder import ENDS
from backend.runs.json_values import is_number
from backend.timing.estimate import CPU, GPUS, NETWORK, OPERATIONS, PROCESSES, RANKS
from backend.timing.whole_run import PRECOMPUTATION, START, STEPS

NAME, VERSION = "footplate-measurement", 1
OTHER = "other"
MAX_ITEMS = 4096  # of a list
MAX_DIGITS = 18
# A choice that is the name of a model or of a dataset.
NAMES = ("model.builtin", "data.builtin")
MEMORY_ITEMS = (
    *KIND_OF, "Libraries", "Model loading", "Checkpoint saving", "Offloaded optimizer state", "Offloaded parameters",
    "Experts", "Checkpoints", "Final model",
)  # fmt: skip
PHASES = ("Loading", "Forward and backward", "Forward", "Backward", "Optimizer step", "Evaluation", "Generation")
TIME_ITEMS = (
    "Linear layers", "Output layer and loss", "Attention", "Norms, activations and residuals", "Reading the weights",
    "LoRA adapters", "Dequantization", "Gradients", "Reference model", "Optimizer step",
    CPU, OPERATIONS, NETWORK, GPUS, PROCESSES, RANKS, START, PRECOMPUTATION, STEPS, "Evaluations",
    "Checkpoints and final model",
)  # fmt: skip
FAILURES = (
    failure.DEVICE_MEMORY, failure.HOST_MEMORY, failure.SHARED_MEMORY, failure.DISK, failure.PORT, failure.TIMEOUT,
    failure.DEVICE, failure.COLUMNS, failure.DIVERGED, failure.LAUNCHER, failure.CHECKS,
)  # fmt: skip
MODEL_TYPES = {
    *ARCHITECTURES, *architectures.UNTRAINABLE, *architectures.CONVERTED_WEIGHTS, *architectures.NO_LAYER_LIST,
    *architectures.NO_TENSOR_PARALLELISM, *architectures.NO_TENSOR_FSDP2, *architectures.NO_PADDING,
    *architectures.NOT_CALLED,
}  # fmt: skip
ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2")
DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "auto")
BUILDS = re.compile(r"cu\d{2,3}|rocm\d+(\.\d+){0,2}|cpu|xpu")  # after the + in a version of torch
# Words in the names of GPUs and CPUs; other words, which a hypervisor or a description may add, are left out.
_DEVICE_WORDS = """
    nvidia geforce rtx gtx quadro tesla titan ti super laptop pcie nvl ada generation blackwell grace
    amd instinct radeon pro xt xtx epyc ryzen threadripper intel r tm xeon core ultra arc platinum gold silver bronze
    data center gpu cpu max apple ascend neoverse cortex ampere altra graviton processor skylake cascadelake icelake
    sapphire sapphirerapids rapids emeraldrapids graniterapids broadwell haswell milan rome genoa turin
"""
DEVICE_WORDS = frozenset(_DEVICE_WORDS.split())
MODEL_NUMBER = re.compile(
    r"(?:A|B|C|E|H|I|i|K|L|M|MI|N|P|PRO|RTX|RX|SXM|T|V|W|X|GB|GH|GV|HBM)?\d{1,5}(?:[A-Z]{1,2}|GB|GiB|-Core|Ti|\+)?"
    r"|\d{1,2}(?:\.\d{1,2})?GHz"
)

Kind = Callable[[Any], Any]


def number(value: Any) -> float | None:
    """A finite number."""
    return value if is_number(value) and abs(value) < 10**MAX_DIGITS else None


def flag(value: Any) -> bool | None:
    """A boolean."""
    return value if isinstance(value, bool) else None


def word(known: Collection[str]) -> Kind:
    """One of the `known` words; "other" for another text."""

    def kind(value: Any) -> str | None:
        if not isinstance(value, str) or not value:
            return None
        return value if value in known else OTHER

    return kind


def version(value: Any) -> str | None:
    """The public part of a version, and the build of torch: 2.13.0+cu130."""
    try:
        found = Version(str(value))
    except InvalidVersion:
        return None
    return found.public + (f"+{found.local}" if found.local and BUILDS.fullmatch(found.local) else "")


def device_name(value: Any) -> str | None:
    """The words and model numbers of products in the name of a GPU or CPU. A word with parts, such as A100-SXM4, is
    kept whole or not at all, since a part of ip-10-0-0-12 or of Max's would say something else."""
    kept = []
    for whole in value.split() if isinstance(value, str) else ():
        parts = re.findall(r"[A-Za-z0-9+.]+(?:-Core\b)?", whole)
        are_known = all(part.lower() in DEVICE_WORDS or MODEL_NUMBER.fullmatch(part) for part in parts)
        if are_known and (len(parts) == 1 or re.search("[A-Za-z]", whole)):
            kept += parts
    return " ".join(kept) or None


def _of_option(option: Option) -> Kind | None:
    if option.kind == "choice" and option.name not in NAMES:
        return word([value for value, _ in option.choices])
    return {"bool": flag, "int": number, "float": number}.get(option.kind)


def _numbers(*names: str) -> dict[str, Any]:
    return dict.fromkeys(names, number)


OPTIONS: Mapping[str, Kind] = {option.name: kind for option in options() if (kind := _of_option(option))}
_TIME_ITEMS = [{"item": word(TIME_ITEMS), "seconds": number}]
# A list has the kind of its elements.
SCHEMA: Mapping[str, Any] = {
    "format": word([NAME]),
    "version": number,
    "hardware": {
        "device": word(registry.DEVICES),
        "detected": flag,
        "cpu": device_name,
        "cpu_bf16": flag,
        **_numbers("nodes", "cores", "ram_bytes", "ram_free_bytes", "gpu_link_rate", "network_rate", "disk_rate"),
        "gpus": [{"name": device_name, **_numbers("total_bytes", "free_bytes"), "capability": [number]}],
        "cpu_rates": _numbers(
            "matmul", "small", "attention", "activations", "memory", "logit", "layer", "processes", "busy", "cores"
        ),
    },
    "software": {"driver": version, "python": version, "footplate": version, **dict.fromkeys(PACKAGES, version)},
    "options": OPTIONS,
    "texts_left_out": {option.name: number for option in options() if option.name not in OPTIONS},
    "resolved": {
        "compute_dtype": word(("bf16", "fp16", "fp32")),
        **_numbers("world_size", "data_parallel_size", "global_batch_size", "parameter_shards", "optimizer_shards"),
    },
    "model": {
        "model_type": word(MODEL_TYPES),
        **_numbers("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocabulary", "max_positions"),
        **_numbers("experts", "experts_per_token", "weight_bits", "sliding_window", "parameters", "layer_parameters"),
        "tied": flag,
        "gated_mlp": flag,
        "dtype": word(DTYPES),
        "activation": word(ACTIVATIONS),
        "trainable_parameters": number,
    },
    "data": {
        **_numbers("examples_in_files", "examples_read", "labeled_share", "train_examples", "eval_examples"),
        "token_lengths": [number],
    },
    "predicted": {
        "memory": {
            "items": [{"item": word(MEMORY_ITEMS), "where": word(("device", "host", "disk")), "bytes": number}],
            "phases": [{"phase": word(PHASES), "bytes": number}],
            **_numbers("device_bytes", "low_bytes", "high_bytes", "comparable_bytes", "capacity_bytes"),
            **_numbers("host_bytes", "disk_bytes"),
        },
        "time": {
            **_numbers("step_seconds", "factor", "tokens_per_second", "padded", "run_seconds"),
            "items": _TIME_ITEMS,
            "run_items": _TIME_ITEMS,
        },
    },
    "measured": {
        **{name: [number] for name in ("allocated_bytes", "reserved_bytes", "device_bytes", "host_bytes")},
        "needed_at_least_bytes": number,
        **_numbers("steps", "tokens", "tokens_per_second", "step_seconds", "step_seconds_median", "step_seconds_p95"),
        **_numbers("training_seconds", "run_seconds"),
        "was_busy": flag,  # other programs used the CPU
        "load": [_numbers("cores", "data", "probe", "utilization", "power")],
    },
    "end": {"state": word(ENDS), "failure": word(FAILURES), "exit_code": number},
}


def allowed(value: Any, schema: Any = SCHEMA) -> Any:
    """What of `value` the format permits: keys of the schema, and values of its kinds."""
    if isinstance(schema, Mapping):
        found = value if isinstance(value, Mapping) else {}
        parts = {name: allowed(found[name], kind) for name, kind in schema.items() if name in found}
        return {name: part for name, part in parts.items() if part is not None} or None
    if isinstance(schema, list):
        return [allowed(each, schema[0]) for each in value[:MAX_ITEMS]] if isinstance(value, list | tuple) else None
    return schema(value)
