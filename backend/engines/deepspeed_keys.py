"""A DeepSpeed configuration as DeepSpeed reads it: one spelling of each key, and what it would refuse or ignore.

The keys are in registry.deepspeed_keys, a table that is made from DeepSpeed's own classes.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from backend.registry import deepspeed_keys
from backend.registry.deepspeed_keys import DEPRECATED, KEYS, NULLABLE, OPEN, SPELLINGS, STRICT
from backend.registry.types import DeepSpeedKey

Table = Mapping[str, Any]
AUTO = "auto"  # pydantic blocks drop it; elsewhere, the Trainer must fill it in
ZERO, OLD_BF16 = "zero_optimization", "bfloat16"
OFFLOAD_SWITCHES = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}  # of ZeRO before 0.3.16
FILLED_IN = {  # by the Trainer: transformers 5.23 integrations/deepspeed.py
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
}  # fmt: skip
# The Trainer and accelerate 1.15 utils/dataclasses.py fill in these too; DeepSpeed takes the default of all others.
FILLED_IN_BLOCKS = {
    "bf16.enabled", "fp16.enabled", "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size", "zero_optimization.stage3_param_persistence_threshold",
}  # fmt: skip
COMMENTS = ("_", "//", "#")  # keys that begin with these are comments, which JSON lacks
# Keys that accelerate 1.15 utils/dataclasses.py and transformers add, and DeepSpeedConfig does not read.
OTHER_READERS = {"msamp"}
TRUE, FALSE = ("true", "t", "yes", "y", "on", "1"), ("false", "f", "no", "n", "off", "0")  # as pydantic reads text
INTEGER = re.compile(r"\s*[+-]?\d+(_\d+)*(\.0+)?\s*")
MIN_SIMILARITY = 0.7  # difflib ratio
BLOCKS = {path.rpartition(".")[0] for path in (*KEYS, *STRICT, *OPEN)} | {*STRICT, *OPEN}
WITHOUT_EFFECT = tuple(path for path, new in DEPRECATED.items() if new not in {*KEYS, *BLOCKS})
TOP_BLOCKS = tuple(sorted(block for block in BLOCKS if block and "." not in block and block != "datastates_ckpt"))


def as_boolean(value: Any) -> bool | None:
    """True or false as pydantic reads it from a boolean, 0 or 1, or text; None for anything else."""
    if isinstance(value, bool | int | float):
        return bool(value) if value in (0, 1) else None
    text = value.lower() if isinstance(value, str) else ""
    return True if text in TRUE else False if text in FALSE else None


def normalize(config: Table) -> dict[str, Any]:
    """`config` with one spelling of each key. A second spelling with another value stays, and `problems` names it."""
    found = dict(config)
    if OLD_BF16 in found and "bf16" not in found:
        found["bf16"] = found.pop(OLD_BF16)
    for block in {path.rpartition(".")[0] for path in (*SPELLINGS, *DEPRECATED)} - {""}:
        if isinstance(found.get(block), Mapping):
            found[block] = _normalize_block(block, found[block])
    return _without_auto(found)


def _without_auto(table: Table, prefix: str = "") -> dict[str, Any]:
    """`table` without each "auto" that nobody fills in: DeepSpeed drops it, and it must not replace a value of
    Footplate."""
    found = {}
    for key, value in table.items():
        path, is_checked = f"{prefix}{key}", prefix[:-1] in STRICT
        if value == AUTO and is_checked and path not in FILLED_IN_BLOCKS:
            continue
        is_block = isinstance(value, Mapping) and path in BLOCKS and path not in OPEN
        inner = _without_auto(value, f"{path}.") if is_block else value
        if inner or not is_block or not value:
            found[key] = inner
    return found


def _normalize_block(block: str, given: Table) -> dict[str, Any]:
    """A block with one spelling of each key."""
    found = dict(given)
    for path, new in (*SPELLINGS.items(), *DEPRECATED.items()):
        name, target = path.rpartition(".")[2], new.rpartition(".")[2]
        if path != f"{block}.{name}" or name not in found or name in OFFLOAD_SWITCHES or new not in {*KEYS, *BLOCKS}:
            continue
        if found.get(target, AUTO) in (AUTO, found[name]):
            found[target] = found.pop(name)
    for name, target in OFFLOAD_SWITCHES.items() if block == ZERO else ():
        if found.get(target, AUTO) is None:
            found[target] = {"device": "none"}  # null turns off what an option offloads
        is_on, offload = as_boolean(found.get(name)), found.get(target) or {}
        if name not in found or (is_on is None and found[name] not in (None, AUTO)):
            continue
        if not is_on:
            del found[name]
        elif not isinstance(offload, Mapping) or offload.get("device", "cpu") in (AUTO, "cpu"):
            del found[name]
            found[target] = {**(offload if isinstance(offload, Mapping) else {}), "device": "cpu"}
    return found


def earlier_spelling(config: Table, path: str) -> str:
    """The deprecated key of `config` that `normalize` has turned into `path`; '' if there is none."""
    block = config.get(ZERO)
    for name, target in OFFLOAD_SWITCHES.items():
        if path == f"{ZERO}.{target}.device" and isinstance(block, Mapping) and as_boolean(block.get(name)):
            return f"{ZERO}.{name}"
    return ""


def is_known(key: str, block: str = "") -> bool:
    """Whether DeepSpeed reads a key of a block, or at the top of its configuration."""
    return f"{block}.{key}".lstrip(".") in {*KEYS, *BLOCKS, *SPELLINGS, *DEPRECATED}


def problems(config: Table) -> tuple[dict[str, str], dict[str, str]]:
    """(what DeepSpeed refuses, what it ignores) of a normalized configuration: dotted keys, and what is wrong. Blocks
    at the top that are not objects are left out."""
    refused: dict[str, str] = {}
    ignored: dict[str, str] = {}
    for path, value in _entries(config):
        block = path.rpartition(".")[0]
        if path in BLOCKS:
            wrong = "" if not block or _is_block(path, value) else "must be an object"
        elif path in SPELLINGS or path in DEPRECATED:
            wrong = _superfluous(path, value)
        elif path in KEYS:
            wrong = _wrong_value(path, value)
        else:
            known = closest(path)
            hint = f" (the closest one that it knows is {known})" if known else ""
            wrong = f"DeepSpeed does not know this key{hint}"
        is_known = path in KEYS or path in BLOCKS or path in SPELLINGS
        has_no_effect = path in WITHOUT_EFFECT and not _wrong_value(path, value)
        is_ignored = path == OLD_BF16 or has_no_effect or not (is_known or block in STRICT)
        if wrong:
            (ignored if is_ignored else refused)[path] = wrong
    return refused, ignored


def _superfluous(path: str, value: Any) -> str:
    """What is wrong with a second spelling, or a deprecated key, that `normalize` has left."""
    if path in WITHOUT_EFFECT:
        return _wrong_value(path, value) or "is deprecated and has no effect; the option is parallel.pin_memory"
    if path in DEPRECATED:
        return _wrong_value(path, value) or f"is the deprecated form of {DEPRECATED[path]}, which is set too"
    return f"is a second spelling of {SPELLINGS[path]}, which is set too"


def _entries(table: Table, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of all blocks whose keys are known, and of the keys in them."""
    for key, value in table.items():
        path = f"{prefix}{key}"
        is_comment = key.startswith(COMMENTS) and prefix[:-1] not in STRICT
        if path not in OTHER_READERS and not is_comment:
            yield path, value
        if path in BLOCKS and path not in OPEN and isinstance(value, Mapping):
            yield from _entries(value, f"{path}.")


