"""Memory remedies: each fits with the estimated peak that it names and adds no error; the best comes first."""

from __future__ import annotations

from itertools import pairwise

import pytest
from test_compare import case

from backend.registry.hub_models import HUB_CONFIGS, siblings
from backend.rules import Case, Fix, examine
from backend.rules.memory_remedies import find_remedies, patched_case

BIG = "meta-llama/Llama-3.3-70B-Instruct"


def labels(found: list[Fix]) -> list[str]:
    return [fix.label for fix in found]


@pytest.mark.parametrize(
    ("preset", "machine", "changes"),
    [
        ("full-8b-fsdp2", "8x80gb", {"parallel__strategy": "ddp"}),
        ("full-8b-fsdp2", "1x80gb", {"parallel__strategy": "single"}),
        ("lora-80gb", "1x24gb", {"data__max_length": 8192, "train__per_device_train_batch_size": 8}),
        ("dpo", "1x24gb", {"method__kind": "full"}),
        ("full-8b-fsdp2", "1x24gb", {"model__hub_id": BIG, "parallel__strategy": "single"}),
        ("first-run", "laptop", {"train__per_device_train_batch_size": 512, "data__max_length": 8192}),
    ],
)
def test_each_remedy_fits_and_runs(preset: str, machine: str, changes: dict[str, object]) -> None:
    found = case(preset, machine, **changes)
    assert found.estimate.fits is False
    known = {f.code for f in examine(found) if f.level == "error"}
    good = find_remedies(found, 1.0)
    assert good
    for fix in good:
        other = patched_case(found, fix.patch)
        assert other.estimate.fits and other.estimate.device_bytes == fix.peak, fix
        assert {f.code for f in examine(other) if f.level == "error"} <= known - {"MEM001"}, fix
    assert all(one.safe or not other.safe for one, other in pairwise(good)), "safe remedies come first"
    shown = next(f for f in examine(found) if f.code == "MEM001")
    assert list(shown.fixes) == good, "the rule offers the same remedies"


def test_single_changes_come_before_combinations() -> None:
    found = case("lora-80gb", "1x24gb", data__max_length=4096, train__per_device_train_batch_size=8)
    assert labels(find_remedies(found, 1.0))[0] == "Batch size 1 with more gradient accumulation"
    tight = case("lora-80gb", "1x24gb", data__max_length=8192, train__per_device_train_batch_size=8)
    first = find_remedies(tight, 1.0)[0]
    assert first.safe and " + " in first.label


def test_a_safe_strategy_keeps_the_global_batch_size() -> None:
    found = case("full-8b-fsdp2", "8x80gb", parallel__strategy="ddp")
    first = find_remedies(found, 1.0)[0]
    assert first.safe and first.label == "ZeRO-1"
    assert "train.gradient_accumulation_steps" in first.patch


def test_a_smaller_model_is_the_last_resort() -> None:
    found = case("full-8b-fsdp2", "1x24gb", model__hub_id=BIG, parallel__strategy="single")
    names = labels(find_remedies(found, 1.0))
    assert names[0].startswith("Llama-3.1-8B-Instruct")
    assert names[-1] == "Built-in small model"


def test_unknown_model_has_no_remedies() -> None:
    found = case("lora-80gb", "1x24gb", model__hub_id="own/thing")
    assert isinstance(found, Case) and found.shape is None
    assert find_remedies(found, 1.0) == []


def test_siblings_are_smaller_models_of_the_same_family() -> None:
    assert siblings("Qwen/Qwen3-32B")[0] == "Qwen/Qwen3-14B"
    assert all(name.lower() in HUB_CONFIGS and name.endswith("-Instruct") for name in siblings(BIG))
    assert siblings("own/thing") == siblings("Qwen/Qwen3-0.6B") == []


def test_experts_can_be_left_without_adapters() -> None:
    found = case("lora-80gb", "1x80gb", model__hub_id="Qwen/Qwen3-30B-A3B", parallel__strategy="single")
    assert "Adapt only the attention layers" in labels(find_remedies(found, 1.0))
