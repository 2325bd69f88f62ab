"""YAML: unreadable files, unknown fields and wrong types are sentences with file, line or field."""

import pytest

from backend import presets
from backend.options import SpecError, changes


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("train:\n  epochs: [1\n", "line"),
        ("- a\n- b\n", "sections"),
        ("train: 3\n", "is a section"),
        ("train:\n  epoch: 3\n", "train.epoch: is no option"),
        ("trian:\n  epochs: 3\n", "trian: is no option"),
        ("train:\n  epochs: -1\n", "train.epochs: must be more than 0"),
    ],
)
def test_bad_yaml_is_a_sentence(tmp_path, text, says):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        presets.read(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)


def test_missing_and_binary_files(tmp_path):
    with pytest.raises(SpecError, match="no such file, and no such preset"):
        presets.read("nothing-here")
    path = tmp_path / "x.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="cannot be read"):
        presets.read(path)


def test_presets_hold_only_what_differs():
    found = presets.presets()
    assert found
    for preset in found:
        assert preset.title and preset.about and preset.machine
        raw = (presets.PRESETS / f"{preset.name}.yaml").read_text()
        told = {f"{s}.{k}" for s, part in presets._mapping(raw).items() if s not in presets.HEAD for k in part}
        assert told == set(changes(preset.spec)), "a preset says what is hidden or default anyway"
