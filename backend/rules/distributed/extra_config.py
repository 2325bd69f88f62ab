"""Reading and editing parallel.extra_config, and the rules of extra config that hold for every engine.

Extra config is JSON that overrides keys of the engine's configuration file (deepspeed.json, fsdp.json): keys that have
no option, often from an imported file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from backend.config import merge
from backend.engines.fsdp_keys import STATE_DICTS
from backend.rules.base import Case, Example, Fix, Violation, error, names, warning
from backend.rules.examples import TWO_H100

EXTRA_CONFIG, CHECKPOINT_FORMAT = "parallel.extra_config", "state_dict_type"
ZERO2, ZERO3 = {"parallel.strategy": "zero2"}, {"parallel.strategy": "zero3"}
HARMLESS = Example({**ZERO2, EXTRA_CONFIG: '{"wall_clock_breakdown": true}'}, TWO_H100)


def zero3_example(extra: Mapping[str, Any]) -> Example:
    """ZeRO-3 on two GPUs with this extra config."""
    return Example({**ZERO3, EXTRA_CONFIG: json.dumps(extra)}, TWO_H100)


def extra_config(case: Case, config_file: str) -> dict[str, Any]:
    """The extra config with one spelling of each key, if it is for this configuration file; otherwise empty."""
    engine = case.run.engine
    return engine.normalize(merge.parse(case.spec.parallel.extra_config)) if engine.config_file == config_file else {}


def value_at(table: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path; "auto" if there is none."""
    for name in path.split("."):
        if not isinstance(table, Mapping) or name not in table:
            return merge.AUTO
        table = table[name]
    return table


def number(value: Any) -> float:
    """The value if it is a number; otherwise 1, which has no effect in the keys that rules compare with it."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else 1


def without_keys(extra: Mapping[str, Any], paths: list[str], field: str = EXTRA_CONFIG) -> dict[str, Any]:
    """A patch that removes the dotted `paths` from the extra config, along with tables that become empty."""

    def remaining(table: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        found = {}
        for name, value in table.items():
            path = f"{prefix}{name}"
            if path in paths:
                continue
            inner = remaining(value, f"{path}.") if isinstance(value, Mapping) else value
            if inner != {} or value == {}:
                found[name] = inner
        return found

    rest = remaining(extra, "")
    return {field: json.dumps(rest, indent=2) if rest else ""}


def renamed(table: Mapping[str, Any], names: Mapping[str, str], prefix: str = "") -> dict[str, Any]:
    """The table with other names of some keys; `names`: dotted path -> the one in the same block that replaces it."""
    found = {}
    for name, value in table.items():
        path = f"{prefix}{name}"
        inner = renamed(value, names, f"{path}.") if isinstance(value, Mapping) else value
        found[names[path].rpartition(".")[2] if path in names else name] = inner
    return found


@warning(
    "STR025",
    fields=(EXTRA_CONFIG,),
    title="Extra config overrides other options",
    source="Footplate merges extra config over the file that it generates from the options",
    fixes=(Fix("Clear the extra config", {EXTRA_CONFIG: ""}),),
    fails_on=Example({**ZERO2, EXTRA_CONFIG: '{"zero_optimization": {"overlap_comm": false}}'}, TWO_H100),
    passes_on=HARMLESS,
)
def extra_config_overrides_options(case: Case) -> str | None:
    """Where extra config and options set the same key, the engine gets the value from the extra config, while the
    checks and the memory estimate use the options."""
    if not case.run.engine.config_file or not case.spec.parallel.extra_config:
        return None
    generated = case.run.engine.configuration(case.with_patch({EXTRA_CONFIG: ""}))
    overridden = merge.paths(merge.conflicts(extra_config(case, case.run.engine.config_file), generated))
    if not overridden:
        return None
    return (
        f"The extra config changes {names(overridden)} in {case.run.engine.config_file}. Checks and memory estimate "
        "use the values of the options instead."
    )


@error(
    "STR036",
    fields=(EXTRA_CONFIG, "parallel.strategy"),
    title="Extra config contradicts the strategy",
    source="Footplate merges extra config over the generated file; rules and memory estimate use the options",
    fails_on=zero3_example({"zero_optimization": {"stage": 2}}),
    passes_on=zero3_example({"zero_optimization": {"stage": 3}}),
)
def extra_config_contradicts_strategy(case: Case) -> Violation | None:
    """ZeRO stage, FSDP version, offload devices and the format of checkpoints have their own options. A different
    value in the extra config would start a run that was neither checked nor estimated."""
    engine = case.run.engine
    extra = extra_config(case, engine.config_file) if engine.config_file else {}
    expected = engine.protected_values(case.spec)
    wrong = [path for path, value in expected.items() if _contradicts(path, value_at(extra, path), value)]
    written = merge.parse(case.spec.parallel.extra_config)
    values = []
    for path in wrong:
        earlier = engine.earlier_spelling(written, path)
        about = f"{f'written as {earlier}; ' if earlier else ''}options: {json.dumps(expected[path])}"
        values.append(f"{path} to {json.dumps(value_at(extra, path))} ({about})")
    message = (
        f"The extra config sets {names(values)}, but the checks and the memory estimate assume the values of the "
        "options."
    )
    for table in {path.partition(".")[0] for path in expected if "." in path}:
        if not isinstance(extra.get(table, {}), Mapping):
            wrong, message = (
                [table],
                f"The extra config sets {table} to {json.dumps(extra[table])}; it must be a JSON object.",
            )
    if not wrong:
        return None
    removed = without_keys(extra, [path.removesuffix(".device") for path in wrong])
    return Violation(message, (*_use_extra_config(case, extra, wrong), Fix("Use the options", removed)))


def _contradicts(path: str, given: Any, expected: Any) -> bool:
    """Whether the extra config has another value than the options. STR042 refuses formats that FSDP does not know."""
    if path == CHECKPOINT_FORMAT:
        return str(given).upper() in {*STATE_DICTS.values()} - {expected}
    return given not in (merge.AUTO, expected)


def _use_extra_config(case: Case, extra: Mapping[str, Any], wrong: list[str]) -> tuple[Fix, ...]:
    """The fix that sets the options to what the extra config says, if options can express all of it."""
    engine = case.run.engine
    option_of = engine.protected_options()
    if not all(path in option_of for path in wrong):
        return ()
    formats = {theirs: own for own, theirs in STATE_DICTS.items()}
    given = {path: value_at(extra, path) for path in wrong}
    options = {option_of[path]: formats.get(str(value).upper(), value) for path, value in given.items()}
    patch = {**without_keys(extra, wrong), **options}
    if not case.takes(patch):
        return ()
    values = engine.protected_values(case.with_patch(patch))
    if any(_contradicts(path, value, values[path]) for path, value in given.items()):
        return ()  # the strategy does not offload this
    if wrong == [CHECKPOINT_FORMAT]:
        return (Fix("Save checkpoints as in the extra config", patch),)
    return (Fix("Offload as in the extra config", patch, cost="slower steps"),)
