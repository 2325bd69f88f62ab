"""The defaults that the import of TRL's YAML assumes, and those of the installed TRL."""

import importlib
from dataclasses import MISSING, fields

import pytest

from backend.importers.trl import DEFAULTS, LEARNING_RATES

CLASSES = {
    "sft": ("trl", "SFTConfig"),
    "dpo": ("trl", "DPOConfig"),
    "kto": ("trl.experimental.kto", "KTOConfig"),
    "orpo": ("trl.experimental.orpo", "ORPOConfig"),
    "reward": ("trl", "RewardConfig"),
}


def defaults(module: str, name: str) -> dict[str, object]:
    known = fields(getattr(importlib.import_module(module), name))
    return {field.name: field.default for field in known if field.default is not MISSING}


def test_defaults_are_those_of_the_installed_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    known = defaults("trl", "ScriptArguments") | defaults("trl", "ModelConfig") | defaults("trl", "SFTConfig")
    assert {key: known[key] or 0 for key in DEFAULTS} == DEFAULTS
    for stage, (module, name) in CLASSES.items():
        assert defaults(module, name)["learning_rate"] == LEARNING_RATES[stage], stage
