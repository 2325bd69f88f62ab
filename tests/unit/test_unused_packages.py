"""Packages that a run hides from peft and transformers, because it cannot use them."""

import json
import sys
from pathlib import Path

import pytest

from backend import presets
from backend.config.options import edit
from backend.train import unused_packages

FIRST = presets.read("first-run")


@pytest.mark.parametrize(
    "options",
    [
        {"method.quantization": "nf4"},
        {"train.optim": "paged_adamw_8bit"},
        {"train.optim": "adamw_torch_8bit"},
        {"train.optim": "galore_adamw"},  # whose package imports bitsandbytes
        {"precision.compute": "fp8"},
        {"train.use_unsloth": True},
        {"model.trust_remote_code": True},
        {"model.source": "hub", "model.hub_id": "nobody/knows"},
    ],
)
def test_runs_that_may_use_them(tmp_path: Path, options: dict[str, object]) -> None:
    assert unused_packages.may_use_any(edit(FIRST, options), tmp_path)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "llama"}, False),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, True),
        ({"text_config": {"quantization_config": {"quant_method": "torchao"}}}, True),
        (None, True),
    ],
)
def test_the_model_decides(tmp_path: Path, config: dict[str, object] | None, expected: bool) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    spec = edit(FIRST, {"model.source": "path", "model.path": str(tmp_path)})
    assert unused_packages.may_use_any(spec, tmp_path) == expected


def test_hidden_packages_look_as_if_they_were_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.setattr(unused_packages, "PACKAGES", ("antigravity", "json"))
    unused_packages.hide(edit(FIRST, {"model.source": "path", "model.path": str(tmp_path)}), tmp_path)
    try:
        with pytest.raises(ModuleNotFoundError):
            __import__("antigravity")
        assert sys.modules["json"] is json, "what is imported already stays"
    finally:
        del sys.modules["antigravity"]
