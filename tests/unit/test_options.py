"""Options: declared whole, hidden without effect, bad values named with the way out."""

import random

import pytest

from backend.config import RunSpec
from backend.config import options as o
from backend.config.presets import dump, load

OPTIONS = o.options()
NAMES = [option.name for option in OPTIONS]


def other(option):
    """A valid value of `option` that is not its default."""
    match option.kind:
        case "bool":
            return not option.default
        case "choice":
            return next(value for value, _ in option.choices if value != option.default)
        case "int" | "float":
            low = option.minimum if option.minimum is not None else 0
            high = option.maximum if option.maximum is not None else low + 100
            number = (low + high) / 2 if option.kind == "float" else int(low + high) // 2
            return number if number != option.default else number + 1
        case "list":
            return (1,) if option.name == "launch.devices" else ("a", "b")
        case "table":
            return {"A": "1"}
        case _ if "extra_" in option.name:  # JSON
            return '{"a": 1}'
        case _:
            return "something"


def single(option):
    return len(option.choices) == 1


def test_all_are_declared_whole():
    assert len(OPTIONS) >= 80
    assert len(set(NAMES)) == len(NAMES)
    for option in OPTIONS:
        assert option.label and option.help.endswith("."), option.name


def implies(condition, other):
    """Whether `other` holds wherever `condition` does."""
    return all(name in condition and set(condition[name]) <= set(allowed) for name, allowed in other.items())


@pytest.mark.parametrize("option", OPTIONS, ids=NAMES)
def test_conditions_are_options_and_closed(option):
    """What decides is an option with these values, and is itself shown whenever the option is."""
    for condition in option.when:
        for name, allowed in condition.items():
            decider = o.by_name()[name]
            values = [v for v, _ in decider.choices] if decider.choices else ["true", "false"]
            assert set(allowed) <= set(values)
            assert any(implies(condition, other) for other in decider.when), (
                f"{option.name} can be shown while {name}, which decides it, is hidden"
            )


def plain(value):
    return value == "true" if value in ("true", "false") else value


@pytest.mark.parametrize("option", [x for x in OPTIONS if not single(x)], ids=lambda x: x.name)
def test_hidden_has_no_effect_and_shown_has(option):
    for condition in option.when:
        base = RunSpec()
        for name, allowed in condition.items():
            base = o.edit(base, {name: plain(allowed[0])})
        changed = o.edit(base, {option.name: other(option)})
        assert dump(changed) != dump(base)
        for name in condition:
            decider = o.by_name()[name]
            for value in [v for v, _ in decider.choices] if decider.choices else ["true", "false"]:
                hide = {name: plain(value)}
                if not o.shown(o.edit(changed, hide), option):
                    assert dump(o.edit(changed, hide)) == dump(o.edit(base, hide))


def test_yaml_round_trip_of_random_specs():
    """What is written is read back as the same spec, hidden values apart."""
    dice = random.Random(7)
    for _ in range(300):
        patch = {x.name: other(x) for x in OPTIONS if not single(x) and dice.random() < 0.3}
        spec = o.edit(RunSpec(), patch)
        assert load(dump(spec)) == o.effective(spec)
        assert o.effective(o.effective(spec)) == o.effective(spec)


def test_form_text_is_read_back():
    spec = o.edit(RunSpec(), {"data.files": ("a b.jsonl", "c.csv"), "launch.env": {"A": "x=y", "B": ""}})
    shown = {option.name: o.text(option, o.get(spec, option.name)) for option in OPTIONS}
    assert o.parse(shown) == spec


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("train.num_train_epochs", None, "default is 3.0"),
        ("train.num_train_epochs", "", "default is 3.0"),
        ("train.per_device_train_batch_size", 1.5, "whole number"),
        ("train.per_device_train_batch_size", 0, "at least 1"),
        ("train.learning_rate", -1e-4, "more than 0"),
        ("train.learning_rate", "fast", "number"),
        ("train.learning_rate", float("nan"), "finite"),
        ("lora.r", 10**9, "at most"),
        ("train.optim", "adam", "one of adamw"),
        ("model.source", "ftp", "one of"),
        ("launch.env", "A B", "NAME=value"),
        ("launch.devices", "0, x", "whole number"),
        ("data.packing", "maybe", "true or false"),
        ("nothing.here", 1, "no option"),
    ],
)
def test_bad_values_are_named(name, value, says):
    with pytest.raises(o.SpecError) as caught:
        o.edit(RunSpec(), {name: value})
    assert [p.field for p in caught.value.problems] == [name]
    assert says in caught.value.problems[0].message


def test_every_bad_value_is_named_at_once():
    with pytest.raises(o.SpecError) as caught:
        o.edit(RunSpec(), {"train.num_train_epochs": None, "train.per_device_train_batch_size": 0, "train.optim": "x"})
    assert len(caught.value.problems) == 3
