"""Silent changes: without the preflight rules these runs succeed, but do something different from what was
requested."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import skip_checks
from architectures import build, save
from fork_server import ForkServer
from parameters import soak_except
from safetensors.torch import load_file
from training_runs import REORDERING_TOLERANCE, losses, make_spec, result

from cited import cites

pytestmark = pytest.mark.soak
EXTRA_CONFIG = "parallel.extra_config"


def run_without_checks(folder: Path, changes: Mapping[str, Any], fork_server: ForkServer) -> Path:
    code, log = skip_checks.run(folder, make_spec(changes), fork_server)
    assert code == 0, log
    return folder


@cites("STR004")
def test_merging_sharded_weights_loses_the_training(tmp_path: Path, tiny: Path, fork_server: ForkServer) -> None:
    changes = {"parallel.strategy": "zero3", "save.final_model": True, "save.merge_adapter": True}
    saved = load_file(run_without_checks(tmp_path / "run", changes, fork_server) / "model/model.safetensors")
    base = load_file(tiny / "model.safetensors")
    assert not set(saved) & set(base), "the saved names belong to no model"
    run_result = {name.rpartition("base_model.model.")[2]: weight for name, weight in saved.items()}
    assert all(run_result[name].equal(weight) for name, weight in base.items())


@cites("STR004")
def test_fsdp2_merges_dora_into_nothing(tmp_path: Path, tiny: Path, fork_server: ForkServer) -> None:
    options = {"lora.use_dora": True, "train.learning_rate": 1e-2}
    changes = {"parallel.strategy": "fsdp2", "save.final_model": True, "save.merge_adapter": True, **options}
    saved = load_file(run_without_checks(tmp_path / "run", changes, fork_server) / "model/model.safetensors")
    base = load_file(tiny / "model.safetensors")
    assert all(saved[name].equal(weight) for name, weight in base.items())


@cites("OPT031")
@pytest.mark.parametrize("name", ["adam_mini", "adamw_torch_8bit"])
def test_fsdp2_does_not_load_the_gathered_state(name: str, tmp_path: Path, fork_server: ForkServer) -> None:
    changes = {"method.kind": "full", "parallel.strategy": "fsdp2", "train.optim": name, "train.max_steps": 2}
    saved = run_without_checks(tmp_path / "run", {**changes, "save.strategy": "steps", "save.steps": 1}, fork_server)
    again = {"save.resume_from": "path", "save.resume_path": str(saved / "checkpoints/checkpoint-1")}
    code, log = skip_checks.run(tmp_path / "again", make_spec({**changes, **again}), fork_server)
    assert code != 0 and "Resuming from checkpoint-1." in log


@cites("STR005")
def test_generations_differ_with_sequence_parallelism(tmp_path: Path, fork_server: ForkServer) -> None:
    options = {"eval.num_generations": 4, "eval.max_new_tokens": 16, "train.max_steps": 1}
    shared = {"parallel.strategy": "zero3", "parallel.sequence_parallel_size": 2}
    one, two = (
        [
            sample["before"]
            for sample in result(run_without_checks(tmp_path / name, {**options, **more}, fork_server))["samples"]
        ]
        for name, more in (("one", {}), ("two", shared))
    )
    assert len(one) == len(two) == 4
    assert one != two


@cites("PRC008")
def test_pure_bf16_silently_gets_fp32_state_with_deepspeed(tmp_path: Path, fork_server: ForkServer) -> None:
    options = {"parallel.strategy": "zero2", "precision.compute": "pure_bf16", "method.kind": "full"}
    run_result = result(run_without_checks(tmp_path / "run", {**options, "launch.nproc_per_node": 1}, fork_server))
    assert run_result["optimizer"][0]["bytes"] >= 8 * run_result["trainable_parameters"], (
        "two fp32 moments; in bf16 they take half"
    )


@cites("PRC008")
def test_fp8_is_silently_bf16_with_tensor_parallelism(tmp_path: Path, fork_server: ForkServer, tiny: Path) -> None:
    """No layer becomes an fp8 layer."""
    folder = save(build("llama"), tiny, tmp_path / "model")
    options = {"parallel.strategy": "tensor", "method.kind": "full", "launch.nproc_per_node": 2}
    options |= {"model.source": "path", "model.path": str(folder), "data.max_length": 64}
    fp8, bf16 = (
        losses(run_without_checks(tmp_path / name, {**options, "precision.compute": name}, fork_server))
        for name in ("fp8", "bf16")
    )
    assert fp8 == bf16


@cites("STR013")
def test_zero2_nvme_offload_writes_nothing_to_the_disk(tmp_path: Path, fork_server: ForkServer) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    options = {"parallel.strategy": "zero2", "parallel.offload_optimizer": "nvme", "parallel.nvme_path": str(disk)}
    run_result = result(run_without_checks(tmp_path / "run", options, fork_server))
    assert run_result["optimizer"][0]["class"].endswith("DeepSpeedCPUAdam")
    assert not list(disk.iterdir())


@cites("STR012")
def test_deepspeed_replaces_an_offloaded_optimizer(tmp_path: Path, fork_server: ForkServer) -> None:
    options = {"parallel.strategy": "zero2", "parallel.offload_optimizer": "cpu", "train.optim": "sgd"}
    run_result = result(run_without_checks(tmp_path / "run", options, fork_server))
    assert run_result["optimizer"][0]["class"].endswith("DeepSpeedCPUAdam")


@cites("OPT005")
def test_every_micro_batch_is_an_optimizer_step_if_the_backward_pass_steps(
    tmp_path: Path, tiny: Path, fork_server: ForkServer
) -> None:
    """The first step of AdamW changes a weight by about the learning rate at most, however large its gradient is."""
    changes = {
        "method.kind": "full",
        "train.optim": "galore_adamw_layerwise",
        "train.lr_scheduler_type": "constant",
        "train.learning_rate": 1e-3,
        "train.max_steps": 1,
        "save.final_model": True,
    }
    base = load_file(tiny / "model.safetensors")

    def largest_change(accumulation: int) -> float:
        more = {"train.gradient_accumulation_steps": accumulation}
        folder = run_without_checks(tmp_path / f"run{accumulation}", {**changes, **more}, fork_server)
        saved = load_file(folder / "model/model.safetensors")
        return max(float((saved[name] - base[name]).abs().max()) for name in base)

    assert largest_change(1) < 1.5e-3
    assert largest_change(4) > 2e-3


ALL_GATHER_SCRIPT = """
import torch, torch.distributed as dist
from torch.distributed.nn.functional import all_gather
dist.init_process_group("gloo")
half = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
for group in (None, half):
    given = torch.ones(2, requires_grad=True)
    sum(all_gather(given, group=group)).sum().backward()
    print("done", flush=True)
