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
        ({}, None, {"data__add_special_tokens": ("<note>",)}, "data.add_special_tokens"),
        ({}, "all-linear", {"data__add_tokens": ("<note>",)}, "data.add_tokens"),
        ({"trainable_token_indices": {"embed_tokens": [640]}}, None, {"data__add_tokens": ("<note>",)}, ""),
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
        (tmp_path / "spec.yaml").write_text(f"model: {{builtin: tiny-llama}}\nlora: {{targets: {saved}}}\n")
    resumed = spec(**TINY, save__resume_from="path", save__resume_path=str(folder), **now)
    facts = inspect_inputs(resumed, tmp_path)
    assert (facts.checkpoint_problem == "") == (option == "")
    assert option in facts.checkpoint_problem
    if option:
        (found,) = (f for f in check(resumed, LAPTOP, facts) if f.code == "TRN008")
        fixed = edit(resumed, found.fixes[0].patch)
        assert inspect_inputs(fixed, tmp_path).checkpoint_problem == ""


EXPERTS = r".*\.gate_up_proj"  # peft's pattern for stacked experts
CONTINUED = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": ["q_proj"], "bias": "none"}


def continued(folder: Path, changes: dict[str, Any], **options: Any) -> Any:
    """What is found of a run that continues the adapter in `folder`, with changes of its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_model.safetensors").touch()
    (folder / "adapter_config.json").write_text(json.dumps({**CONTINUED, **changes}))
    return inspect_inputs(spec(**TINY, **QUERY, lora__adapter_path=str(folder), **options), folder)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, ""),
        ({"r": 8}, "was trained with lora.r 8, but this run sets lora.r 16"),
        ({"lora_alpha": 16}, "lora.alpha 16"),
        ({"use_dora": True}, "lora.use_dora True"),
        ({"target_modules": ["k_proj"]}, "lora.target_modules k_proj"),
        ({"peft_type": "IA3"}, "is of the kind IA3, and only LoRA adapters can be continued"),
        (
            {"rank_pattern": {"q_proj": 2}},
            "uses rank_pattern, which Footplate does not support. Merge it into its base model with peft",
        ),
        ({"rank_pattern": {EXPERTS: 32}, "alpha_pattern": {EXPERTS: 64}}, ""),
        ({"rank_pattern": {EXPERTS: 32}, "alpha_pattern": {EXPERTS: 32}}, "uses rank_pattern, alpha_pattern"),
        ({"bias": "all"}, "uses bias"),
        ({"task_type": "CAUSAL_LM"}, ""),
        ({"task_type": "SEQ_CLS"}, "for a reward model, but this run trains a causal language model"),
        ({"init_lora_weights": "pissa"}, "fits only the base weights that this run modified. Use the final model"),
        ({"init_lora_weights": "lora_ga"}, "fits only the base weights that this run modified"),
        ({"init_lora_weights": "gaussian"}, ""),
        ({"target_modules": ["lm_head", "q_proj"]}, "has weights for lm_head, on which Footplate puts no adapter"),
        ({"target_modules": ["embed_tokens", "q_proj"]}, "has weights for embed_tokens"),
    ],
)
def test_an_adapter_to_continue(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    facts = continued(tmp_path / "model", changes)
    assert (facts.adapter_problem == "") == (problem == "") and problem in facts.adapter_problem
    run = spec(**TINY, **QUERY, lora__adapter_path=str(tmp_path / "model"))
    found = [finding for finding in check(run, LAPTOP, facts) if finding.code == "ADP015"]
    assert bool(found) == bool(problem)
    if facts.adapter_options:
        fixed = edit(run, found[0].fixes[0].patch)
        assert inspect_inputs(fixed, tmp_path).adapter_problem == ""


def test_an_adapter_with_another_number_of_added_tokens(tmp_path: Path) -> None:
    """Without the options of its run, only the number of its tokens can be compared."""
    rows: dict[str, Any] = {"trainable_token_indices": {"embed_tokens": [640, 641], "lm_head": [640, 641]}}
    problem = continued(tmp_path, rows).adapter_problem
    assert "has embeddings of 2 added tokens, but this run names none." in problem
    assert "names 1." in continued(tmp_path, rows, data__add_tokens=("<a>",)).adapter_problem
    assert not continued(tmp_path, rows, data__add_tokens=("<a>",), data__add_special_tokens=("<b>",)).adapter_problem
    problem = continued(tmp_path, {}, data__add_tokens=("<a>",)).adapter_problem
    assert "was trained with no data.add_tokens, but this run sets data.add_tokens <a>" in problem


def test_a_reward_model_continues_an_adapter_of_a_reward_model(tmp_path: Path) -> None:
    reward: dict[str, Any] = {"train__stage": "reward", "data__builtin": "train-pairs"}
    assert not continued(tmp_path, {"task_type": "SEQ_CLS"}, **reward).adapter_problem
    problem = continued(tmp_path, {"task_type": "CAUSAL_LM"}, **reward).adapter_problem
    assert "for a causal language model, but this run trains a reward model" in problem


def test_what_is_no_adapter_cannot_be_continued(tmp_path: Path) -> None:
    run = spec(**TINY, lora__adapter_path=str(tmp_path / "nothing"))
    assert "does not exist: set the folder" in inspect_inputs(run, tmp_path).adapter_problem
    (tmp_path / "nothing").mkdir()
    assert "has no adapter_model.safetensors: set the folder" in inspect_inputs(run, tmp_path).adapter_problem
    continued(tmp_path / "broken", {})
    (tmp_path / "broken/adapter_config.json").write_text("[1]")
    broken = spec(**TINY, lora__adapter_path="broken")
    assert "no adapter_config.json that can be read" in inspect_inputs(broken, tmp_path).adapter_problem
    full = spec(**TINY, method__kind="full", lora__adapter_path="broken")
    assert inspect_inputs(full, tmp_path).adapter_problem == ""


def test_the_targets_of_the_run_that_trained_it(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text("model:\n  builtin: smollm2-135m-instruct\n")
    problem = continued(tmp_path / "model", {}).adapter_problem
    assert "was trained on smollm2-135m-instruct, and this run uses tiny-llama" in problem
    (tmp_path / "spec.yaml").write_text("model:\n  builtin: tiny-llama\nlora:\n  targets: all-linear\n")
    facts = continued(tmp_path / "model", {})
    assert dict(facts.adapter_options) == {"lora.targets": "all-linear", "lora.target_modules": ()}
