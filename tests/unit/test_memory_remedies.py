"""Memory remedies: each fits with the estimated peak that it names and adds no error; the best comes first."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from specs import rule_finding
from test_compare import case

from backend.config.options import edit
from backend.machine import GIB
from backend.registry.hub_models import HUB_CONFIGS, siblings
from backend.rules import Case, Fix, examine
from backend.rules import base as rule_base
from backend.rules.examples import DEMO, TWO_H100
from backend.rules.memory_remedies import _batches, _optimizers, find_remedies, offloads, patched_case, single_changes

BIG = "meta-llama/Llama-3.3-70B-Instruct"
MIXTRAL_NF4 = {"model__hub_id": "mistralai/Mixtral-8x7B-Instruct-v0.1", "method__quantization": "nf4"}
INT8 = {"method__quantization": "int8"}
OFFLOADED = "FSDP2 with CPU offload"


def labels(found: list[Fix]) -> list[str]:
    return [fix.label for fix in found]


@pytest.mark.parametrize(
    ("preset", "machine", "changes"),
    [
        ("full-8b-fsdp2", "8x80gb", {"parallel__strategy": "ddp"}),
        pytest.param("full-8b-fsdp2", "1x80gb", {"parallel__strategy": "single"}, marks=pytest.mark.soak),
        ("lora-80gb", "1x24gb", {"data__max_length": 8192, "train__per_device_train_batch_size": 8}),
        pytest.param("dpo", "1x24gb", {"method__kind": "full"}, marks=pytest.mark.soak),
        pytest.param(
            "full-8b-fsdp2", "1x24gb", {"model__hub_id": BIG, "parallel__strategy": "single"}, marks=pytest.mark.soak
        ),
        ("lora-80gb", "4x80gb", {**MIXTRAL_NF4, "parallel__strategy": "ddp"}),
        pytest.param("lora-80gb", "1x80gb", {**MIXTRAL_NF4, "parallel__strategy": "single"}, marks=pytest.mark.soak),
        pytest.param("qlora-70b-fsdp2", "2x24gb", {"launch__nproc_per_node": 2}, marks=pytest.mark.soak),
        ("qlora-70b-fsdp2", "2x24gb", {**INT8, "parallel__strategy": "ddp", "launch__nproc_per_node": 2}),
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


def test_no_activation_checkpointing_where_the_architecture_has_none() -> None:
    found = case("lora-80gb", "1x80gb", train__activation_checkpointing=False, data__max_length=16384)
    assert any("Activation checkpointing" in label for label in labels(find_remedies(found, 1.0)))
    assert found.shape
    shape = replace(found.shape, supports_activation_checkpointing=False)
    without = replace(found, facts=replace(found.facts, shape=shape))
    assert (good := find_remedies(without, 1.0))
    assert not any("Activation checkpointing" in label for label in labels(good))


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


@pytest.mark.parametrize("machine", ["4x80gb", "8x80gb"])
def test_mixtral_with_nf4_is_sharded(machine: str) -> None:
    """NF4 leaves 84 GiB of experts in bf16, which DDP keeps on every device. A shard of them fits."""
    found = case("lora-80gb", machine, **MIXTRAL_NF4, parallel__strategy="ddp")
    first = find_remedies(found, 1.0)[0]
    assert (first.label, first.safe) == ("FSDP2", True)
    message = next(f.message for f in examine(found) if f.code == "MEM001")
    assert "quantizes linear layers only: the experts, 84 GiB in total, stay in bf16" in message
    dense = case("qlora-24gb", "1x24gb", model__hub_id=BIG)
    assert "experts" not in next(f.message for f in examine(dense) if f.code == "MEM001")


def test_mixtral_with_nf4_on_one_gpu_needs_offload_without_quantization() -> None:
    """ZeRO-3 would load the quantized model, experts included, on the GPU before it offloads them."""
    found = case("lora-80gb", "1x80gb", **MIXTRAL_NF4, parallel__strategy="single")
    assert labels(find_remedies(found, 1.0)) == ["ZeRO-3 with CPU offload, without quantization"]


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "fsdp2"])
def test_70b_qlora_on_two_24_gb_gpus_is_offloaded(strategy: str) -> None:
    found = case("qlora-70b-fsdp2", "2x24gb", parallel__strategy=strategy, launch__nproc_per_node=2)
    assert labels(find_remedies(found, 1.0)) == [OFFLOADED]


def test_a_smaller_eval_batch_is_offered_where_evaluation_does_not_fit() -> None:
    """A training batch of 32,768 tokens fits, but not 32 evaluation examples with their attention masks."""
    found = case("lora-80gb", "1x80gb", data__max_length=32_768, train__activation_checkpointing=True,
                 train__per_device_train_batch_size=1, eval__per_device_eval_batch_size=32)  # fmt: skip
    assert found.estimate.fits is False
    first = find_remedies(found, 1.0)[0]
    assert first.safe and first.label.startswith("Eval batch size ")
    larger = edit(found.spec, {key: 2 * value for key, value in first.patch.items()})
    assert not replace(found, spec=larger).estimate.fits or "may need" in first.cost
    finding = next(f for f in examine(found) if f.code == "MEM001")
    assert finding.fields[0] == "eval.per_device_eval_batch_size"


def test_no_generations_are_offered_where_generation_gathers_the_model() -> None:
    """70B on eight GPUs: a shard of each layer fits, and for generation every GPU holds the whole model."""
    found = case("full-8b-fsdp2", "8x80gb", model__hub_id=BIG, method__kind="lora", eval__num_generations=8)
    assert (
        found.estimate.fits is False
        and replace(found, spec=edit(found.spec, {"eval.num_generations": 0})).estimate.fits
    )
    fix = next(each for each in find_remedies(found, 1.0) if each.label == "No generations")
    assert fix.effect == "changes what the run evaluates"
    finding = next(f for f in examine(found) if f.code == "MEM001")
    assert finding.fields[0] == "eval.num_generations"


def test_evaluation_is_not_changed_where_training_does_not_fit() -> None:
    found = case("lora-80gb", "1x24gb", data__max_length=4096, train__per_device_train_batch_size=8)
    assert not any("val batch" in fix.label or "generations" in fix.label for fix in single_changes(found))


def test_a_refused_strategy_is_combined_with_4_bits() -> None:
    """FSDP2 cannot shard 8-bit weights, and in bf16 the weights exceed host RAM. One GPU that holds NF4 needs no
    offload."""
    found = case("qlora-70b-fsdp2", "2x24gb", **INT8, parallel__strategy="ddp", launch__nproc_per_node=2)
    assert labels(find_remedies(found, 1.0)) == [f"{OFFLOADED} + 4-bit quantization (NF4)"]
    one_gpu = case("qlora-24gb", "1x80gb", model__hub_id=BIG, **INT8)
    assert labels(find_remedies(one_gpu, 1.0))[0] == "4-bit quantization (NF4)"


def test_a_strategy_that_likely_fits_follows_offloading() -> None:
    """Four GPUs: FSDP2 fits by the estimate, but its upper bound is above 24 GiB."""
    two = case("qlora-70b-fsdp2", "2x24gb", parallel__strategy="ddp", launch__nproc_per_node=4)
    gpus = tuple(replace(two.machine.gpus[0], id=number) for number in range(4))
    found = find_remedies(Case(two.spec, replace(two.machine, gpus=gpus), two.facts), 1.0)
    assert labels(found)[:2] == [OFFLOADED, "FSDP2"]
    assert found[1].cost == "slower: more communication; may need up to 24.2 GiB"
    assert found[1].peak < 24 * GIB


def test_what_likely_fits_comes_before_shorter_examples_and_smaller_models() -> None:
    """With 10 GiB free, only the estimate of the offloaded run fits (9.7 GiB), not its upper bound."""
    found = case("qlora-70b-fsdp2", "2x24gb", launch__nproc_per_node=2)
    free = 10 * GIB
    gpus = tuple(replace(gpu, free_bytes=free) for gpu in found.machine.gpus)
    tight = Case(found.spec, replace(found.machine, gpus=gpus), found.facts)
    remedies = find_remedies(tight, 1.0)
    assert labels(remedies) == [OFFLOADED, f"{OFFLOADED} + Max length of 512 tokens"]
    assert ["may need up to" in fix.cost for fix in remedies] == [True, False]
    assert all(fix.peak <= free for fix in remedies)


def test_the_search_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """An estimate takes about 0.3 ms; a search with many kinds of changes that all fail is the longest."""
    counted = []
    real = rule_base.estimate
    monkeypatch.setattr(rule_base, "estimate", lambda *arguments: counted.append(1) or real(*arguments))
    for preset, machine, changes in (
        ("full-8b-fsdp2", "1x24gb", {"model__hub_id": BIG, "parallel__strategy": "single"}),
        ("full-8b-fsdp2", "8x80gb", {**MIXTRAL_NF4, "parallel__strategy": "ddp"}),
        ("qlora-24gb", "1x24gb", {"model__hub_id": BIG}),
        ("qlora-70b-fsdp2", "2x24gb", {**INT8, "parallel__strategy": "ddp", "launch__nproc_per_node": 2}),
    ):
        counted.clear()
        find_remedies(case(preset, machine, **changes), 1.0)
        assert len(counted) < 200, (preset, machine)


def test_tries_are_not_spent_on_what_exceeds_the_host_ram() -> None:
    """Rank 0 reads 30 GiB of weights in fp32 for full fine-tuning, and half of it for LoRA."""
    found = case("full-8b-zero3", "1x24gb", train__per_device_train_batch_size=8, train__activation_checkpointing=True)
    assert labels(find_remedies(found, 1.0))[0].startswith("8-bit AdamW + Batch size")
    small = Case(found.spec, replace(found.machine, ram_free_bytes=32 * GIB), found.facts)
    good = labels(find_remedies(small, 1.0))
    assert good[0] == "LoRA + Batch size 4 with more gradient accumulation", "without a different optimizer"
    assert len(good) >= 3


def test_one_gpu_is_not_offered_what_needs_several_processes() -> None:
    found = case("full-8b-zero3", "1x24gb")
    strategies = [fix.label for fix in single_changes(found) if "parallel.strategy" in fix.patch]
    assert "ZeRO-3 with CPU offload" in strategies
    assert not any(label.startswith("FSDP") for label in strategies)


def test_no_remedy_does_more_than_another() -> None:
    for size in (4, 8):
        found = case("two-nodes", "1x24gb", train__per_device_train_batch_size=size)
        kinds = [{part.partition(" of ")[0].partition(" size ")[0] for part in label.split(" + ")}
                 for label in labels(find_remedies(found, 1.0))]  # fmt: skip
        assert len(kinds) > 1
        assert not any(a < b for a in kinds for b in kinds)


def test_offloading_alone_does_not_end_the_search() -> None:
    found = case("continued-pretraining", "2x24gb", train__per_device_train_batch_size=8)
    safe = [fix for fix in find_remedies(found, 1.0) if fix.safe]
    assert any(offloads(fix.patch) for fix in safe)
    assert any(not offloads(fix.patch) for fix in safe)


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


@pytest.mark.parametrize(("strategy", "offered"), [("fsdp2", True), ("zero2", False), ("fsdp1", False)])
def test_adafactor_is_not_offered_where_it_gets_flat_tensors(strategy: str, offered: bool) -> None:
    """It would keep a full second moment, and OPT015 and OPT032 would advise against it."""
    of = case("full-8b-fsdp2", "8x80gb", parallel__strategy=strategy)
    assert ("Adafactor" in {change.fix.label for change in _optimizers(of)}) is offered


@pytest.mark.parametrize(
    ("patch", "least", "safe"),
    [
        ({}, 1, True),
        ({"train__stage": "dpo"}, 1, True),
        ({"train__stage": "dpo", "preference__dpo_loss_type": "aot"}, 2, False),
        ({"train__stage": "kto"}, 2, False),
        ({"train__stage": "kto", "preference__kto_loss_type": "apo_zero_unpaired"}, 1, True),
    ],
)
def test_smaller_batches_change_a_loss_that_compares_examples(patch: dict[str, str], least: int, safe: bool) -> None:
    changes = list(_batches(case("first-run", "laptop", train__per_device_train_batch_size=8, **patch)))
    assert {change.fix.safe for change in changes} == {safe}
    assert min(change.fix.patch["train.per_device_train_batch_size"] for change in changes) == least


@pytest.mark.parametrize(("loss", "safe"), [("sigmoid", True), ("aot", False)])
def test_smaller_batches_on_more_devices_change_aot(loss: str, safe: bool) -> None:
    """AOT sorts the pairs on one device."""
    full_dpo = {"train.stage": "dpo", "data.builtin": "train-pairs", "method.kind": "full", "train.learning_rate": 1e-6}
    patch = {**full_dpo, "parallel.strategy": "fsdp2", "launch.nproc_per_node": 1, "preference.dpo_loss_type": loss}
    found = rule_finding("STR011", patch, TWO_H100, DEMO)
    assert found is not None and found.fixes[1].label.startswith("Start two processes") and found.fixes[1].safe is safe
