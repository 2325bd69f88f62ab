"""Specs as YAML: errors name the file, the line or the option. Presets run on the machine that they are for."""

import pytest

from backend import presets
from backend.config.options import SpecError, changes
from backend.inspect import inspect_inputs
from backend.rules import Case, check


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train:\n  epochs: [1\n", "line"),
        ("- a\n- b\n", "sections"),
        ("train: 3\n", "is a section"),
        ("train:\n  epoch: 3\n", "train.epoch: unknown option; did you mean train.num_train_epochs?"),
        ("trian:\n  epochs: 3\n", "trian: unknown section; did you mean train?"),
        ("train:\n  seed: 1\n  seed: 2\n", "line 3, column 3: seed is set twice"),
        ("train:\n  num_train_epochs: -1\n", "train.num_train_epochs: must be greater than 0, but is -1"),
    ],
)
def test_invalid_yaml_is_reported_with_its_file(tmp_path, text, message):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        presets.read(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_missing_and_binary_files(tmp_path):
    with pytest.raises(SpecError, match="no such file or preset"):
        presets.read("nothing-here")
    path = tmp_path / "x.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="cannot read"):
        presets.read(path)


@pytest.mark.parametrize("preset", presets.presets(), ids=lambda preset: preset.name)
def test_a_preset_runs_on_its_machine(preset, tmp_path):
    facts = inspect_inputs(preset.spec, tmp_path)
    findings = check(preset.spec, preset.machine, facts)
    assert [f.code for f in findings if f.level != "advice"] == []
    fits = Case(preset.spec, preset.machine, facts).estimate.fits
    assert fits is True
    assert preset.machine.name and len(preset.about) < 160


def test_presets_set_only_what_differs_from_the_defaults():
    for preset in presets.presets():
        assert preset.title and preset.about and preset.machine
        raw = (presets.PRESETS / f"{preset.name}.yaml").read_text()
        written = {f"{s}.{k}" for s, part in presets._mapping(raw).items() if s not in presets.HEADER for k in part}
        assert written == set(changes(preset.spec)), "a preset sets an inactive option, or a default"


def test_the_first_preset_is_for_any_machine():
    """The page opens with it."""
    assert presets.presets()[0].name == "first-run"
    assert presets.presets()[-1].machine.nodes == 2


def test_titles_differ_where_a_narrow_menu_cuts_them():
    titles = [preset.title[:20] for preset in presets.presets()]
    assert len(set(titles)) == len(titles), titles
