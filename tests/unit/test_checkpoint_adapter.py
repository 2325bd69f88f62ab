"""A run resumes only from a checkpoint with the same adapter: the check before the start names what differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from specs import spec

from backend.config.options import edit
from backend.inspect import inspect_inputs
from backend.rules import check
from backend.rules.examples import LAPTOP

TINY: dict[str, Any] = {"model__builtin": "tiny-llama"}
QUERY = {"lora__targets": "custom", "lora__target_modules": ("q_proj",)}


@pytest.mark.parametrize(
    ("config", "saved", "now", "option"),
    [
        ({"r": 16, "lora_alpha": 32, "target_modules": ["q_proj"]}, None, QUERY, ""),
        ({"r": 8}, None, {}, "lora.r"),
        ({"target_modules": ["q_proj"]}, None, {}, "lora.target_modules"),
        ({"target_modules": ["self_attn.q_proj"]}, None, QUERY, ""),
        ({"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}, None, {"lora__targets": "attention"}, ""),
        ({"target_modules": ["q_proj"]}, "all-linear", {}, ""),
        ({"target_modules": []}, "attention", {}, "lora.targets"),
        ({"modules_to_save": ["lm_head", "score"]}, None, {}, "lora.modules_to_save"),
        ({}, None, {"lora__modules_to_save": ("lm_head",)}, "lora.modules_to_save"),
        (
            {"modules_to_save": ["lm_head"]},
            None,
            {"lora__modules_to_save": ("norm", "lm_head")},
            "lora.modules_to_save",
        ),
        ({"modules_to_save": ["lm_head"]}, None, {"lora__modules_to_save": ("lm_head",)}, ""),
    ],
)
def test_a_checkpoint_of_another_adapter(
    tmp_path: Path, config: dict[str, Any], saved: str | None, now: dict[str, Any], option: str
) -> None:
    """What it is trained with is compared, not how it is written; the fix sets the options of the checkpoint."""
    folder = tmp_path / "checkpoints/checkpoint-3"
    folder.mkdir(parents=True)
    for name in ("trainer_state.json", "complete", "optimizer.pt"):
        (folder / name).touch()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    if saved:
        (tmp_path / "spec.yaml").write_text(f"lora:\n  targets: {saved}\n")
    resumed = spec(**TINY, save__resume_from="path", save__resume_path=str(folder), **now)
    facts = inspect_inputs(resumed, tmp_path)
    assert (facts.checkpoint_problem == "") == (option == "")
    assert option in facts.checkpoint_problem
    if option:
        (found,) = (f for f in check(resumed, LAPTOP, facts) if f.code == "TRN008")
        fixed = edit(resumed, found.fixes[0].patch)
        assert inspect_inputs(fixed, tmp_path).checkpoint_problem == ""
