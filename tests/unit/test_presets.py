"""YAML: unreadable files, unknown fields and wrong types are sentences with file, line or field."""

from dataclasses import replace

import pytest

from backend import presets
from backend.glance import look
from backend.memory import estimate
from backend.options import SpecError, changes
from backend.rules import check
from backend.rules.examples import LLAMA_8B
from backend.shape import from_config

# What the config.json of the presets' models say: the hub is not asked in a test.
QWEN3 = {
    "model_type": "qwen3",
    "num_hidden_layers": 28,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
LLAMA_70B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "dtype": "bfloat16",
}
SHAPES = {
    "meta-llama/Llama-3.1-8B": LLAMA_8B,
    "meta-llama/Llama-3.1-8B-Instruct": LLAMA_8B,
    "meta-llama/Llama-3.3-70B-Instruct": from_config(LLAMA_70B),
    "Qwen/Qwen3-1.7B-Base": from_config(QWEN3),
}


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


@pytest.mark.parametrize("preset", presets.presets(), ids=lambda preset: preset.name)
def test_a_preset_runs_on_its_machine(preset, tmp_path):
    glance = look(preset.spec, tmp_path)
    if shape := SHAPES.get(preset.spec.model.hub_id):  # as it will be once the model is there
        glance = replace(glance, shape=shape.scoring if preset.spec.train.stage == "reward" else shape, unknown="")
    found = check(preset.spec, preset.machine, glance)
    assert [f.code for f in found if f.level != "advice"] == []
    fits = estimate(preset.spec, preset.machine, glance.shape).fits
    assert fits is True
    assert preset.machine.name and len(preset.about) < 160


def test_presets_hold_only_what_differs():
    found = presets.presets()
    assert found
    for preset in found:
        assert preset.title and preset.about and preset.machine
        raw = (presets.PRESETS / f"{preset.name}.yaml").read_text()
        told = {f"{s}.{k}" for s, part in presets._mapping(raw).items() if s not in presets.HEAD for k in part}
        assert told == set(changes(preset.spec)), "a preset says what is hidden or default anyway"


def test_the_first_one_runs_anywhere():
    """The page opens with it."""
    assert presets.presets()[0].name == "first-run"
    assert presets.presets()[-1].machine.nodes == 2
