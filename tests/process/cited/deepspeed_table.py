"""The table of DeepSpeed's configuration keys in backend/registry/deepspeed_keys.py, made from the installed DeepSpeed.

Blocks that are pydantic models are read from their fields. All other keys are read with `get`, `in` and `[...]` while
DeepSpeedConfig parses a dictionary, which records them.
"""

from __future__ import annotations

import enum
import types
import typing
from dataclasses import fields
from pathlib import Path
from typing import Any

import deepspeed
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.compile.config import CompileConfig
from deepspeed.inference.config import WeightQuantConfig
from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.runtime import config as deepspeed_config
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from backend.registry.types import DeepSpeedKey

TABLE = Path(__file__).parents[3] / "backend" / "registry" / "deepspeed_keys.py"
MODELS: dict[str, type[BaseModel]] = {
    "zero_optimization": DeepSpeedZeroConfig, "bf16": DeepSpeedBF16Config, "fp16": DeepSpeedFP16Config,
    "comms_logger": CommsLoggerConfig, "tensorboard": TensorBoardConfig, "wandb": WandbConfig,
    "csv_monitor": CSVConfig, "comet": CometConfig, "hybrid_engine": deepspeed_config.HybridEngineConfig,
    "weight_quantization": WeightQuantConfig, "compile": CompileConfig, "tensor_parallel": TPTrainingConfig,
    "timers.throughput": DeepSpeedThroughputTimerConfig,
}  # fmt: skip
# Validated by functions, not by annotations.
VALIDATED: dict[str, DeepSpeedKey] = {
    "fp16.loss_scale": DeepSpeedKey("finite", minimum=0),
    "fp16.loss_scale_window": DeepSpeedKey("integer"),
    "fp16.min_loss_scale": DeepSpeedKey("integer"),
    "zero_optimization.zenflow.select_strategy": DeepSpeedKey("str", choices=("auto", "step", "epoch")),
    "zero_optimization.zenflow.select_interval": DeepSpeedKey("count"),
    "zero_optimization.zenflow.update_interval": DeepSpeedKey("count", minimum=1),
    "communication_data_type": DeepSpeedKey("caseless", choices=("fp16", "bf16", "fp32"), nullable=True),
    "seq_parallel_communication_data_type": DeepSpeedKey("caseless", choices=("fp16", "bf16", "fp32"), nullable=True),
    "gradient_allreduce_op": DeepSpeedKey("caseless", choices=("mean", "sum")),
    "checkpoint.tag_validation": DeepSpeedKey("caseless", choices=("warn", "ignore", "fail")),
    "checkpoint.parallel_write.pipeline_stage": DeepSpeedKey("flag"),
    **{
        f"zero_optimization.leaf_module.{name}": DeepSpeedKey("names") for name in ("classes", "names", "name_suffixes")
    },
}
# Blocks that DeepSpeed looks up with `in`, so that no default shows that they are blocks.
BLOCKS = {
    "optimizer", "scheduler", "activation_checkpointing", "flops_profiler", "aio", "autotuning", "data_efficiency",
    "torch_autocast", "timers", "data_efficiency.data_sampling", "data_efficiency.data_routing", "checkpoint.writer",
}  # fmt: skip
# Blocks whose keys are copied or passed on, so that parsing them does not show which are known.
OPEN = {
    "optimizer.params", "scheduler.params", "pipeline", "datastates_ckpt", "expert_parallel", "autotuning.arg_mappings",
    "autotuning.model_info", "data_efficiency.data_sampling.curriculum_learning",
    "data_efficiency.data_sampling.dynamic_batching", "data_efficiency.data_routing.random_ltd",
}  # fmt: skip
# Read only in some configurations, or by other parts of DeepSpeed.
READ_ELSEWHERE = {
    "optimizer.params": {}, "scheduler.params": {}, "vocabulary_size": None, "sequence_parallel_size": None,
}  # fmt: skip
OLD_BF16 = "bfloat16"


class Recorder(dict[str, Any]):
    """A dictionary that records the keys that are read, with their defaults; `blocks` are those that it contains."""

    def __init__(self, path: str, seen: dict[str, Any], blocks: set[str]) -> None:
        super().__init__()
        self.path, self.seen = path, seen
        for block in blocks:
            above, _, name = block.rpartition(".")
            if above == path:
                self[name] = Recorder(block, seen, blocks)

    def note(self, key: str, default: Any) -> None:
        path = f"{self.path}.{key}".lstrip(".")
        if self.seen.get(path) is None:
            self.seen[path] = default

    def get(self, key: str, default: Any = None) -> Any:
        self.note(key, default)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.note(str(key), None)
        return super().__contains__(key)

    def keys(self) -> Any:
        return self

    def __copy__(self) -> Recorder:
        return self


def recorded_defaults() -> dict[str, Any]:
    """Key -> default of every key that DeepSpeedConfig reads itself, apart from those of pydantic models."""
    seen: dict[str, Any] = {**READ_ELSEWHERE}
    blocks: set[str] = set()
    while True:
        settings = Recorder("", seen, blocks)
        settings["train_batch_size"] = 1
        config = deepspeed_config.DeepSpeedConfig.__new__(deepspeed_config.DeepSpeedConfig)
        config._param_dict, config.global_rank, config.world_size = settings, 0, 1
        config._initialize_params(settings)
        config._configure_train_batch_size()
        config._do_sanity_check()
        known = set(seen) - blocks - {*MODELS, OLD_BF16} - OPEN
        new = {path for path in known if isinstance(seen[path], dict) or path in BLOCKS}
        if not new:
            return {path: default for path, default in seen.items() if path not in {*MODELS, OLD_BF16, *blocks}}
        blocks |= new


