"""Rules about keys and values of the merged DeepSpeed configuration that DeepSpeed refuses or ignores."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from backend.config import merge
from backend.engines import deepspeed_keys
from backend.rules.base import Case, Fix, Violation, error, reasons, warning
from backend.rules.distributed.deepspeed_extra_config import REMOVED_KEYS
from backend.rules.distributed.extra_config import (
    EXTRA_CONFIG,
    HARMLESS,
    extra_config,
    renamed,
    value_at,
    without_keys,
    zero3_example,
)
from backend.runs import DEEPSPEED


def _problems(case: Case) -> tuple[dict[str, str], dict[str, str]]:
    """The keys of deepspeed.json that DeepSpeed refuses, and those that it ignores, without those that another rule
    reports."""
    if not extra_config(case, DEEPSPEED):
        return {}, {}
    found = deepspeed_keys.problems(case.run.engine.configuration(case.spec))
    refused, ignored = ({path: why for path, why in part.items() if path not in REMOVED_KEYS} for part in found)
    return refused, ignored


def _rename(case: Case, wrong: Iterable[str], cost: str = "") -> tuple[Fix, ...]:
    """The fix that renames misspelled keys to the closest ones of their blocks, where DeepSpeed accepts their values
    for these. Of two keys that mean the same one, neither is renamed: one of the values would be lost."""
    extra = extra_config(case, DEEPSPEED)
    similar = {path: known for path in wrong if (known := _similar(case, extra, path))}
    meant = Counter(similar.values())
    names = {path: known for path, known in similar.items() if meant[known] == 1}
    if not names:
        return ()
    each = [f"{path} to {known.rpartition('.')[2]}" for path, known in names.items()]
    patch = {EXTRA_CONFIG: json.dumps(renamed(extra, names), indent=2)}
    return (Fix(f"Rename {' and '.join(each)}", patch, safe=False, cost=cost),)


def _similar(case: Case, extra: Mapping[str, Any], path: str) -> str:
    """The key of the same block that an unknown key most likely means; '' if there is none, the extra config sets it
    too, or DeepSpeed would refuse the value."""
    known = deepspeed_keys.closest(path)
    is_unknown = not deepspeed_keys.is_known(path)
    if not (known and is_unknown and known.rpartition(".")[0] == path.rpartition(".")[0]):
        return ""
    if value_at(extra, known) != merge.AUTO or value_at(extra, path) == merge.AUTO:
        return ""
    patch = {EXTRA_CONFIG: json.dumps(renamed(extra, {path: known}))}
    refused, ignored = _problems(replace(case, spec=case.with_patch(patch)))
    return "" if known in {*refused, *ignored} else known


@error(
    "STR054",
    fields=(EXTRA_CONFIG,),
    title="DeepSpeed does not accept these keys or values",
    source="deepspeed 0.19 runtime/zero/config.py, runtime/precision_config.py, monitor/config.py and others: their "
    "pydantic classes refuse unknown keys; runtime/config.py uses other values unchecked",
    fails_on=zero3_example({"bf16": {"loss_scale": 0}}),
    passes_on=zero3_example({"fp16": {"loss_scale": 0}}),
)
def invalid_deepspeed_keys(case: Case) -> Violation | None:
    """DeepSpeed's own classes validate its configuration at the start of the run, after the model is loaded: an unknown
    key or a value out of range ends the run with a ValidationError. DeepSpeed does not check its other keys: there, the
    text "false" counts as true."""
    refused, _ = _problems(case)
    if not refused:
        return None
    fix = Fix("Remove these keys", without_keys(extra_config(case, DEEPSPEED), list(refused)), safe=False)
    message = f"The extra config has keys or values that DeepSpeed refuses. {reasons(refused.items())}"
    renaming = _rename(case, refused)
    return Violation(message, (*renaming, replace(fix, cost="their values are lost" if renaming else "")))


@warning(
    "STR055",
    fields=(EXTRA_CONFIG,),
    title="DeepSpeed ignores these keys",
    source="deepspeed 0.19 runtime/config.py reads the keys that it knows from a dictionary, and ignores the rest; "
    "runtime/zero/config.py sets nothing from cpu_offload_use_pin_memory",
    fails_on=zero3_example({"gradient_clip": 1.0}),
    passes_on=HARMLESS,
)
def ignored_deepspeed_keys(case: Case) -> Violation | None:
    """Outside of the blocks that DeepSpeed validates, it silently ignores keys that it does not know: misspelled keys,
    keys of the wrong block, and keys of other programs."""
    _, ignored = _problems(case)
    if not ignored:
        return None
    fix = Fix("Remove these keys", without_keys(extra_config(case, DEEPSPEED), list(ignored)))
    message = f"The extra config has keys without an effect. {reasons(ignored.items())}"
    return Violation(message, (fix, *_rename(case, ignored, "the keys take effect")))