"""


@cites("STR026")
def test_gloo_cannot_reduce_gradients_of_a_subgroup(tmp_path: Path, fork_server: ForkServer) -> None:
    (tmp_path / "script.py").write_text(ALL_GATHER_SCRIPT)
    code = fork_server.run(tmp_path, 4, script=str(tmp_path / "script.py"), seconds=60)
    log = (tmp_path / "log.txt").read_text()
    assert code == 1, log
    assert log.count("done") >= 4
    assert "is not part of group" in log


@cites("STR041")
def test_autotp_saves_only_one_shard(tmp_path: Path, tiny: Path, fork_server: ForkServer) -> None:
    given = json.dumps({"tensor_parallel": {"autotp_size": 2}})
    changes = {"parallel.strategy": "zero2", "method.kind": "full", "save.final_model": True}
    saved = load_file(
        run_without_checks(tmp_path / "run", {**changes, EXTRA_CONFIG: given}, fork_server) / "model/model.safetensors"
    )
    base = load_file(tiny / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    assert 2 * saved[name].numel() == base[name].numel()


ZERO, BF16 = "zero_optimization", "bf16_master_weights_and_grads"
NO_CLIPPING = {"train.max_grad_norm": 0.0}
FP32_GRADIENTS = {"data_types": {"grad_accum_dtype": "fp32"}}
BF16_STATES = {"bf16_optimizer_states": True}
BF16_COMPUTE = {"precision.compute": "bf16"}
CPU_OFFLOAD = {"parallel.offload_optimizer": "cpu"}
LONG: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("zero3", {}, {ZERO: {"zero_quantized_weights": True}}, "This op had not been implemented on CPU"),
    ("zero3", {}, {ZERO: {"zero_quantized_gradients": True}}, "This op had not been implemented on CPU"),
    ("zero3", {}, {ZERO: {"zero_quantized_nontrainable_weights": True}}, "This op had not been implemented on CPU"),
    ("zero3", {}, {ZERO: {"stage3_module_granularity_threshold": 10**6}}, "p.grad.record_stream("),
    ("zero2", {}, {"hybrid_engine": {"enabled": True}}, "This op had not been implemented on CPU"),
    ("zero3", {}, {ZERO: {"offload_optimizer": {"super_offload": True}}}, "SuperOffload only supports NVIDIA CUDA"),
    ("zero2", CPU_OFFLOAD, {ZERO: {"zenflow": {"topk_ratio": 0.1}}}, "ZenFlowSelectiveAdamW() argument after **"),
    ("zero3", CPU_OFFLOAD, {ZERO: {"zenflow": {"topk_ratio": 0.1}}}, "IndexError: index out of range"),
    ("zero1", {}, {ZERO: {"legacy_stage1": True}}, "deprecated version of ZeRO Stage 1 is not supported"),
    ("zero2", {}, {ZERO: {"allgather_bucket_size": 3}}, "allgather_bucket_size must be a multiple of"),
    ("zero2", {}, {"checkpoint": {"writer": {"type": "fast"}}}, "KeyError: 'CROSS_SIZE'"),
    ("zero2", {}, {"sequence_parallel_size": 2}, "train_batch_size is not equal to"),
    ("zero2", {}, {"managed_gradient_accumulation": False}, "is not supported with managed_gradient_accumulation"),
]


@pytest.mark.parametrize(
    ("strategy", "more", "given", "words"),
    [
        ("zero2", CPU_OFFLOAD, {ZERO: {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}}, "ratio"),
        ("zero3", {}, {"gradient_allreduce_op": "SUM"}, "gradient_allreduce_op='sum' is not supported with ZeRO"),
        ("zero2", {}, {ZERO: {"compute_grad_norm": False}}, "compute_grad_norm=false requires gradient_clipping=0"),
        ("zero3", NO_CLIPPING, {ZERO: {"compute_grad_norm": False}}, "1 validation error for DeepSpeedZeroConfig"),
        (
            "zero2",
            {**NO_CLIPPING, **CPU_OFFLOAD},
            {ZERO: {"compute_grad_norm": False}},
            "does not support optimizer offload",
        ),
        (
            "zero1",
            {**NO_CLIPPING, **BF16_COMPUTE},
            {ZERO: {"compute_grad_norm": False}, **FP32_GRADIENTS},
            "does not support ZeRO Stage 1",
        ),
        ("zero2", BF16_COMPUTE, {"bf16": {BF16: True}}, "Master weights feature requires ZeRO-2 Offload"),
        (
            "zero2",
            {**BF16_COMPUTE, **CPU_OFFLOAD},
            {"bf16": {BF16: True, **BF16_STATES}},
            "bf16_optimizer_states with ZeRO-Offload",
        ),
        ("zero2", BF16_COMPUTE, {"bf16": BF16_STATES}, "bf16_optimizer_states requires bf16_master_weights_and_grads"),
        ("zero2", {}, {"data_types": {"param_dtype": "fp16"}}, "conflicts with the enabled precision mode"),
        ("zero0", BF16_COMPUTE, FP32_GRADIENTS, "unsupported mix of model_dtype=torch.bfloat16"),
        ("zero2", {}, {"gradient_predivide_factor": 2.0}, "gradient_predivide_factor != 1.0 is not yet supported"),
        ("zero3", {}, {"prescale_gradients": True}, "pre-scale gradients is not yet supported with ZeRO-3"),
        *soak_except(LONG, ()),
    ],
)
def test_deepspeed_rejects_these_combinations(
    strategy: str, more: dict[str, Any], given: dict[str, Any], words: str, tmp_path: Path, fork_server: ForkServer
) -> None:
    """STR040 for each key; its failing example covers one of them."""
    changes = {**more, "parallel.strategy": strategy, EXTRA_CONFIG: json.dumps(given)}
    code, log = skip_checks.run(tmp_path / "run", make_spec(changes), fork_server)
    assert code == 1, log
    assert words in log, log


@cites("STR058")
def test_a_resume_does_not_restore_the_optimizer_state_on_nvme(tmp_path: Path, fork_server: ForkServer) -> None:
    """The losses after a resume from step 2 differ, also at step 3, because the norms are not restored."""
    (tmp_path / "disk").mkdir()
    offload = {"parallel.offload_optimizer": "nvme", "parallel.nvme_path": str(tmp_path / "disk")}
    changes = {"method.kind": "full", "parallel.strategy": "zero3", "train.max_steps": 4, **offload}
    saved = run_without_checks(tmp_path / "run", {**changes, "save.strategy": "steps", "save.steps": 2}, fork_server)
    again = {"save.resume_from": "path", "save.resume_path": str(saved / "checkpoints/checkpoint-2")}
    resumed = run_without_checks(tmp_path / "again", {**changes, **again, "save.strategy": "no"}, fork_server)
    before, after = losses(saved), losses(resumed)
    assert set(after) == {3, 4}
    assert all(abs(before[step] - after[step]) > REORDERING_TOLERANCE for step in after)


@cites("ADP016")
def test_precomputed_log_probs_are_those_of_the_base_model(tmp_path: Path, fork_server: ForkServer) -> None:
    """At the first step, DPO's loss is ln 2 if the model is its own reference."""
    short = {"train.max_steps": 3, "train.learning_rate": 0.01, "save.final_model": True}
    adapter = fork_server.train(tmp_path / "sft", make_spec(short)) / "model"
    preferences = {"train.stage": "dpo", "data.builtin": "train-pairs", "lora.adapter_path": str(adapter)}
    first = {}
    for precomputed in (False, True):
        changes = {**preferences, "train.max_steps": 1, "preference.precompute_ref_log_probs": precomputed}
        first[precomputed] = losses(run_without_checks(tmp_path / f"dpo-{precomputed}", changes, fork_server))[0]
    assert first[False] == pytest.approx(math.log(2), abs=1e-5)
    assert abs(first[True] - math.log(2)) > 1e-3
