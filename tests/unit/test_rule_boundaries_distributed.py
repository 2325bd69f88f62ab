"""Boundaries of the distributed and memory rules: the last value that passes and the first that fails."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from backend.config import RunSpec
from backend.config.options import edit, effective
from backend.inspect import InputFacts
from backend.machine import GIB, Machine
from backend.memory import Estimate, Fit, Row
from backend.memory.fit import CLEAR_EXCESS
from backend.memory.kinds import bytes_by_kind
from backend.modelspec import ModuleSpec
from backend.rules import RULES, Case, Finding
from backend.rules.distributed.extra_config import without_keys
from backend.rules.examples import DEMO, H100, LAPTOP, LLAMA_8B, TINY, gpus
from backend.rules.memory_remedies import KINDS, MIN_MAX_LENGTH, smaller_batches
from backend.wording import data_size

RULE = {rule.code: rule for rule in RULES}
EIGHT = gpus(8, "H100", 80, (9, 0))
CORES = replace(LAPTOP, cores=64)
APPLE = replace(CORES, device="mps")
FACTS = replace(DEMO, shape=LLAMA_8B)  # 32 attention heads, 8 KV heads
TOWER = (
    ModuleSpec("model.vision_tower.layers.0.fc1", 64, 8, 8),
    ModuleSpec("model.vision_tower.layers.0.norm", 8),
)
MULTIMODAL = replace(FACTS, shape=replace(LLAMA_8B, non_layer_modules=(*TOWER, *LLAMA_8B.non_layer_modules)))
FULL = {"method.kind": "full", "train.learning_rate": 1e-5}
ZERO0, ZERO1, ZERO2, ZERO3, FSDP1, FSDP2, DDP, TENSOR = (
    {"parallel.strategy": name} for name in ("zero0", "zero1", "zero2", "zero3", "fsdp1", "fsdp2", "ddp", "tensor")
)


def case(patch: Mapping[str, Any], machine: Machine = EIGHT, facts: InputFacts = FACTS) -> Case:
    return Case(effective(edit(RunSpec(), dict(patch))), machine, facts)


def finding(code: str, *arguments: Any) -> Finding | None:
    return RULE[code].finding(case(*arguments))


def processes(count: int, **parallel: Any) -> dict[str, Any]:
    return {"launch.nproc_per_node": count, **{f"parallel.{name}": value for name, value in parallel.items()}}


def extra(keys: Mapping[str, Any]) -> dict[str, Any]:
    return {"parallel.extra_config": json.dumps(keys)}


NVME = {"parallel.offload_optimizer": "nvme", "parallel.nvme_path": "/nvme"}
HYBRID = {
    **FSDP1, **FULL, "parallel.sharding_strategy": "hybrid_shard", "launch.rendezvous": "static",
    "launch.master_addr": "10.0.0.1",
}  # fmt: skip
SAVE_BEST = {"save.load_best_model_at_end": True, "save.only_model": True}
PRECOMPUTED = {
    "parallel.strategy": "zero3", **processes(2), "train.stage": "dpo", "data.builtin": "train-pairs",
    "preference.precompute_ref_log_probs": True, "train.activation_checkpointing": True,
}  # fmt: skip
CASES: list[tuple[str, dict[str, Any], bool]] = [
    *(("STR003", {**strategy, **processes(2), **SAVE_BEST}, strategy is not DDP) for strategy in (DDP, ZERO0, FSDP2)),
    ("STR005", {**FSDP1, **processes(2), "eval.num_generations": 0}, False),
    ("STR005", {**FSDP1, **processes(2), "eval.num_generations": 1}, True),
    ("STR005", {**FSDP2, **processes(2), "eval.num_generations": 1}, False),
    ("STR005", {**FSDP2, **processes(2, context_parallel_size=2), "eval.num_generations": 1}, True),
    ("STR005", {**ZERO3, **processes(2, sequence_parallel_size=2), "eval.num_generations": 1}, True),
    ("STR006", {**ZERO0, **processes(2)}, False),
    ("STR006", {**ZERO1, **processes(2)}, True),
    ("STR006", {**ZERO2, **processes(2)}, True),
    ("STR006", {**ZERO3, **processes(2)}, False),
    ("STR006", {**ZERO2, **processes(1)}, False),
    ("STR006", {**ZERO2, **processes(2), "lora.modules_to_save": ("norm",)}, True),
    ("STR006", {**ZERO2, **processes(2), "lora.modules_to_save": ("embed_tokens", "lm_head")}, False),
    ("STR011", {**FSDP2, **processes(1)}, True),
    ("STR011", {**FSDP2, **processes(2)}, False),
    ("STR011", {**ZERO3, **processes(1)}, False),
    ("STR012", {**ZERO1, **processes(2), "parallel.offload_optimizer": "cpu", "train.optim": "sgd"}, True),
    ("STR012", {**ZERO0, **processes(2), "parallel.offload_optimizer": "cpu", "train.optim": "sgd"}, False),
    # Complete checkpoints are refused with these strategies (STR020, STR058).
    ("TRN007", {**FSDP2, **FULL, **processes(2), "save.only_model": True}, True),
    ("TRN007", {**TENSOR, **FULL, **processes(2), "save.only_model": True}, False),
    ("TRN007", {**ZERO3, **FULL, **processes(2), **NVME, "save.only_model": True}, False),
    ("STR013", {**ZERO1, **processes(2), **NVME}, True),
    ("STR013", {**ZERO2, **processes(2), **NVME}, True),
    ("STR013", {**ZERO3, **processes(2), **NVME}, False),
    ("STR053", {**HYBRID, **processes(1), "launch.nnodes": 2}, True),
    ("STR053", {**HYBRID, **processes(2), "launch.nnodes": 2}, False),
    ("STR053", {**HYBRID, **processes(1), "launch.rendezvous": "standalone"}, False),
    ("STR053", {**HYBRID, **processes(1), "launch.nnodes": 2, "parallel.sharding_strategy": "full_shard"}, False),
    ("STR018", {**FSDP2, **FULL, **processes(3, replicate_size=2)}, True),
    ("STR018", {**FSDP2, **FULL, **processes(2, replicate_size=2)}, True),  # no shard would be left
    ("STR018", {**FSDP2, **FULL, **processes(4, replicate_size=2)}, False),
    ("STR018", {**FSDP2, **FULL, **processes(2, context_parallel_size=2)}, False),
    ("STR018", {**FSDP2, **FULL, **processes(3, context_parallel_size=2)}, True),
    ("STR018", {**FSDP2, **FULL, **processes(4, replicate_size=2, context_parallel_size=2)}, True),
    ("STR018", {**FSDP2, **FULL, **processes(8, replicate_size=2, context_parallel_size=2)}, False),
    ("STR018", {**TENSOR, **FULL, **processes(2, tensor_parallel_size=2)}, False),
    ("STR018", {**TENSOR, **FULL, **processes(3, tensor_parallel_size=2)}, True),
    ("STR018", {**TENSOR, **FULL, **processes(4, tensor_parallel_size=2)}, False),
    ("STR021", {**TENSOR, **FULL, **processes(8, tensor_parallel_size=8)}, False),
    ("STR021", {**TENSOR, **FULL, **processes(7, tensor_parallel_size=7)}, True),
    ("STR021", {**TENSOR, **FULL, **processes(16, tensor_parallel_size=16)}, True),
    ("STR023", {**FSDP2, **processes(2, context_parallel_size=1)}, False),
    ("STR023", {**FSDP2, **processes(2, context_parallel_size=2)}, True),
    ("STR026", {**ZERO3, **processes(3, sequence_parallel_size=2)}, True),
    ("STR026", {**ZERO3, **processes(4, sequence_parallel_size=2)}, False),
    ("STR026", {**ZERO3, **processes(3, sequence_parallel_size=1)}, False),
    ("STR030", {**ZERO3, **processes(8, sequence_parallel_size=8)}, False),
    ("STR030", {**ZERO3, **processes(8, sequence_parallel_size=16)}, False),  # a multiple of the KV heads
    ("STR030", {**ZERO3, **processes(8, sequence_parallel_size=64)}, True),  # more than the attention heads
    ("STR030", {**ZERO3, **processes(8, sequence_parallel_size=3)}, True),
    ("STR031", {**ZERO3, **processes(2, sequence_parallel_size=2), "train.gradient_accumulation_steps": 1}, False),
    ("STR031", {**ZERO3, **processes(2, sequence_parallel_size=2), "train.gradient_accumulation_steps": 2}, True),
    ("STR031", {**ZERO3, **processes(2, sequence_parallel_size=1), "train.gradient_accumulation_steps": 2}, False),
    ("STR035", {**ZERO3, **extra({"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": False}})}, True),
    ("STR035", {**ZERO2, **extra({"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": False}})}, False),
    ("STR041", {**ZERO2, **extra({"tensor_parallel": {"autotp_size": 1}})}, False),
    ("STR041", {**ZERO2, **extra({"tensor_parallel": {"autotp_size": 2}})}, True),
    ("STR040", {**ZERO2, **extra({"gradient_predivide_factor": 1})}, False),
    ("STR040", {**ZERO2, **extra({"gradient_predivide_factor": 1.01})}, True),
    ("STR040", {**ZERO1, **extra({"gradient_predivide_factor": 2})}, False),
    ("STR044", {**FSDP2, **extra({"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 0})}, True),
    ("STR044", {**FSDP2, **extra({"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 1})}, False),
    ("STR045", {**DDP, **processes(2)}, True),
    ("STR045", {**DDP, **processes(1)}, False),
    *(("STR051", {**PRECOMPUTED, "method.kind": kind}, kind != "full") for kind in ("lora", "freeze", "full")),
]


@pytest.mark.parametrize(("code", "patch", "fails"), CASES, ids=lambda value: str(value)[:60])
def test_boundary(code: str, patch: dict[str, Any], fails: bool) -> None:
    facts = MULTIMODAL if code == "STR045" else FACTS
    found = finding(code, patch, EIGHT, facts)
    assert (found is not None) is fails
    if found and code == "STR031":
        assert "It differs from that of a run without sequence parallelism unless" in found.message


@pytest.mark.parametrize(
    ("patch", "fails"),
    [
        (FULL, True),
        ({"method.kind": "freeze"}, False),
        ({"method.kind": "freeze", "method.freeze_extra_modules": ("vision_tower",)}, True),
        ({"lora.targets": "all-linear"}, True),
        ({"lora.targets": "custom", "lora.target_modules": ("q_proj",)}, False),
        ({"lora.targets": "custom", "lora.target_modules": ("fc1",)}, True),
    ],
)
def test_methods_that_train_the_towers_of_a_multimodal_model(patch: dict[str, Any], fails: bool) -> None:
    facts = MULTIMODAL
    assert (finding("STR045", {**DDP, **processes(2), **patch}, EIGHT, facts) is not None) is fails


LOCAL = {"model.source": "path", "model.path": "/models/own"}
UNTIED_FSDP2 = {**FULL, **FSDP2, **processes(2)}
ADDED = {**LOCAL, "data.add_tokens": ("<tool>",)}


@pytest.mark.parametrize(
    ("code", "patch", "facts", "fails"),
    [
        ("STR070", {**LOCAL, **ZERO2, **processes(2)}, {"layerdrop": 0.1}, True),
        ("STR070", {**LOCAL, **ZERO2, **processes(2)}, {"layerdrop": 0.0}, False),
        ("STR070", {**LOCAL, **ZERO2, **processes(2), "train.stage": "dpo"}, {"layerdrop": 0.1}, False),
        ("STR070", {**LOCAL, **ZERO2, **processes(2), "train.stage": "reward"}, {"layerdrop": 0.1}, False),
        ("STR071", UNTIED_FSDP2, {"model_type": "qwen4_exp"}, True),
        ("STR071", UNTIED_FSDP2, {"model_type": "llama"}, False),
        ("STR071", {**UNTIED_FSDP2, "method.kind": "lora"}, {"model_type": "qwen4_exp"}, False),
        ("STR045", {**FULL, **DDP, **processes(2)}, {"unused_modules": ("mlp",)}, False),
        ("STR045", {**FULL, **DDP, **processes(2)}, {"unused_modules": ("q_proj",)}, True),
        (
            "STR045",
            {**DDP, **processes(2), "lora.targets": "custom", "lora.target_modules": ("up_proj",)},
            {"unused_modules": ("q_proj",)},
            False,
        ),
        ("MTH020", ADDED, {"model_type": "blt", "tokenizer_size": 300, "added_rows": 1}, True),
        ("MTH020", ADDED, {"model_type": "blt"}, True),  # the tokenizer is not known yet
        ("MTH020", ADDED, {"model_type": "blt", "tokenizer_size": 300}, False),
    ],
)
def test_facts_of_a_config(code: str, patch: dict[str, Any], facts: dict[str, Any], fails: bool) -> None:
    assert (finding(code, patch, EIGHT, replace(FACTS, **facts)) is not None) is fails


@pytest.mark.parametrize(("machine", "kernels"), [(CORES, "its collectives"), (EIGHT, "CPU Adam")])
def test_the_kernels_that_deepspeed_compiles_are_named(machine: Machine, kernels: str) -> None:
    patch = {**ZERO2, **processes(2), "parallel.offload_optimizer": "cpu"}
    found = finding("STR007", patch, replace(machine, has_cpp_compiler=False))
    assert found is not None and kernels in found.message


def test_context_parallelism_with_an_unknown_shape() -> None:
    patch = {**FSDP2, **processes(2, context_parallel_size=2)}
    assert finding("STR037", patch, EIGHT, replace(FACTS, shape=None)) is None


def test_one_process_has_no_sequence_parallel_group_to_suggest() -> None:
    found = finding("STR026", {**ZERO3, **processes(1, sequence_parallel_size=2)})
    assert found is not None and len(found.fixes) == 1


@pytest.mark.parametrize(("dtype", "other"), [("fp16", "bf16"), ("bf16", "fp16"), ("fp32", "fp16"), ("fp32", "bf16")])
def test_precision_of_the_deepspeed_config(dtype: str, other: str) -> None:
    def mismatch(keys: dict[str, Any]) -> bool:
        return finding("STR032", {**ZERO2, **processes(2), "precision.compute": dtype, **extra(keys)}) is not None

    assert mismatch({other: {"enabled": True}}) and not mismatch({other: {"enabled": False}})
    if dtype != "fp32":
        assert mismatch({dtype: {"enabled": False}}) and not mismatch({dtype: {"enabled": True}})


@pytest.mark.parametrize(("blocks", "safe"), [({"optimizer": {"type": "AdamW"}}, True),
                                              ({"optimizer": {"type": "Lion"}}, False)])  # fmt: skip
def test_removing_another_optimizer_changes_the_result(blocks: dict[str, Any], safe: bool) -> None:
    found = finding("STR033", {**ZERO2, **processes(2), **extra(blocks)})
    assert found is not None and found.fixes[0].safe is safe


@pytest.mark.parametrize(
    ("keys", "paths", "rest"),
    [
        ({"a": 1, "b": 2}, ["a"], {"b": 2}),
        ({"a": {"x": 1, "y": 2}, "b": {}}, ["a.x"], {"a": {"y": 2}, "b": {}}),
        ({"a": {"x": 1}, "b": 2}, ["a.x"], {"b": 2}),
        ({"a": {"x": 1}}, ["a.x"], None),
    ],
)
def test_keys_are_removed_with_tables_that_become_empty(
    keys: dict[str, Any], paths: list[str], rest: dict[str, Any] | None
) -> None:
    text = without_keys(keys, paths)["parallel.extra_config"]
    assert (json.loads(text) if text else None) == rest


@pytest.mark.parametrize(
    ("strategy", "count", "fails"),
    [(DDP, 1, False), (DDP, 2, True), (ZERO2, 1, True)],
    ids=["ddp-1", "ddp-2", "zero2-1"],
)
def test_processes_on_mps(strategy: dict[str, Any], count: int, fails: bool) -> None:
    assert (finding("STR002", {**strategy, **processes(count)}, APPLE) is not None) is fails


@pytest.mark.parametrize(("count", "fails"), [(1, True), (2, False), (4, True)])
def test_sequence_parallel_group_on_a_cpu_contains_all_processes(count: int, fails: bool) -> None:
    patch = {**ZERO3, **processes(count, sequence_parallel_size=2)}
    assert (finding("STR026", patch, CORES) is not None) is fails


@pytest.mark.parametrize(
    ("patch", "wanted"),
    [
        ({**FSDP2, **processes(3, replicate_size=2)}, 4),
        ({**FSDP2, **processes(2, replicate_size=2)}, 4),
        ({**FSDP2, **processes(5, replicate_size=2)}, 4),
        ({**FSDP2, **processes(7, context_parallel_size=3)}, 6),
        ({**TENSOR, **processes(3, tensor_parallel_size=2)}, 2),
        ({**TENSOR, **processes(1, tensor_parallel_size=2)}, 2),
    ],
)
def test_suggested_number_of_processes(patch: dict[str, Any], wanted: int) -> None:
    found = finding("STR018", {**FULL, **patch})
    assert found is not None and wanted in {fix.patch.get("launch.nproc_per_node") for fix in found.fixes}


@pytest.mark.parametrize(("excess", "fails"), [(0, False), (1, True)])
def test_size_from_which_fsdp2_would_wrap_the_list_of_layers(excess: int, fails: bool) -> None:
    size = TINY.layers * TINY.layer_parameters - excess
    keys = extra({"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": size})
    assert (finding("STR042", {**FSDP2, **keys}, EIGHT, replace(DEMO, shape=TINY)) is not None) is fails


def test_a_size_of_zero_wraps_nothing() -> None:
    keys = extra({"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 0})
    assert finding("STR042", {**FSDP2, **keys}, EIGHT, replace(DEMO, shape=TINY)) is None


def with_free(count: float) -> Machine:
    return replace(H100, gpus=(replace(H100.gpus[0], free_bytes=int(count)),))


def test_device_memory() -> None:
    """Up to the free memory nothing, up to 1.2 times the free memory a warning, then an error."""
    estimate = case({}, H100).estimate
    peak, high = estimate.device_bytes, estimate.high_bytes
    assert high > peak
    limit = peak / CLEAR_EXCESS
    for free, codes in (
        (high, set()),
        (high - 1, {"MEM002"}),
        (limit + 1, {"MEM002"}),
        (limit - 1, {"MEM001"}),
    ):
        assert {code for code in ("MEM001", "MEM002") if finding(code, {}, with_free(free))} == codes, free


@pytest.mark.parametrize(("code", "where"), [("MEM001", "device"), ("MEM003", "host")])
def test_the_largest_part_of_the_memory_that_is_full_is_named(code: str, where: str) -> None:
    patch = {**FULL, **ZERO3, "launch.nproc_per_node": 8, "parallel.offload_optimizer": "cpu"}
    full = replace(EIGHT, ram_free_bytes=GIB, gpus=tuple(replace(gpu, free_bytes=GIB) for gpu in EIGHT.gpus))
    found, rows = finding(code, patch, full), case(patch, full).estimate.rows
    device, host = max(bytes_by_kind(rows).values()), max(row.bytes for row in rows if row.where == "host")
    assert found is not None and data_size(device) != data_size(host)
    assert f": {data_size(device if where == 'device' else host)}." in found.message


@pytest.mark.parametrize(("peak", "exceeds"), [(120, False), (121, True)])
def test_peak_that_clearly_exceeds_the_free_memory(peak: int, exceeds: bool) -> None:
    assert (Estimate((Row("Weights", peak, ""),), 100).fit == Fit.NO) is exceeds


def test_fields_of_an_out_of_memory_finding_belong_to_the_largest_part() -> None:
    weights = finding("MEM001", FULL, H100)
    activations = finding("MEM001", {"train.per_device_train_batch_size": 512, "data.max_length": 8192}, H100,
                          replace(FACTS, token_lengths=(8192,)))  # fmt: skip
    assert weights is not None and "train.optim" in weights.fields
    assert activations is not None and "train.per_device_train_batch_size" in activations.fields


def test_a_run_that_exceeds_the_free_memory_is_said_to_not_fit() -> None:
    peak = case({}, H100).estimate.device_bytes
    fits, exceeds = (finding("MEM002", {}, with_free(peak - less)) for less in (0, 1))
    assert fits is not None and fits.message.startswith("Peak memory may reach")
    assert exceeds is not None and exceeds.message.startswith("The run most likely does not fit")


def test_memory_of_a_cpu_run_is_that_of_a_process() -> None:
    device, cpu = (
        finding("MEM001", {}, with_free(GIB)),
        finding("MEM001", {}, replace(LAPTOP, ram_free_bytes=GIB), DEMO),
    )
    assert device is not None and "on each device" in device.message
    assert cpu is not None and "for each process" in cpu.message


def test_host_memory() -> None:
    patch = {**FULL, **ZERO3, "launch.nproc_per_node": 8, "parallel.offload_optimizer": "cpu"}
    peak = case(patch, replace(EIGHT, ram_free_bytes=10**15)).estimate.host_bytes
    limit = int(peak / CLEAR_EXCESS)
    for free, code in ((peak, ""), (peak - 1, "MEM004"), (limit + 1, "MEM004"), (limit - 1, "MEM003")):
        machine = replace(EIGHT, ram_free_bytes=free)
        assert [each for each in ("MEM003", "MEM004") if finding(each, patch, machine)] == [code] * bool(code), free
    assert limit > GIB


def changes(kind: str, patch: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [dict(change.fix.patch) for change in KINDS[kind](case(patch))]


def test_remedies_begin_and_end_where_they_should() -> None:
    assert changes("length", {"data.max_length": 2 * MIN_MAX_LENGTH}) == [{"data.max_length": MIN_MAX_LENGTH}]
    assert changes("length", {"data.max_length": 2 * MIN_MAX_LENGTH - 1}) == []
    assert [bool(changes("rank", {"lora.r": rank})) for rank in (64, 65)] == [False, True]


@pytest.mark.parametrize(
    ("size", "stage", "loss", "sizes"),
    [(4, "sft", "kto", [2, 1]), (1, "sft", "kto", []), (6, "sft", "kto", [3]), (4, "kto", "kto", [2]),
     (2, "kto", "kto", []), (2, "kto", "apo_zero_unpaired", [1])],
)  # fmt: skip
def test_smaller_batches(size: int, stage: str, loss: str, sizes: list[int]) -> None:
    patch = {"train.per_device_train_batch_size": size, "train.stage": stage, "preference.kto_loss_type": loss}
    found = list(smaller_batches(case(patch)))
    assert [patch["train.per_device_train_batch_size"] for patch in found] == sizes
    batch_size = size * case(patch).spec.train.gradient_accumulation_steps
    assert {
        patch["train.per_device_train_batch_size"] * patch["train.gradient_accumulation_steps"] for patch in found
    } <= {batch_size}
