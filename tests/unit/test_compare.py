"""Comparison of strategies: memory and communication of each, with the same global batch size; a recommendation."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from backend import presets
from backend.config.options import edit, effective
from backend.inspect import inspect_inputs
from backend.machine import machines
from backend.memory import MemoryContext
from backend.memory.communication import network_bytes
from backend.registry import STRATEGIES
from backend.resolve import resolve
from backend.rules import Case, examine
from backend.tasks import compare
from backend.tasks.compare import Variant, other_strategies, recommend, variants

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
    batches = case("full-8b-fsdp2", "8x80gb").spec.train.gradient_accumulation_steps
    weights = ring * 2 * EIGHT_B  # an all-gather in bf16, which ZeRO-1 and ZeRO-2 do after the step
    assert found["ZeRO-1"].sent_bytes == pytest.approx(2 * weights + weights, rel=1e-9)
    assert found["ZeRO-2"].sent_bytes == pytest.approx(batches * 2 * weights + weights, rel=1e-9)
    assert found["ZeRO-3"].sent_bytes == pytest.approx(batches * 3 * ring * 2 * EIGHT_B, rel=1e-9)  # twice the weights
    assert found["ZeRO-3 with CPU offload"].host_traffic_bytes > found["ZeRO-2 with CPU offload"].host_traffic_bytes > 0
    assert [name for name, variant in found.items() if variant.is_current] == ["FSDP2"]


def sent(**changes: object) -> dict[str, int]:
    found = case("two-nodes", "2x8x80gb", **changes)
    assert found.shape is not None
    return network_bytes(MemoryContext(found.spec, found.run, found.machine, found.shape))


@pytest.mark.parametrize(
    ("strategy", "options", "growth"),
    [
        ("ddp", {}, 1),
        ("zero1", {}, 1),
        ("zero2", {}, 9 / 3),  # the all-gather of the parameters stays one
        ("fsdp2", {"replicate_size": 2}, 4),
        ("fsdp1", {"sharding_strategy": "no_shard"}, 4),
        ("fsdp1", {"sharding_strategy": "hybrid_shard"}, 4),
    ],
)
def test_reductions_in_each_batch_grow_with_accumulation(
    strategy: str, options: dict[str, object], growth: float
) -> None:
    changed = {"parallel__strategy": strategy, **{f"parallel__{name}": value for name, value in options.items()}}
    once = sent(**changed, train__gradient_accumulation_steps=1)
    four = sent(**changed, train__gradient_accumulation_steps=4)
    assert list(once) == list(four)
    assert {name for name, size in four.items() if size != pytest.approx(growth * once[name])} == set()


def test_tensor_parallel_all_reduces_are_those_of_transformers() -> None:
    """A layer of Llama has 2 + 5 all-reduces of hidden states, and one more with activation checkpointing: counted in
    transformers 5.23 with two processes."""
    options = {"parallel__strategy": "tensor", "parallel__tensor_parallel_size": 8, "data__max_length": 1024}
    options |= {"train__per_device_train_batch_size": 1, "train__gradient_accumulation_steps": 1}
    for checkpointing, count in ((False, 7), (True, 8)):
        found = sent(**options, train__activation_checkpointing=checkpointing)["tensor"]
        assert found == 32 * count * 2 * (1024 * 4096 * 2) * 7 // 8


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


def test_the_faster_of_two_strategies_with_similar_communication_is_recommended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """LoRA of a 70B model: ZeRO-3 sends 0.15% less than FSDP2, which says nothing if it is predicted to be slower."""
    found = case("full-8b-fsdp2", "8x80gb", model__hub_id="meta-llama/Llama-3.3-70B-Instruct", method__kind="lora")
    for slow, name in ((880.0, "ZeRO-3"), (800.0, "FSDP2")):
        speed = property(lambda v, slow=slow: 900.0 if v.name == "FSDP2" else slow)
        monkeypatch.setattr(Variant, "tokens_per_second", speed)
        best, why = recommend(found) or (None, "")
        assert best is not None
        assert best.name == name
        assert ("ZeRO-3 sends hardly less, and is predicted to be slower" in why) is (name == "FSDP2")


def test_smaller_activations_are_tried_if_no_strategy_fits() -> None:
    found = case("lora-80gb", "1x24gb", data__max_length=8192, train__per_device_train_batch_size=8)
    assert not any(variant.runs for variant in variants(found) if variant.name == SINGLE)
    best, why = recommend(found) or (None, "")
    assert best is not None
    assert best.patch["train.activation_checkpointing"] is True
    assert "activation checkpointing" in why
    assert recommend(case("full-8b-fsdp2", "1x24gb", data__max_length=8192, train__optim="adamw_torch")) is None


@pytest.mark.parametrize("size", [2, 4, 8])
def test_groups_that_share_sequences_train_on_the_same_global_batch(size: int) -> None:
    """With fewer examples per step than processes, a data parallel strategy needs smaller batches per device. A
    tensor parallel group of all processes trains on the same batch, so it keeps its size."""
    batch = {"train__per_device_train_batch_size": size, "train__gradient_accumulation_steps": 1}
    found = case("galore-one-gpu", "8x80gb", **batch)
    (line,) = (variant for variant in variants(found) if variant.name == STRATEGIES["tensor"].label)
    assert line.case.run.tensor_parallel_size == 8
    assert line.case.spec.train.per_device_train_batch_size == size
    assert line.case.run.global_batch_size == found.run.global_batch_size == size


LEFT_OUT = list(
    itertools.product(
        (True, False),
        ("1x24gb", "2x24gb", "8x80gb"),
        ("full-8b-zero3", "qlora-70b-fsdp2", "continued-pretraining", "lora-80gb"),
    )
)


@pytest.mark.parametrize(
    ("checkpointing", "machine", "preset"),
    [case if n % 4 == n // 4 % 4 else pytest.param(*case, marks=pytest.mark.soak) for n, case in enumerate(LEFT_OUT)],
)
def test_strategies_that_are_left_out_would_not_be_recommended(
    preset: str, machine: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not fit without activations is not tried with smaller batches; trying it changes nothing."""
    changes = {"train__per_device_train_batch_size": 8, "train__activation_checkpointing": checkpointing}
    found = case(preset, machine, **changes)
    quick = recommend(found)
    monkeypatch.setattr(compare, "may_fit", lambda case: True)
    full = recommend(found)
    assert (quick and (quick[0].name, quick[1])) == (full and (full[0].name, full[1]))


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
    across_nodes = 2 * 4 * EIGHT_B / 8  # in each batch, an all-reduce over two nodes that sends twice one half
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


def test_missing_master_address_says_nothing_about_a_strategy() -> None:
    nodes = {"launch__nnodes": 2, "launch__rendezvous": "static", "launch__master_addr": ""}
    found = case("full-8b-fsdp2", "2x8x80gb", **nodes)
    assert "NOD002" in {rule.code for rule in found.other_errors}
    assert by_name(found)["FSDP2"].fits
    assert by_name(found)["FSDP2"].error == ""


def test_error_of_every_strategy_does_not_prevent_smaller_activations() -> None:
    found = case("lora-80gb", "1x24gb", data__max_length=8192, train__per_device_train_batch_size=8)
    full = Case(found.spec, replace(found.machine, disk_free_bytes=0), found.facts)
    expected, _ = recommend(found) or (None, "")
    best, _ = recommend(full) or (None, "")
    assert expected is not None
    assert best is not None
    assert best.patch == expected.patch