def annotated_key(annotation: Any, path: str) -> DeepSpeedKey | type[BaseModel]:
    """The kind of value that a field of a pydantic model accepts; the model of a nested block."""
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        inner = [argument for argument in arguments if argument is not type(None)]
        found = annotated_key(inner[0], path)
        assert len(inner) == 1, f"{path}: add it to VALIDATED"
        return DeepSpeedKey(found.kind, found.choices, nullable=True) if isinstance(found, DeepSpeedKey) else found
    if typing.get_origin(annotation) is typing.Literal:
        return DeepSpeedKey("str", arguments)
    if typing.get_origin(annotation) is list:
        item = annotated_key(arguments[0], path)
        assert isinstance(item, DeepSpeedKey)
        return DeepSpeedKey("strings", item.choices)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        values = tuple(dict.fromkeys(member.value for member in annotation))
        return DeepSpeedKey("int" if issubclass(annotation, int) else "str", values)
    kinds = {
        bool: "bool", int: "int", float: "float", str: "str", Path: "str", list: "list", tuple: "list", dict: "dict",
        object: "any",
    }  # fmt: skip
    return DeepSpeedKey(kinds.get(typing.get_origin(annotation) or annotation, "none"))


def limits(info: FieldInfo) -> dict[str, Any]:
    """The range of a number, with inclusive limits unless `above` or `below`."""
    names = {"ge": "minimum", "gt": "above", "le": "maximum", "lt": "below"}
    return {name: getattr(part, key) for part in info.metadata for key, name in names.items() if hasattr(part, key)}


def model_keys(block: str, model: type[BaseModel], table: dict[str, Any]) -> None:
    """Add the keys of a pydantic model to `table`."""
    table["STRICT"].append(block)
    for name, info in model.model_fields.items():
        path = f"{block}.{info.alias or name}"
        extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
        if info.alias:
            table["SPELLINGS"][f"{block}.{name}"] = path
        if extra.get("deprecated"):
            new = str(extra["new_param"])
            aliases = {field: field_info.alias or field for field, field_info in model.model_fields.items()}
            table["DEPRECATED"][path] = f"{block}.{aliases.get(new, new)}"
        found = VALIDATED.get(path) or annotated_key(info.annotation, path)
        if isinstance(found, DeepSpeedKey):
            values = {field.name: getattr(found, field.name) for field in fields(found)}
            table["KEYS"][path] = DeepSpeedKey(**{**values, **limits(info)})
        else:
            model_keys(path, found, table)
            if type(None) in typing.get_args(info.annotation):
                table["NULLABLE"].append(path)


def make() -> dict[str, Any]:
    """The parts of the table."""
    table: dict[str, Any] = {
        "STRICT": [], "NULLABLE": [], "OPEN": sorted(OPEN), "SPELLINGS": {OLD_BF16: "bf16"}, "DEPRECATED": {},
        "KEYS": {},
    }  # fmt: skip
    for block, model in MODELS.items():
        model_keys(block, model, table)
    kinds = {bool: "flag", int: "number", float: "number"}
    for path, default in recorded_defaults().items():
        if path not in OPEN:
            table["KEYS"][path] = VALIDATED.get(path) or DeepSpeedKey(kinds.get(type(default), "any"))
    return table


def line(value: Any) -> str:
    """One key as Python code, without what is the default."""
    if not isinstance(value, DeepSpeedKey):
        return repr(value)
    given = {f.name: getattr(value, f.name) for f in fields(value) if getattr(value, f.name) != f.default}
    kind = given.pop("kind")
    return f"Key({', '.join([repr(kind), *(f'{name}={item!r}' for name, item in given.items())])})"


def text(table: dict[str, Any]) -> str:
    """The module backend/registry/deepspeed_keys.py."""
    parts = [HEADER.format(version=deepspeed.__version__)]
    for name, comment, annotation in SECTIONS:
        content = table[name]
        is_table = isinstance(content, dict)
        lines = [f"    {key!r}: {line(content[key])}," if is_table else f"    {key!r}," for key in content]
        start, end = "{}" if is_table else "()"
        code = "\n".join([f"# {comment}", f"{name}: {annotation} = {start}", *lines, f"{end}\n"])
        parts.append(code.replace("'", '"'))
    return "\n".join([parts[0] + parts[1], *parts[2:]])


SECTIONS = (
    ("STRICT", "Blocks in which DeepSpeed refuses unknown keys and values; in all others it ignores them.",
     "tuple[str, ...]"),
    ("NULLABLE", "Blocks that may be null.", "tuple[str, ...]"),
    ("OPEN", "Blocks whose keys are not listed here.", "tuple[str, ...]"),
    ("SPELLINGS", "Second spelling -> key. DeepSpeed refuses the two together.", "Mapping[str, str]"),
    ("DEPRECATED", "Deprecated key -> the key, or block, that replaced it.", "Mapping[str, str]"),
    ("KEYS", "Key -> the values that DeepSpeed accepts.", "Mapping[str, Key]"),
)  # fmt: skip
HEADER = '''"""The keys of a DeepSpeed configuration, as deepspeed {version} reads them.

Generated by tests/process/cited/test_deepspeed_config.py from DeepSpeed's own classes: UPDATE_GOLDEN=1 rewrites it.
"""

from __future__ import annotations

from collections.abc import Mapping

from backend.registry.types import DeepSpeedKey as Key

# fmt: off
# ruff: noqa: E501
'''
