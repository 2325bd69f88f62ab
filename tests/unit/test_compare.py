"""What if: each way as the rules and the estimate judge it, with the same rows a step; the suggestion runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend.compare import Variant, recommend, variants
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


def ways(found: Case) -> dict[str, Variant]:
    return {way.name: way for way in variants(found)}


def test_what_is_sent_follows_from_what_is_spread() -> None:
    found = ways(case("full-8b-fsdp2", "8x80gb"))
    ring = 7 / 8
    assert found[SINGLE].sent_bytes == 0
    assert found["DDP"].sent_bytes == int(2 * ring * 4 * EIGHT_B)  # fp32 gradients, added up
    assert found["ZeRO-2"].sent_bytes == int(2 * ring * 2 * EIGHT_B)  # in bf16
    batches = case("full-8b-fsdp2", "8x80gb").spec.train.gradient_accumulation_steps
    assert found["ZeRO-3"].sent_bytes == pytest.approx(batches * 3 * ring * 2 * EIGHT_B, rel=1e-9)  # twice the weights
    assert found["ZeRO-3 with CPU offload"].host_traffic_bytes > found["ZeRO-2 with CPU offload"].host_traffic_bytes > 0
    assert [name for name, way in found.items() if way.is_current] == ["FSDP2"]


def test_each_way_learns_from_the_same_rows() -> None:
    found = case("full-8b-fsdp2", "8x80gb")
    for way in variants(found):
        assert (
            resolve(effective(edit(found.spec, dict(way.patch))), found.machine).global_batch_size
            == found.run.global_batch_size
        ), way.name


@pytest.mark.parametrize(
    ("preset", "machine", "name"),
    [
        ("full-8b-fsdp2", "8x80gb", "ZeRO-1"),  # DDP would not fit
        ("lora-80gb", "1x80gb", SINGLE),
        ("first-run", "laptop", SINGLE),
    ],
)
def test_the_suggestion_runs(preset: str, machine: str, name: str) -> None:
    found = case(preset, machine)
    best, why = recommend(found) or (None, "")
    assert best is not None
    assert best.name == name
    assert " of " in why
    spec = effective(edit(found.spec, dict(best.patch)))
    assert not [f for f in examine(Case(spec, found.machine, found.facts)) if f.level == "error"]


def test_where_nothing_fits_less_at_once_is_tried() -> None:
    found = case("lora-80gb", "1x24gb", data__max_length=8192, train__per_device_train_batch_size=8)
    assert not any(way.runs for way in variants(found) if way.name == SINGLE)
    best, why = recommend(found) or (None, "")
    assert best is not None
    assert best.patch["train.activation_checkpointing"] is True
    assert "activation checkpointing" in why
    assert recommend(case("full-8b-fsdp2", "1x24gb", data__max_length=8192, train__optim="adamw_torch")) is None


def test_a_model_that_is_not_known_has_no_ways() -> None:
    assert variants(case("lora-80gb", "1x80gb", model__hub_id="own/thing")) == []
