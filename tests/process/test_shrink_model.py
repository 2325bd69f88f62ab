"""The small model that rehearses a planned run: the same modules and tokenizer, few parameters, and it computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from architectures import model_types
from fork_server import ForkServer
from training_runs import log_text, make_spec, result
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from backend import presets
from backend.runs import LOCK, SPEC
from backend.train import describe_model, shrink_model
from backend.train.run_log import TrainError

HARD_LIMIT = 200_000_000
# Default configs of transformers 5.23 that no small model can be made of, and why.
NO_SMALL_MODEL = {
    "blt": "its hash embeddings have 3 billion parameters, which depend on no width",
    "deepseek_v2": "the default config has no num_experts_per_tok",
    "dots3_note": "its expert sizes have names of their own",
    "dots3_note_text": "its expert sizes have names of their own",
    "xlstm": "its sizes depend on each other",
}


def smaller(kind: str, **limits: Any) -> tuple[Any, Any]:
    """The default config of a model type, and the small one."""
    config = CONFIG_MAPPING[kind]()
    return config, shrink_model.shrink(config, HARD_LIMIT, **limits)


@pytest.mark.parametrize(
    ("kind", "layers", "more"),
    [
        ("llama", 2, {"head_dim": 128, "vocab_size": 32000}),
        pytest.param(
            "deepseek_v3", 4, {"n_routed_experts": 16, "num_experts_per_tok": 8, "n_group": 8}, marks=pytest.mark.soak
        ),  # three are dense
        pytest.param(
            "gemma3_text",
            6,
            {"head_dim": 256, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]},
            marks=pytest.mark.soak,
        ),
        ("jamba", 5, {"num_experts": 4}),  # attention in the fifth layer
    ],
)
def test_every_kind_of_layer_is_kept(kind: str, layers: int, more: dict[str, Any]) -> None:
    config, small = smaller(kind)
    built = shrink_model._built(small)
    assert small.num_hidden_layers == layers
    assert {name: getattr(small, name) for name in more} == more
    assert small.vocab_size == config.vocab_size
    assert {type(m) for m in built.modules()} == {type(m) for m in shrink_model._built(config).modules()}
    assert 20_000_000 < built.num_parameters() < shrink_model.TARGET


def test_heads_stay_divisible_by_the_ranks_that_share_them() -> None:
    _, small = smaller("qwen3", multiple=8, layers=5)
    assert small.num_attention_heads % 8 == 0 and small.num_key_value_heads % 8 == 0
    assert small.num_hidden_layers == 5
    _, small = smaller("qwen2", multiple=8)
    assert small.num_attention_heads >= 8


def test_no_small_model() -> None:
    with pytest.raises(TrainError, match="There is no small model of the architecture llama"):
        shrink_model.shrink(CONFIG_MAPPING["llama"](), 1000)


def test_the_command_writes_a_model_with_the_tokenizer(root: Path, tiny: Path, fork_server: ForkServer) -> None:
    folder, script = root / "shrink", root / "shrink.py"
    folder.mkdir()
    (folder / LOCK).touch()
    (folder / SPEC).write_text(presets.dump(make_spec({})))
    script.write_text("import sys\nfrom backend.train.shrink_model import main\ndel sys.argv[1]\nmain()\n")
    assert fork_server.run(folder, 0, str(root / "small"), script=str(script)) == 0, log_text(folder)
    assert "2 of 4 layers" in result(folder)["text"]
    model, tokenizer = (kind.from_pretrained(root / "small") for kind in (AutoModelForCausalLM, AutoTokenizer))
    assert model.num_parameters() < AutoModelForCausalLM.from_pretrained(tiny).num_parameters()
    original = AutoTokenizer.from_pretrained(tiny)
    assert (tokenizer.get_vocab(), tokenizer.chat_template) == (original.get_vocab(), original.chat_template)
    (folder / SPEC).write_text(json.dumps({"model": {"source": "path", "path": "/missing"}}))
    assert fork_server.run(folder, 0, str(root / "other"), script=str(script)) == 1
    assert "cannot be loaded" in log_text(folder)


@pytest.mark.soak
@pytest.mark.parametrize("kind", model_types())
def test_every_architecture_has_a_small_model(kind: str) -> None:
    """Default configs that transformers builds, of decoders."""
    try:
        config = CONFIG_MAPPING[kind]()
        large = shrink_model._built(config)
    except Exception as error:  # not a config of a real model
        pytest.skip(f"the default config cannot be built: {error}"[:100])
    if describe_model._kind(config) != "decoder":
        pytest.skip("not a decoder")
    if kind in NO_SMALL_MODEL:
        with pytest.raises(TrainError):
            shrink_model.shrink(config, HARD_LIMIT)
        return
    small = shrink_model._built(shrink_model.shrink(config, HARD_LIMIT))
    assert small.num_parameters() <= min(large.num_parameters(), HARD_LIMIT)
    assert small.get_input_embeddings().num_embeddings == large.get_input_embeddings().num_embeddings
