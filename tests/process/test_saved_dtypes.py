"""The saved model is the trained one: no weight is stored wider than it was, and config.json says how to load it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from architectures import build
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from backend.train import model

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
TRAINED = "model.layers.3."
TOKENIZER = SimpleNamespace(save_pretrained=lambda folder: None)


def trained_model(frozen: torch.dtype, trained: torch.dtype = FP32) -> Any:
    """A model of which the freeze method has trained one layer."""
    found = build("llama").to(frozen)
    found.model.layers[3].to(trained)
    return found


def stored(found: Any, folder: Path, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], str, Any]:
    """The tensors of the file, the dtype in config.json, and the model as it is loaded."""
    model.save(found, TOKENIZER, folder, dtype)
    said = json.loads((folder / "config.json").read_text())["dtype"]
    return load_file(folder / "model.safetensors"), said, AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("frozen", [FP32, BF16, FP16])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_frozen_weights_are_stored_as_they_are(tmp_path: Path, frozen: torch.dtype, dtype: torch.dtype) -> None:
    """16-bit weights stay as they are; fp32 ones get the dtype of the base model, so that the size stays."""
    found = trained_model(frozen)
    file, _, loaded = stored(found, tmp_path / "model", dtype)
    for name, value in found.state_dict().items():
        kept = dtype if value.dtype == FP32 else value.dtype
        assert file[name].dtype == kept, name
        assert torch.equal(file[name], value.to(kept)), name
        assert torch.equal(loaded.state_dict()[name].float(), file[name].float()), f"{name} is rounded by loading"


@pytest.mark.parametrize(
    ("found", "dtype", "said"),
    [
        (lambda: trained_model(BF16), FP32, "float32"),  # freeze with bf16, base model in fp32
        (lambda: trained_model(BF16), BF16, "bfloat16"),
        (lambda: trained_model(FP32), BF16, "bfloat16"),  # full fine-tuning
        (lambda: trained_model(FP16), BF16, "float32"),  # the only one that has the values of both
        (lambda: trained_model(BF16, BF16), FP32, "bfloat16"),  # a merged adapter
    ],
)
def test_config_says_a_dtype_that_holds_all_values(tmp_path: Path, found: Any, dtype: torch.dtype, said: str) -> None:
    assert stored(found(), tmp_path / "model", dtype)[1] == said
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_buffers_keep_their_dtype(tmp_path: Path) -> None:
    """Integers must not be converted like fp32 weights."""
    found = build("llama")
    found.model.layers[0].register_buffer("steps", torch.tensor([2**24 + 1]))
    model.save(found, TOKENIZER, tmp_path / "model", BF16)
    assert load_file(tmp_path / "model/model.safetensors")["model.layers.0.steps"].tolist() == [2**24 + 1]