def _is_block(path: str, value: Any) -> bool:
    """Whether DeepSpeed accepts `value` for a block within a block."""
    strict = path.rpartition(".")[0] in STRICT
    return isinstance(value, Mapping) or (value is None and path in NULLABLE) or (strict and value == AUTO)


def _wrong_value(path: str, value: Any) -> str:
    """What is wrong with the value of a known key; '' if DeepSpeed accepts it."""
    key, is_checked = KEYS[path], path.rpartition(".")[0] in STRICT
    if (value == AUTO and (is_checked or path in FILLED_IN)) or (value is None and key.nullable):
        return ""
    if ACCEPTED[key.kind](value) and _is_in_range(key, value) and _is_choice(key, value):
        return ""
    return f"must be {_expected(key)}, not {value!r}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _as_float(value: Any) -> float:
    """The number in a number or text; not a number for anything else."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _is_integer(value: Any) -> bool:
    if isinstance(value, str):
        return bool(INTEGER.fullmatch(value))
    return isinstance(value, int) or (isinstance(value, float) and value.is_integer())


def _has_decimals(value: Any) -> bool:
    """Text that Python's int() refuses, unlike pydantic."""
    return isinstance(value, str) and "." in value


def _is_float(value: Any) -> bool:
    return isinstance(value, int | float | str) and (value in ("nan", "NaN") or not math.isnan(_as_float(value)))


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


