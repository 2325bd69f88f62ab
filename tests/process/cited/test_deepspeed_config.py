"""The table of DeepSpeed's keys is that of the installed DeepSpeed, and both accept and refuse the same values."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
from deepspeed.runtime.config import DeepSpeedConfig

from backend.config import RunSpec, merge
from backend.config.options import edit
from backend.engines import engine_of
from backend.engines.deepspeed_keys import TOP_BLOCKS, normalize, problems
from backend.registry.deepspeed_keys import DEPRECATED, KEYS, SPELLINGS, STRICT
from cited import cites
from cited.deepspeed_table import MODELS, TABLE, make, text

VALUES = (
    True, False, 0, 1, 2, -1, 0.5, 1.0, -0.5, 1e9, math.inf, "auto", "true", "off", "2", "2.0", "1e3", " 3 ", "0.5",
    "cpu", "nvme", "none", "x", "", None, [], ["x"], ["z1"], [1], {}, {"x": 1}, "fp16", "BF16", "mean", "SUM", "Warn",
    "symmetric", "torch", "step", "nan",
)  # fmt: skip
# What the value of a key depends on; rules have these.
CONTEXT = {
    "zero_optimization.compute_grad_norm": {"zero_optimization": {"stage": 2}},
    "zero_optimization.offload_optimizer.ratio": {"zero_optimization": {"stage": 3}},
}


def nested(path: str, value: Any) -> dict[str, Any]:
    """A configuration with one key."""
    first, _, rest = path.partition(".")
    return {first: nested(rest, value) if rest else value}


def value_of(path: str) -> Any:
    """A value that the key accepts."""
    key = KEYS[path]
    return key.choices[0] if key.choices else True if key.kind == "bool" else 2


def is_refused(config: dict[str, Any]) -> bool:
    """Whether DeepSpeed's own parsing fails. Blocks are parsed by their class, which is what DeepSpeedConfig does."""
    block = next((name for name in MODELS if name == next(iter(config))), "")
    try:
        if block:
            MODELS[block](**config[block])
        else:
            DeepSpeedConfig({"train_batch_size": 1, **config})
    except Exception:
        return True
    return False


def test_the_table_is_that_of_the_installed_deepspeed() -> None:
    """UPDATE_GOLDEN=1 rewrites the table; review the difference."""
    generated = text(make())
    if os.environ.get("UPDATE_GOLDEN"):
        TABLE.write_text(generated)
    assert generated == TABLE.read_text(), "UPDATE_GOLDEN=1 writes it"


def checked_keys() -> tuple[str, ...]:
    """Keys whose values DeepSpeed checks when it reads the configuration."""
    unchecked = ("any", "flag", "number")
    return tuple(path for path, key in KEYS.items() if key.kind not in unchecked or path.rpartition(".")[0] in STRICT)


@cites("STR054")
@pytest.mark.parametrize("path", checked_keys())
def test_deepspeed_refuses_the_same_values(path: str) -> None:
    for value in VALUES:
        given = merge.override(nested(path, value), CONTEXT.get(path, {}))
        refused, _ = problems(normalize(given))
        assert bool(refused) == is_refused(given), f"{path}: {value!r}: {refused}"


@cites("STR055")
@pytest.mark.parametrize("block", ["", *STRICT, *TOP_BLOCKS])
def test_deepspeed_refuses_and_ignores_the_same_unknown_keys(block: str) -> None:
    given = nested(f"{block}.no_such_key".lstrip("."), 1)
    refused, ignored = problems(normalize(given))
    assert is_refused(given) == bool(refused)
    is_open = block.split(".")[0] in ("expert_parallel", "pipeline")
    assert bool(ignored) == (not refused and not is_open)


@pytest.mark.parametrize(("path", "new"), [*SPELLINGS.items(), *DEPRECATED.items()])
def test_one_spelling_of_each_key_reaches_deepspeed(path: str, new: str) -> None:
    """A second spelling together with the one that Footplate generates is refused; normalized, it replaces it."""
    blocks = {"bf16": {"enabled": True}, "tensor_parallel.tp": {"tp_size": 1}}
    ours = nested(new, {"device": "cpu"} if "offload" in new else blocks.get(new) or value_of(new))
    theirs = nested(path, True if path in DEPRECATED else blocks.get(new) or value_of(new))
    if "use_pin_memory" in path:
        assert problems(normalize(theirs))[1]
        return
    merged = merge.override(ours, theirs)
    assert is_refused(merged) == (path != "bfloat16")
    normalized = merge.override(ours, normalize(theirs))
    assert not is_refused(normalized)
    assert problems(normalized) == ({}, {})
    assert path.rpartition(".")[2] not in normalized.get(path.split(".")[0], normalized)


def test_two_values_of_one_key_are_named() -> None:
    key = "zero_optimization.max_live_parameters"
    both = {"zero_optimization": {"stage": 3, "max_live_parameters": 5, "stage3_max_live_parameters": 6}}
    assert is_refused(both)
    refused, _ = problems(normalize(both))
    assert "stage3_max_live_parameters" in refused[key]
    switches = {"zero_optimization": {"stage": 3, "cpu_offload": True, "offload_optimizer": {"device": "nvme"}}}
    assert is_refused(switches)
    assert "offload_optimizer" in problems(normalize(switches))[0]["zero_optimization.cpu_offload"]


@pytest.mark.parametrize("strategy", ["zero0", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_the_generated_configuration_is_accepted(strategy: str, offload: str) -> None:
    options = {"parallel.strategy": strategy, "parallel.offload_optimizer": offload, "parallel.offload_param": offload}
    config = engine_of(strategy).configuration(edit(RunSpec(), options))
    assert problems(config) == ({}, {})
    filled = {"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    assert not is_refused({**config, **filled, "gradient_clipping": 1.0})
