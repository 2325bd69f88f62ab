"""When an option has an effect, in words; and the options that are set without one."""

from __future__ import annotations

from collections.abc import Sequence

from backend.config import RunSpec
from backend.config.data import Source
from backend.config.fields import Condition
from backend.config.options import Option, by_name, effective, for_dataset, get, renamed, word


def without_effect(spec: RunSpec) -> list[str]:
    """A sentence for each option that differs from its default, but that the other options hide: a form clears none of
    them, and a file can set any."""
    own = {f"data.{name}" for name in Source.model_fields}
    found = []
    for index in range(len(spec.data.datasets)):
        alone = for_dataset(spec, index)
        used = effective(alone)
        for name, option in by_name().items():
            is_mine = index == 0 or name in own
            if is_mine and name != "data.sources" and get(alone, name) != get(used, name):
                condition = renamed(_unmet_text(option, used), index)
                only = " only" if len(option.when) == 1 else ", for example,"
                found.append(f"{renamed(name, index)} has no effect: it is used{only} if {condition}.")
    return found


def _unmet_text(option: Option, spec: RunSpec) -> str:
    """What keeps `option` from having an effect in `spec`; of several alternatives, the one with the fewest changes."""
    unmet = [
        {name: allowed for name, allowed in condition.items() if word(get(spec, name)) not in allowed}
        for condition in option.when
    ]
    return condition_text(min(unmet, key=len))


def conditions_text(option: Option) -> str:
    """When an option has an effect; '' if always."""
    return "; or ".join(map(condition_text, option.when))


def condition_text(condition: Condition) -> str:
    """When a condition holds: 'train.stage is sft, and method.kind is lora or full'."""
    return ", and ".join(f"{name} {_is_one_of(by_name()[name], allowed)}" for name, allowed in condition.items())


def _is_one_of(option: Option, allowed: Sequence[str]) -> str:
    """A condition on the value of an option: 'is a, b or c', or where that is much shorter, 'is not d'."""
    if option.kind == "datasets":
        return "has several datasets"
    if tuple(allowed) == ("",):
        return "is empty"
    values = [value for value, _ in option.choices]
    positive = f"is {_listed(allowed, values)}"
    others = [value for value in values if value not in allowed]
    negative = f"is not {_listed(others, values)}" if others else positive
    return negative if len(allowed) > 3 and 3 * len(negative) < 2 * len(positive) else positive


def _listed(names: Sequence[str], values: Sequence[str]) -> str:
    """'a, b or `c*`': a pattern stands for several names if all `values` that match it are among them."""
    patterns = dict.fromkeys(_pattern(name, names, values) for name in names)
    prefixes = [pattern.strip("`*") for pattern in patterns if pattern.endswith("*`")]
    *others, last = (
        p for p in patterns if not any(p.strip("`*") != q and p.strip("`").startswith(q) for q in prefixes)
    )
    return f"{', '.join(others)} or {last}" if others else last


def _pattern(name: str, names: Sequence[str], values: Sequence[str]) -> str:
    """The widest pattern for the name and at least one other, if there is one; else the name."""
    words = name.split("_")
    prefixes = ["_".join(words[:count]) for count in range(1, len(words) + 1)]
    for prefix in prefixes:
        group = [value for value in values if value.startswith(prefix)]
        if len(group) > 1 and set(group) <= set(names):
            longer = [f"{p}_" for p in prefixes if p.startswith(prefix) and all(v.startswith(f"{p}_") for v in group)]
            return f"`{[prefix, *longer][-1]}*`"
    return name
