"""Further keys: every row of the tables of what an engine or a launcher refuses, and its neighbour that it takes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from backend.options import edit
from backend.rules import check
from backend.rules.examples import DEMO, EQUIPPED_TWO, TINY
from backend.spec import RunSpec

KNOWN = replace(DEMO, shape=TINY, classes=("LlamaDecoderLayer", "LlamaMLP"))
ZERO2, ZERO3, ZERO0, FSDP2, FSDP1 = (
    {"parallel.strategy": name} for name in ("zero2", "zero3", "zero0", "fsdp2", "fsdp1")
)
HOSTED = {**ZERO2, "parallel.offload_optimizer": "cpu"}
HALF = {"bf16_master_weights_and_grads": True}
SHORT = {**HALF, "bf16_optimizer_states": True}
LOOSE = {"train.max_grad_norm": 0.0}


def codes(field: str, given: dict[str, Any], patch: dict[str, Any]) -> set[str]:
    spec = edit(RunSpec(), {**patch, field: json.dumps(given)})
    return {f.code for f in check(spec, EQUIPPED_TWO, KNOWN)}


def zero(**given: Any) -> dict[str, Any]:
    return {"zero_optimization": given}


@pytest.mark.parametrize(
    ("code", "given", "patch", "raised"),
    [
        ("STR040", zero(offload_optimizer={"device": "cpu", "ratio": 0.5}), HOSTED, True),
        ("STR040", zero(offload_optimizer={"device": "cpu", "ratio": 1.0}), HOSTED, False),
        ("STR040", zero(offload_optimizer={"device": "cpu", "ratio": 0.5}), {**HOSTED, **ZERO3}, False),
        ("STR040", {"gradient_allreduce_op": "SUM"}, ZERO3, True),
        ("STR040", {"gradient_allreduce_op": "sum"}, ZERO2, False),
        ("STR040", zero(compute_grad_norm=False), ZERO2, True),
        ("STR040", zero(compute_grad_norm=False), {**ZERO2, **LOOSE}, False),
        ("STR040", zero(compute_grad_norm=False), {**ZERO3, **LOOSE}, True),
        ("STR040", zero(compute_grad_norm=False), {**HOSTED, **LOOSE}, True),
        ("STR040", {"bf16": HALF}, ZERO2, True),
        ("STR040", {"bf16": HALF}, HOSTED, False),
        ("STR040", {"bf16": SHORT}, ZERO2, False),
        ("STR040", {"bf16": SHORT}, HOSTED, True),
        ("STR040", {"bf16": SHORT}, ZERO0, True),
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
    ],
)
def test_keys_of_the_engine(code: str, given: dict[str, Any], patch: dict[str, Any], raised: bool) -> None:
    assert (code in codes("parallel.engine_keys", given, patch)) == raised
