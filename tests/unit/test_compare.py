"""Comparison of strategies: memory and communication of each, with the same global batch size; a recommendation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from backend.compare import Variant, other_strategies, recommend, variants
from backend.config import presets
from backend.config.options import edit, effective
from backend.inspect import inspect_inputs
from backend.machine import machines
from backend.registry import STRATEGIES
from backend.resolve import resolve
from backend.rules import Case, examine

EIGHT_B = 8_030_261_248
SINGLE = STRATEGIES["single"].label


def case(name: str, machine: str, **changes: object) -> Case:
    spec = next(p.spec for p in presets.presets() if p.name == name)
    spec = effective(edit(spec, {key.replace("__", "."): value for key, value in changes.items()}))
    return Case(spec, machines()[machine], inspect_inputs(spec, Path.cwd(), {"HF_HOME": "/nowhere"}))


def by_name(found: Case) -> dict[str, Variant]:
    return {variant.name: variant for variant in variants(found)}


def test_communication_follows_from_sharding() -> None:
    found = by_name(case("full-8b-fsdp2", "8x80gb"))
    ring = 7 / 8
    assert found[SINGLE].sent_bytes == 0
    assert found["DDP"].sent_bytes == int(2 * ring * 4 * EIGHT_B)  # fp32 gradients, added up
    assert found["ZeRO-2"].sent_bytes == int(2 * ring * 2 * EIGHT_B)  # in bf16
    batches = case("full-8b-fsdp2", "8x80gb").spec.train.gradient_accumulation_steps
    assert found["ZeRO-3"].sent_bytes == pytest.approx(batches * 3 * ring * 2 * EIGHT_B, rel=1e-9)  # twice the weights
    assert found["ZeRO-3 with CPU offload"].host_traffic_bytes > found["ZeRO-2 with CPU offload"].host_traffic_bytes > 0
    assert [name for name, variant in found.items() if variant.is_current] == ["FSDP2"]


def test_all_variants_have_the_same_global_batch_size() -> None:
    found = case("full-8b-fsdp2", "8x80gb")
    for variant in variants(found):
        assert (
            resolve(effective(edit(found.spec, dict(variant.patch))), found.machine).global_batch_size
            == found.run.global_batch_size
        ), variant.name


@pytest.mark.parametrize(
    ("preset", "machine", "name"),
    [
        ("full-8b-fsdp2", "8x80gb", "ZeRO-1"),  # DDP would not fit
        ("lora-80gb", "1x80gb", SINGLE),
        ("first-run", "laptop", SINGLE),
    ],
)
def test_recommended_variant_runs(preset: str, machine: str, name: str) -> None:
    found = case(preset, machine)
    best, why = recommend(found) or (None, "")
    assert best is not None
    assert best.name == name
    assert " of " in why
    spec = effective(edit(found.spec, dict(best.patch)))
    assert not [f for f in examine(Case(spec, found.machine, found.facts)) if f.level == "error"]


def test_smaller_activations_are_tried_if_no_strategy_fits() -> None:
    found = case("lora-80gb", "1x24gb", data__max_length=8192, train__per_device_train_batch_size=8)
    assert not any(variant.runs for variant in variants(found) if variant.name == SINGLE)
    best, why = recommend(found) or (None, "")
    assert best is not None
    assert best.patch["train.activation_checkpointing"] is True
    assert "activation checkpointing" in why
    assert recommend(case("full-8b-fsdp2", "1x24gb", data__max_length=8192, train__optim="adamw_torch")) is None


def test_unknown_model_has_lines_without_figures() -> None:
    found = case("lora-80gb", "1x80gb", model__hub_id="own/thing")
    lines = variants(found)
    assert SINGLE in [line.name for line in lines]
    assert {line.device_bytes for line in lines} == {None}
    assert {line.fits for line in lines if not line.error} == {None}
    assert recommend(found) is None


def test_lines_divide_the_devices_in_every_way() -> None:
    found = by_name(case("two-nodes", "2x8x80gb"))
    assert list(found) == [
        SINGLE, "DDP", "ZeRO-1", "ZeRO-2", "ZeRO-2 with CPU offload", "ZeRO-3", "ZeRO-3 with sequence parallelism",
        "ZeRO-3 with CPU offload", "FSDP2", "FSDP2, replicated (HSDP)", "FSDP2 with context parallelism",
        "FSDP2 with CPU offload", "Tensor parallelism with FSDP2",
    ]  # fmt: skip
    assert [name for name, variant in found.items() if variant.is_current] == ["FSDP2, replicated (HSDP)"]
    weights = 2 * EIGHT_B  # in bf16; FSDP2 gathers them twice for each batch, and reduces gradients in fp32
    assert found["FSDP2"].sent_bytes == pytest.approx(2 * (2 * weights + 4 * EIGHT_B) * 15 / 16, rel=0.01)
    within_a_node = 2 * (2 * weights + 4 * EIGHT_B) * 7 / 8
    across_nodes = 4 * EIGHT_B / 8  # an all-reduce over two nodes sends twice one half
    assert found["FSDP2, replicated (HSDP)"].sent_bytes == pytest.approx(within_a_node + across_nodes, rel=0.01)
    assert found["FSDP2 with context parallelism"].sent_bytes > found["FSDP2"].sent_bytes


def test_strategy_that_no_line_has_is_a_line_of_its_own() -> None:
    found = case("full-8b-zero3", "8x80gb", parallel__offload_optimizer="nvme", parallel__nvme_path="/tmp")
    assert [line.name for line in variants(found) if line.is_current] == ["ZeRO-3, as set"]
    names = [line.name for line in other_strategies(found, variants(found))]
    assert names == [STRATEGIES[key].label for key in ("zero0", "fsdp1")]


def test_error_of_every_strategy_says_nothing_about_one() -> None:
    found = case("full-8b-fsdp2", "8x80gb")
    full = Case(found.spec, replace(found.machine, disk_free_bytes=0), found.facts)
    assert full.other_errors
    assert [line.error for line in variants(full)] == [line.error for line in variants(found)]
    best, _ = recommend(full, variants(full)) or (None, "")
    assert best is not None
    assert best.name == "ZeRO-1"
    assert [line.error for line in other_strategies(full, variants(full))] == ["", ""]


def test_error_of_every_strategy_does_not_prevent_smaller_activations() -> None:
    found = case("lora-80gb", "1x24gb", data__max_length=8192, train__per_device_train_batch_size=8)
    full = Case(found.spec, replace(found.machine, disk_free_bytes=0), found.facts)
    expected, _ = recommend(found) or (None, "")
    best, _ = recommend(full) or (None, "")
    assert expected is not None
    assert best is not None
    assert best.patch == expected.patch
