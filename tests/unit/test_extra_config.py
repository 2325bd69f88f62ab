"""Extra config: each kind of key that an engine or the launcher refuses, and a similar one that it accepts."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest
from accelerate.commands.config.config_args import ClusterConfig
from specs import rule_finding

from backend.config import RunSpec
from backend.config.options import edit
from backend.rules import Finding, check
from backend.rules.accelerate_launcher import ACCELERATE_KEYS
from backend.rules.examples import DEMO, EQUIPPED_TWO, TINY

KNOWN = replace(DEMO, shape=TINY, module_classes=("LlamaDecoderLayer", "LlamaMLP"))
ZERO2, ZERO3, ZERO0, ZERO1, FSDP2, FSDP1 = (
    {"parallel.strategy": name} for name in ("zero2", "zero3", "zero0", "zero1", "fsdp2", "fsdp1")
)
ZERO2_OFFLOAD = {**ZERO2, "parallel.offload_optimizer": "cpu"}
BF16_MASTER_WEIGHTS = {"bf16_master_weights_and_grads": True}
BF16_STATES = {**BF16_MASTER_WEIGHTS, "bf16_optimizer_states": True}
FP32_GRADIENTS = {"data_types": {"grad_accum_dtype": "fp32"}}
NO_CLIPPING = {"train.max_grad_norm": 0.0}
CPU = {"launch.device": "cpu"}


def codes(field: str, given: dict[str, Any], patch: dict[str, Any]) -> set[str]:
    spec = edit(RunSpec(), {**patch, field: json.dumps(given)})
    return {f.code for f in check(spec, EQUIPPED_TWO, KNOWN)}


def zero(**given: Any) -> dict[str, Any]:
    return {"zero_optimization": given}


@pytest.mark.parametrize(
    ("code", "given", "patch", "raised"),
    [
        ("STR040", {"torch_autocast": {"enabled": True, "dtype": "float16"}}, ZERO2, True),
        ("STR040", {"torch_autocast": {"enabled": True, "dtype": "torch.float16"}}, ZERO0, False),
        ("STR040", {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, ZERO2, False),
        ("STR040", {"torch_autocast": {"enabled": True, "dtype": "bfloat"}}, ZERO2, True),
        ("STR040", {"torch_autocast": {"enabled": True, "lower_precision_safe_modules": ["Linear"]}}, ZERO2, True),
        (
            "STR040",
            {"torch_autocast": {"enabled": True, "lower_precision_safe_modules": ["torch.nn.Linear"]}},
            ZERO2,
            False,
        ),
        ("STR040", {"data_types": {"grad_accum_dtype": "float64"}}, ZERO2, True),
        ("STR040", {"datastates_ckpt": {}}, ZERO2, True),
        ("STR040", {"gradient_predivide_factor": 0}, ZERO0, True),
        ("STR040", zero(leaf_module={"classes": ["LlamaAttention"]}), ZERO3, True),
        ("STR040", zero(leaf_module={"classes": ["torch.nn.modules.linear.Linear"]}), ZERO3, True),
        ("STR040", zero(leaf_module={"classes": ["MixtralSparseMoeBlock", "LlamaDecoderLayer"]}), ZERO3, False),
        ("STR040", zero(leaf_module={"classes": ["LlamaAttention"]}), ZERO2, False),
        ("STR040", zero(leaf_module={"classes": ["GPT2Attention", "BloomAttention"]}), ZERO3, False),
        ("STR040", zero(leaf_module={"classes": ["GPTJAttention"]}), ZERO3, True),
        ("STR040", zero(leaf_module={"name_suffixes": ["attn"]}), ZERO3, True),
        ("STR040", zero(leaf_module={"names": ["model.layers.0.self_attn"]}), ZERO3, True),
        ("STR040", zero(leaf_module={"name_suffixes": ["model"]}), ZERO3, True),
        ("STR040", zero(leaf_module={"name_suffixes": ["mlp"]}), ZERO3, False),
        ("STR040", zero(offload_optimizer={"device": "cpu", "ratio": 0.5}), ZERO2_OFFLOAD, True),
        ("STR040", zero(offload_optimizer={"device": "cpu", "ratio": 1.0}), ZERO2_OFFLOAD, False),
        ("STR040", zero(offload_optimizer={"device": "cpu", "ratio": 0.5}), {**ZERO2_OFFLOAD, **ZERO3}, False),
        ("STR040", {"gradient_allreduce_op": "SUM"}, ZERO3, True),
        ("STR040", {"gradient_allreduce_op": "sum"}, ZERO2, False),
        ("STR040", {"gradient_allreduce_op": "sum", "prescale_gradients": True}, ZERO2, False),
        ("STR040", {"gradient_allreduce_op": "mean", "prescale_gradients": True}, ZERO2, True),
        ("STR040", zero(compute_grad_norm=False), ZERO2, True),
        ("STR040", zero(compute_grad_norm=False), {**ZERO2, **NO_CLIPPING}, False),
        ("STR040", zero(compute_grad_norm=False), {**ZERO3, **NO_CLIPPING}, True),
        ("STR040", zero(compute_grad_norm=False), {**ZERO2_OFFLOAD, **NO_CLIPPING}, True),
        ("STR040", {**zero(compute_grad_norm=False), **FP32_GRADIENTS}, {**ZERO1, **NO_CLIPPING}, True),
        ("STR040", {**zero(compute_grad_norm=False), **FP32_GRADIENTS}, {**ZERO2, **NO_CLIPPING}, False),
        ("STR040", {"bf16": BF16_MASTER_WEIGHTS}, ZERO2, True),
        ("STR040", {"bf16": BF16_MASTER_WEIGHTS}, ZERO2_OFFLOAD, False),
        ("STR040", {"bf16": BF16_STATES}, ZERO2, False),
        ("STR040", {"bf16": BF16_STATES}, ZERO2_OFFLOAD, True),
        ("STR040", {"bf16": BF16_STATES}, ZERO0, True),
        ("STR040", {"bf16": {"bf16_optimizer_states": True}}, ZERO2, True),
        ("STR040", {"fp16": {"fp16_master_weights_and_grads": True}}, ZERO2, True),
        ("STR040", {"data_types": {"param_dtype": "fp16"}}, ZERO2, True),
        ("STR040", {"data_types": {"param_dtype": "bf16"}}, ZERO2, False),
        ("STR040", {"data_types": {"grad_accum_dtype": "fp32"}}, ZERO0, True),
        ("STR040", {"data_types": {"grad_accum_dtype": "fp32"}}, ZERO2, False),
        ("STR040", {"gradient_predivide_factor": 2.0}, ZERO2, True),
        ("STR040", {"gradient_predivide_factor": 1.0}, ZERO2, False),
        ("STR040", {"prescale_gradients": True}, ZERO3, True),
        ("STR040", {"prescale_gradients": True}, ZERO0, False),
        ("STR040", {"prescale_gradients": True, **zero(reduce_scatter=False)}, ZERO3, False),
        ("STR040", zero(zero_quantized_weights=True), {**ZERO3, **CPU}, True),
        ("STR040", zero(zero_quantized_weights=True), {**ZERO2, **CPU}, False),
        ("STR040", zero(zero_quantized_gradients=True), ZERO3, False),
        ("STR040", zero(zero_quantized_nontrainable_weights=True), {**ZERO3, **CPU}, True),
        ("STR040", zero(zero_quantized_nontrainable_weights=False), {**ZERO3, **CPU}, False),
        ("STR040", zero(stage3_module_granularity_threshold=1000), {**ZERO3, **CPU}, True),
        ("STR040", zero(stage3_module_granularity_threshold=0), {**ZERO3, **CPU}, False),
        ("STR040", {"hybrid_engine": {"enabled": True}}, {**ZERO2, **CPU}, True),
        ("STR040", {"hybrid_engine": {"enabled": False}}, {**ZERO2, **CPU}, False),
        ("STR040", {"comet": {"enabled": True}}, ZERO2, True),
        ("STR040", {"comet": {"enabled": False}}, ZERO2, False),
        ("STR040", zero(offload_optimizer={"super_offload": True}), {**ZERO3, **CPU}, True),
        ("STR040", zero(offload_optimizer={"super_offload": True}), ZERO3, False),
        ("STR040", zero(zenflow={"topk_ratio": 0.1}), ZERO2_OFFLOAD, True),
        ("STR040", zero(zenflow=None), ZERO2, False),
        ("STR040", zero(legacy_stage1=True), ZERO1, True),
        ("STR040", zero(legacy_stage1=False), ZERO1, False),
        ("STR040", zero(allgather_bucket_size=3), ZERO2, True),
        ("STR040", zero(allgather_bucket_size=4), ZERO2, False),
        ("STR040", zero(allgather_bucket_size="500000000"), ZERO2, False),
        ("STR040", zero(allgather_bucket_size=3), ZERO3, False),
        ("STR040", {"checkpoint": {"writer": {"type": "fast"}}}, ZERO2, True),
        ("STR040", {"checkpoint": {"writer": {"type": "fast"}}}, {**ZERO2, "launch.launcher": "deepspeed"}, False),
        ("STR040", {"checkpoint": {"writer": None}}, ZERO2, False),
        ("STR040", {"sequence_parallel_size": 2}, ZERO2, True),
        ("STR040", {"sequence_parallel_size": 1}, ZERO2, False),
        ("STR040", {"managed_gradient_accumulation": False}, ZERO2, True),
        ("STR040", {"managed_gradient_accumulation": True}, ZERO2, False),
        ("STR041", {"tensor_parallel": {"autotp_size": 2}}, ZERO2, True),
        ("STR041", {"tensor_parallel": {"autotp_size": 1}}, ZERO2, False),
        ("STR042", {"fsdp_state_dict_type": "LOCAL_STATE_DICT"}, FSDP2, True),
        ("STR042", {"state_dict_type": "LOCAL_STATE_DICT"}, FSDP1, False),
        ("STR042", {"reshard_after_forward": "FULL_SHARD"}, FSDP2, True),
        ("STR042", {"reshard_after_forward": "false"}, FSDP2, False),
        ("STR042", {"reshard_after_forward": True}, FSDP1, True),
        ("STR042", {"reshard_after_forward": "SHARD_GRAD_OP"}, FSDP1, False),
        ("STR042", {"auto_wrap_policy": "no_wrap"}, FSDP2, True),
        ("STR042", {"transformer_layer_cls_to_wrap": ["GPT2Block"]}, FSDP2, True),
        ("STR042", {"transformer_layer_cls_to_wrap": "LlamaMLP,LlamaDecoderLayer"}, FSDP2, False),
        ("STR042", {"cpu_ram_efficient_loading": True}, {**FSDP2, "precision.compute": "fp8"}, True),
        ("STR042", {"cpu_ram_efficient_loading": True}, FSDP2, False),
        ("STR042", {"xla": True}, FSDP2, True),
        ("STR042", {"xla_fsdp_v2": True}, FSDP2, True),
        ("STR042", {"transformer_layer_cls_to_wrap": []}, FSDP2, True),
        ("STR042", {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 1e9}, FSDP2, True),
        ("STR042", {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 10**9}, FSDP2, False),
        ("STR042", {"min_num_params": 1e9}, FSDP2, False),
        ("STR039", {"activation_checkpointing": "true"}, FSDP2, True),
        ("STR039", {"fsdp_activation_checkpointing": 1}, FSDP2, True),
        ("STR039", {"activation_checkpointing": "false"}, FSDP2, False),
        ("STR042", {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 1000}, FSDP2, True),
        ("STR042", {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 10**9}, FSDP2, False),
        ("STR042", {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 1000}, FSDP1, False),
        ("STR043", {"use_orig_params": True}, FSDP2, True),
        ("STR043", {"use_orig_params": True}, FSDP1, False),
        ("STR043", {"fsdp_offload_params": True}, FSDP1, True),
        ("STR044", {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}, FSDP2, True),
        ("STR044", {"auto_wrap_policy": "NO_WRAP"}, FSDP1, True),
        ("STR036", {"fsdp_version": 1}, FSDP2, True),
        ("STR036", {"version": 2}, FSDP2, False),
        ("STR036", {"fsdp_cpu_offload": True}, FSDP2, True),
        ("STR036", {"zero_optimization": 3}, ZERO2, True),
        ("STR036", {"fsdp_state_dict_type": "SHARDED_STATE_DICT"}, FSDP2, True),
        ("STR036", {"state_dict_type": "FULL_STATE_DICT"}, FSDP2, False),
        ("STR036", {"state_dict_type": "SHARDED_STATE_DICT"}, {**FSDP2, "parallel.state_dict_type": "sharded"}, False),
    ],
)
def test_extra_config_of_the_engine(code: str, given: dict[str, Any], patch: dict[str, Any], raised: bool) -> None:
    assert (code in codes("parallel.extra_config", given, patch)) == raised


NODES = {
    "parallel.strategy": "ddp", "launch.rendezvous": "static", "launch.master_addr": "10.0.0.1",
    "launch.nproc_per_node": 2,
}  # fmt: skip
DDP = {"parallel.strategy": "ddp"}


@pytest.mark.parametrize(
    ("code", "given", "patch", "raised"),
    [
        ("LCH013", {"num_processes": 4}, DDP, True),
        (
            "LCH013",
            {"num_processes": 2, "gpu_ids": "all", "main_process_port": 1234, "rdzv_backend": "c10d"},
            DDP,
            False,
        ),
        ("LCH013", {"main_process_port": 1234}, NODES, True),
        ("LCH013", {"rdzv_backend": "c10d"}, NODES, True),
        ("LCH013", {"gpu_ids": "0"}, DDP, True),
        ("LCH013", {"gpu_ids": "0,1"}, DDP, False),
        ("LCH013", {"gpu_ids": "0,1"}, {**DDP, "launch.devices": (1, 0)}, True),
        ("LCH013", {"use_cpu": True}, {**DDP, "launch.nproc_per_node": 1}, True),
        ("LCH013", {"use_cpu": True}, DDP, False),
        ("LCH014", {"use_cpu": True}, DDP, True),
        ("LCH013", {"mpirun_config": {"mpirun_hostfile": "hosts"}}, {**DDP, "launch.nproc_per_node": 1}, True),
        ("LCH014", {"mpirun_config": {"mpirun_hostfile": "hosts"}}, {**DDP, "launch.nproc_per_node": 1}, False),
        ("LCH014", {"mpirun_config": {"mpirun_hostfile": "hosts"}}, DDP, True),
        ("LCH013", {"use_cpu": True}, {**DDP, "launch.device": "cpu"}, False),
        ("LCH013", {"mixed_precision": "bf16"}, {**DDP, "precision.compute": "fp32"}, True),
        ("LCH013", {"mixed_precision": "bf16"}, {**DDP, "precision.compute": "pure_bf16"}, True),
        ("LCH013", {"mixed_precision": "no"}, {**DDP, "precision.compute": "fp32"}, False),
        ("LCH013", {"mixed_precision": "fp16"}, DDP, False),  # the trainer sets bf16 itself
        ("LCH013", {"mixed_precision": "no"}, ZERO2, True),
        ("LCH013", {"deepspeed_config": {"zero_stage": 2}}, ZERO2, True),
        ("LCH013", {"deepspeed_config": {"deepspeed_moe_layer_cls_names": "X"}}, ZERO2, False),
        ("LCH013", {"deepspeed_config": {"deepspeed_multinode_launcher": "pdsh"}}, ZERO2, False),
        ("LCH013", {"deepspeed_config": {"deepspeed_multinode_launcher": "pdsh"}}, {**NODES, **ZERO2}, True),
        ("LCH013", {"fsdp_config": {"fsdp_sync_module_states": False}}, FSDP2, True),
        ("LCH013", {"fsdp_config": {"sync_module_states": False}}, FSDP1, False),
        ("LCH013", {"fsdp_config": {"fsdp_activation_checkpointing": True}}, FSDP2, True),
        ("LCH013", {"fsdp_config": {"fsdp_offload_params": True}}, FSDP2, True),
        ("LCH013", {"fsdp_config": {"offload_params": True}}, {**FSDP2, "parallel.cpu_offload": True}, False),
        ("LCH013", {"fsdp_config": {"transformer_layer_cls_to_wrap": "LlamaMLP"}}, FSDP2, True),
        (
            "LCH014",
            {"fsdp_config": {"transformer_layer_cls_to_wrap": "LlamaMLP"}},
            {**FSDP2, "parallel.transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
            True,
        ),
        ("LCH013", {"parallelism_config": {"parallelism_config_dp_replicate_size": 2}}, FSDP2, True),
        ("LCH014", {"fp8_config": {"backend": "TE"}}, DDP, True),
        ("LCH014", {"fsdp_config": {"forward_prefetch": True}}, FSDP2, True),
        ("LCH014", {"fsdp_config": {"fsdp_sync_module_states": False}}, FSDP2, False),  # refused, by another
        ("LCH015", {"dynamo_config": {"backend": "INDUCTOR"}}, FSDP2, True),
    ],
)
def test_extra_config_of_the_launcher(code: str, given: dict[str, Any], patch: dict[str, Any], raised: bool) -> None:
    found = codes("launch.extra_accelerate_config", given, {**patch, "launch.launcher": "accelerate"})
    assert (code in found) == raised


def test_known_keys_are_those_of_accelerate() -> None:
    """Of the installed version."""
    assert {field.name for field in fields(ClusterConfig)} == ACCELERATE_KEYS


def finding(code: str, given: dict[str, Any], patch: dict[str, Any]) -> Finding | None:
    spec = edit(RunSpec(), {**patch, "parallel.extra_config": json.dumps(given)})
    return next((f for f in check(spec, EQUIPPED_TWO, KNOWN) if f.code == code), None)


@pytest.mark.parametrize(
    ("code", "given", "parts"),
    [
        ("STR054", {"bf16": {"loss_scale": 0}}, ["bf16.loss_scale: DeepSpeed does not know", "fp16.loss_scale"]),
        ("STR054", {"bf16": {"auto_cast": True}}, ["bf16.auto_cast", "fp16.auto_cast"]),
        ("STR054", zero(cpu_offload_params=True), ["cpu_offload_params", "is zero_optimization.offload_param)"]),
        ("STR054", zero(offload_optimizer={"buffer_size": 5}), ["offload_param.buffer_size"]),
        ("STR054", zero(stage3_max_live_params=5), ["is zero_optimization.stage3_max_live_parameters)"]),
        ("STR054", zero(reduce_bucket_size=0), ["must be an integer above 0, not 0"]),
        ("STR054", zero(sub_group_size="1e9"), ["must be an integer of at least 0, not '1e9'"]),
        ("STR054", zero(overlap_comm="maybe"), ["must be true or false, not 'maybe'"]),
        ("STR054", zero(leaf_module=["x"]), ["leaf_module: must be an object"]),
        ("STR054", zero(max_reuse_distance=5, stage3_max_reuse_distance=6), ["is a second spelling of"]),
        ("STR054", {"tensorboard": {"enable": True}}, ["is tensorboard.enabled)"]),
        ("STR054", {"prescale_gradients": "false"}, ["must be true or false, not 'false'"]),
        ("STR054", {"communication_data_type": "float16"}, ["one of fp16, bf16, fp32"]),
        ("STR054", {"wall_clock_breakdown": "auto"}, ["not 'auto'"]),
        ("STR055", {"gradient_clip": 1.0}, ["gradient_clip: DeepSpeed does not know", "is gradient_clipping)"]),
        ("STR055", {"overlap_comm": True}, ["is zero_optimization.overlap_comm)"]),
        ("STR055", {"activation_checkpointing": {"partitioned_activations": True}}, [".partition_activations)"]),
        ("STR055", {"stage": 2}, ["is zero_optimization.stage)"]),
        ("STR055", zero(cpu_offload_use_pin_memory=True), ["parallel.pin_memory"]),
    ],
)
def test_keys_that_deepspeed_refuses_or_ignores_are_named(code: str, given: dict[str, Any], parts: list[str]) -> None:
    found = finding(code, given, ZERO3)
    assert found is not None
    assert all(part in found.message for part in parts), found.message
    assert found.fixes and finding(code, {}, {**ZERO3, **found.fixes[0].patch}) is None


@pytest.mark.parametrize(
    ("code", "given", "label", "becomes"),
    [
        (
            "STR054",
            zero(stage3_max_live_params=5, sub_group_size=7),
            "Rename zero_optimization.stage3_max_live_params to stage3_max_live_parameters",
            zero(stage3_max_live_parameters=5, sub_group_size=7),
        ),
        (
            "STR055",
            {"flops_profiler": {"enable": False}},
            "Rename flops_profiler.enable to enabled",
            {"flops_profiler": {"enabled": False}},
        ),
        ("STR054", {"zero_optimisation": {"sub_group_size": 7}}, None, None),  # it has no effect
        ("STR054", {"bf16": {"loss_scale": 0}}, "Remove these keys", {}),  # the closest one is in another block
        ("STR054", zero(overlap_com="maybe"), "Remove these keys", {}),  # not a value of overlap_comm
        (
            "STR054",
            zero(max_live_params=5, stage3_max_live_parameters=6),
            "Remove these keys",
            zero(stage3_max_live_parameters=6),
        ),
        (
            "STR054",
            zero(stage3_max_live_parameter=5, stage3_max_live_params=6, overlap_com=True),  # the first two mean one key
            "Rename zero_optimization.overlap_com to overlap_comm",
            zero(stage3_max_live_parameter=5, stage3_max_live_params=6, overlap_comm=True),
        ),
        (
            "STR055",
            {"gradient_clip": 1.0, "_comment": "x"},
            "Rename gradient_clip to gradient_clipping",
            {"gradient_clipping": 1.0, "_comment": "x"},
        ),
        (
            "STR055",
            {"zero_optimisation": {"sub_group_size": 7}},
            "Rename zero_optimisation to zero_optimization",
            zero(sub_group_size=7),
        ),
    ],
)
def test_a_misspelled_key_can_be_renamed(
    code: str, given: dict[str, Any], label: str | None, becomes: dict[str, Any] | None
) -> None:
    found = finding(code, given, ZERO3)
    fixes = sorted(found.fixes, key=lambda fix: fix.safe) if found else []  # removing a key without an effect is safe
    assert (fixes[0].label if fixes else None) == label
    if fixes:
        assert json.loads(str(fixes[0].patch["parallel.extra_config"]) or "{}") == becomes
        assert fixes[-1].label == "Remove these keys"


@pytest.mark.parametrize(("kind", "name", "is_refused"), [("gpt2", "h.0.attn", False), ("gptj", "h.0.attn", True)])
def test_attention_that_gets_its_input_by_position_can_be_a_leaf_module(kind: str, name: str, is_refused: bool) -> None:
    patch = {**ZERO3, "parallel.extra_config": json.dumps(zero(leaf_module={"names": [name]}))}
    assert bool(rule_finding("STR040", patch, EQUIPPED_TWO, replace(KNOWN, model_type=kind))) == is_refused


@pytest.mark.parametrize(
    "given",
    [
        zero(stage3_gather_fp16_weights_on_model_save=True, max_live_parameters=1e9, reduce_bucket_size="auto"),
        {"bfloat16": {"enabled": "auto"}, "steps_per_print": 2000, "wall_clock_breakdown": False},
        {"fp16": {"loss_scale": 0, "hysteresis": 2, "min_loss_scale": 1}, "zero_allow_untested_optimizer": True},
        {"checkpoint": {"tag_validation": "warn"}, "flops_profiler": {"enabled": False, "profile_step": 1}},
        {"_comment": "two GPUs", "//": "and this", "zero_optimization": {"stage": 3}},
        {"data_types": {"grad_accum_dtype": "fp32"}, "comms_logger": {"enabled": True, "prof_ops": ["all_reduce"]}},
    ],
)
def test_known_spellings_are_accepted(given: dict[str, Any]) -> None:
    assert not {"STR054", "STR055"} & codes("parallel.extra_config", given, ZERO3)


@pytest.mark.parametrize(
    ("switch", "option", "strategy"),
    [
        ("cpu_offload", "parallel.offload_optimizer", ZERO2),
        ("cpu_offload", "parallel.offload_optimizer", ZERO3),
        ("cpu_offload_param", "parallel.offload_param", ZERO3),
    ],
)
def test_an_offload_switch_becomes_the_option(switch: str, option: str, strategy: dict[str, Any]) -> None:
    """DeepSpeed would offload, although strategy and estimate do not show it."""
    found = finding("STR036", zero(**{switch: True}), strategy)
    assert found is not None
    assert f"written as zero_optimization.{switch}" in found.message
    assert found.fixes[0].patch == {option: "cpu", "parallel.extra_config": ""}
    assert finding("STR036", zero(**{switch: True}), {**strategy, option: "cpu"}) is None
    assert finding("STR036", zero(**{switch: False}), strategy) is None


def test_an_offload_switch_that_the_strategy_does_not_have_is_removed() -> None:
    found = finding("STR036", zero(cpu_offload_param=True), ZERO2)
    assert found is not None
    assert [fix.label for fix in found.fixes] == ["Use the options"]


@pytest.mark.parametrize("name", ["SHARDED_STATE_DICT", "sharded_state_dict"])
def test_a_format_of_checkpoints_becomes_the_option(name: str) -> None:
    """Otherwise resuming would expect files of the other format."""
    found = finding("STR036", {"state_dict_type": name}, FSDP2)
    assert found is not None
    assert found.fixes[0].patch == {"parallel.state_dict_type": "sharded", "parallel.extra_config": ""}


def test_null_turns_off_what_an_option_offloads() -> None:
    found = finding("STR036", zero(offload_optimizer=None), ZERO2_OFFLOAD)
    assert found is not None and '"none"' in found.message
    assert finding("STR036", zero(offload_optimizer=None), ZERO2) is None


def test_a_key_of_deepspeed_config_that_accelerate_does_not_know() -> None:
    launcher = {**ZERO2, "launch.launcher": "accelerate"}
    assert "LCH014" in codes("launch.extra_accelerate_config", {"deepspeed_config": {"zero_stages": 2}}, launcher)
    known = {"deepspeed_config": {"deepspeed_exclusion_filter": "worker-1"}}
    assert "LCH014" not in codes("launch.extra_accelerate_config", known, launcher)
