"""Mixtures of experts: they answer as any model does, before, after, and as they are saved."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from host import Host
from trainings import a_spec, losses, result
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 2048}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
TOKENS = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2}


def a_mixture(root: Path, kind: str) -> Path:
    """A small one with the tokenizer of the tiny model."""
    folder = root / f"model-{kind}"
    shutil.copytree(root / "cache/models/tiny-llama", folder)
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **SIZES, **HEADS, **EXPERTS, **TOKENS)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_answers_before_after_and_of_what_is_saved(root: Path, host: Host, kind: str) -> None:
    """The loss that balances routers is taken of whole rows, and answers come a token at a time."""
    place = {"model.source": "path", "model.path": str(a_mixture(root, kind))}
    kept = {"checkpoint.save_model": True, "evaluation.samples": 2, "evaluation.max_new_tokens": 4}
    folder = host.train(root / f"run-{kind}", a_spec({**place, **kept, "method.kind": "full"}))
    assert len(result(folder)["samples"]) == 2
    assert losses(folder)
    assert not json.loads((folder / "model/config.json").read_text()).get("output_router_logits")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    rows = torch.arange(3, 40)[None]
    assert model.generate(rows, attention_mask=torch.ones_like(rows), max_new_tokens=4).shape[1] > rows.shape[1]