ACCEPTED: Mapping[str, Callable[[Any], bool]] = {
    "bool": lambda value: as_boolean(value) is not None,
    "flag": lambda value: isinstance(value, bool) or (_is_number(value) and value in (0, 1)),
    "number": _is_number,
    "int": _is_integer,
    "count": lambda value: _is_integer(value) and not isinstance(value, str),
    "integer": lambda value: _is_integer(value) and not isinstance(value, bool) and not _has_decimals(value),
    "float": _is_float,
    "finite": lambda value: not isinstance(value, bool) and math.isfinite(_as_float(value)),
    "str": lambda value: isinstance(value, str),
    "caseless": lambda value: isinstance(value, str),
    "strings": _is_strings,
    "names": lambda value: isinstance(value, str) or _is_strings(value),
    "list": lambda value: isinstance(value, list),
    "dict": lambda value: isinstance(value, Mapping),
    "any": lambda value: True,
    "none": lambda value: False,
}
NAMES = {
    "bool": "true or false", "flag": "true or false", "number": "a number", "int": "an integer", "count": "an integer",
    "integer": "an integer", "float": "a number", "finite": "a finite number", "str": "text", "names": "a list of text",
    "strings": "a list of text", "list": "a list", "dict": "an object", "none": "left out",
}  # fmt: skip


def _is_in_range(key: DeepSpeedKey, value: Any) -> bool:
    if key.minimum is key.above is key.maximum is key.below is None:
        return True
    number = _as_float(value)
    return (
        (key.minimum is None or number >= key.minimum)
        and (key.above is None or number > key.above)
        and (key.maximum is None or number <= key.maximum)
        and (key.below is None or number < key.below)
    )


def _is_choice(key: DeepSpeedKey, value: Any) -> bool:
    if not key.choices:
        return True
    if isinstance(value, list):
        return all(item in key.choices for item in value)
    if key.kind == "int":
        return _as_float(value) in key.choices
    return (value.lower() if key.kind == "caseless" else value) in key.choices


def _expected(key: DeepSpeedKey) -> str:
    """The values that a key accepts, in words."""
    if key.choices:
        return f"{'a list of' if key.kind == 'strings' else 'one of'} {', '.join(map(str, key.choices))}"
    limits = (("of at least", key.minimum), ("above", key.above), ("of at most", key.maximum), ("below", key.below))
    given = [f"{word} {limit:g}" for word, limit in limits if limit is not None]
    return " ".join([NAMES[key.kind], " and ".join(given)]).strip()


def closest(path: str) -> str:
    """The known key that `path` most likely means: of similar spelling in the same block, or of the same name in
    another one; '' if there is none. Deprecated keys and second spellings give the key that replaced them."""
    block, _, name = path.rpartition(".")
    known = [*KEYS, *SPELLINGS, *DEPRECATED, *BLOCKS]
    names = {key.rpartition(".")[2]: key for key in known if key and key.rpartition(".")[0] == block}
    similar = difflib.get_close_matches(name, names, n=1, cutoff=MIN_SIMILARITY)
    same = [key for key in known if key.rpartition(".")[2] == name]
    found = names[similar[0]] if similar else min(same, key=len, default="")
    found = deepspeed_keys.SPELLINGS.get(found, found)
    replaced = deepspeed_keys.DEPRECATED.get(found, found)
    return replaced if replaced in {*KEYS, *BLOCKS} else found
