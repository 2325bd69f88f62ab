"""Importing DeepSpeed and accelerate configurations: values become options, the rest becomes extra config."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from backend import importers
from backend.config import RunSpec, merge
from backend.config.options import SpecError, changes, edit, get
from backend.engines import engine_of
from backend.launch import accelerate_config
from backend.machine import Machine
from backend.resolve import resolve

OFFLOADED = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 8,
    "gradient_clipping": 0.5,
    "zero_allow_untested_optimizer": True,
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "pin_memory": False, "buffer_count": 6},
        "offload_param": {"device": "cpu", "pin_memory": False},
    },
    "aio": {"block_size": 262144, "queue_depth": 32},
    "wall_clock_breakdown": False,
}


def import_config(text: str, spec: RunSpec) -> tuple[RunSpec, list[str]]:
    """(the spec, the dotted keys that became extra config)"""
    found = importers.import_file(text, spec, Path())
    return found.spec, list(found.kept)


def test_deepspeed_config_round_trip() -> None:
    spec, remaining = import_config(json.dumps(OFFLOADED), RunSpec())
    options_set = changes(spec)
    assert options_set["parallel.strategy"] == "zero3"
    assert (options_set["parallel.offload_optimizer"], options_set["parallel.offload_param"]) == ("nvme", "cpu")
    assert (options_set["parallel.nvme_path"], options_set["parallel.nvme_buffer_count"]) == ("/nvme", 6)
    assert (
        options_set["train.per_device_train_batch_size"],
        options_set["train.gradient_accumulation_steps"],
        options_set["train.max_grad_norm"],
    ) == (2, 8, 0.5)
    assert (options_set["precision.compute"], options_set["parallel.pin_memory"]) == ("bf16", False)
    assert (options_set["parallel.aio_block_size_kb"], options_set["parallel.aio_queue_depth"]) == (256, 32)
    assert set(remaining) == {
        "fp16.loss_scale",
        "fp16.initial_scale_power",
        "zero_optimization.sub_group_size",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.stage3_param_persistence_threshold",
        "wall_clock_breakdown",
    }
    assert (
        merge.additions(importers.parse_numbers(OFFLOADED), engine_of(spec.parallel.strategy).configuration(spec)) == {}
    )


FOOTPLATE_CONFIG = {
    "zero_optimization": {"stage": 2},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 3e-5, "betas": [0.8, 0.99], "eps": "auto", "weight_decay": 0.1, "torch_adam": True},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 20, "total_num_steps": 500},
    },
}


def test_deepspeed_optimizer_and_scheduler_become_options() -> None:
    """As extra config they would replace the options, which a rule reports as an error."""
    spec, remaining = import_config(json.dumps(FOOTPLATE_CONFIG), RunSpec())
    train = spec.train
    assert (remaining, spec.parallel.extra_config) == ([], "")
    assert (train.optim, train.learning_rate, train.weight_decay) == ("adamw_torch", 3e-5, 0.1)
    assert (train.adam_beta1, train.adam_beta2, train.adam_epsilon) == (0.8, 0.99, 1e-8)
    assert (train.lr_scheduler_type, train.warmup_steps, train.duration, train.max_steps) == (
        "linear",
        20,
        "steps",
        500,
    )


@pytest.mark.parametrize(
    ("kind", "params", "expected"),
    [
        ("WarmupLR", {"warmup_max_lr": 3e-5, "warmup_num_steps": 20}, (3e-5, 20)),
        ("WarmupLR", {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}, (1e-4, RunSpec().train.warmup_steps)),
        ("WarmupLR", {}, (1e-4, 1000)),
        ("WarmupDecayLR", {"total_num_steps": 5000}, (1e-3, 1000)),
    ],
)
def test_deepspeeds_schedule_sets_the_learning_rate(kind: str, params: dict[str, Any], expected: Any) -> None:
    """Not the optimizer, and parameters that are left out have DeepSpeed's values."""
    blocks = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
    blocks["scheduler"] = {"type": kind, "params": {"warmup_type": "linear", **params}}
    found = importers.import_file(json.dumps({"zero_optimization": {"stage": 2}, **blocks}), RunSpec(), Path())
    assert (found.spec.train.learning_rate, found.spec.train.warmup_steps) == expected
    assert [text.partition(":")[0] for text in found.different] == ["optimizer.params.lr"] * (expected[0] != 1e-4)


@pytest.mark.parametrize(("params", "named"), [({}, True), ({"warmup_type": "linear"}, False)])
def test_the_shape_of_deepspeeds_warmup_is_named(params: dict[str, Any], named: bool) -> None:
    """Without warmup_type it is logarithmic."""
    table = {"zero_optimization": {"stage": 2}, "scheduler": {"type": "WarmupLR", "params": params}}
    found = importers.import_file(json.dumps(table), RunSpec(), Path())
    assert found.spec.train.lr_scheduler_type == "constant_with_warmup" and not found.kept
    assert [text.partition(":")[0] for text in found.different] == ["scheduler.params.warmup_type"] * named


@pytest.mark.parametrize(
    ("block", "kept"),
    [
        ({"optimizer": {"type": "Lion", "params": {"lr": 1e-4}}}, ["optimizer.type", "optimizer.params.lr"]),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, None),
        ({"scheduler": {"type": "OneCycle", "params": {}}}, ["scheduler.type", "scheduler.params"]),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "log"}}}, None),
        ({"optimizer": {"type": "AdamW", "param": {"lr": 1e-4}}}, None),
    ],
)
def test_blocks_without_an_equivalent_option_become_extra_config(block: dict[str, Any], kept: list[str] | None) -> None:
    spec, options_set = import_config(json.dumps({"zero_optimization": {"stage": 2}, **block}), RunSpec())
    assert merge.parse(spec.parallel.extra_config) == block
    assert options_set == (kept if kept is not None else merge.paths(block))
    assert spec.train.learning_rate == (1e-4 if "Lion" in str(block) else RunSpec().train.learning_rate)


@pytest.mark.parametrize(
    ("said", "size", "accumulation", "kept"),
    [
        ({"train_micro_batch_size_per_gpu": 4}, 4, 8, []),
        ({"gradient_accumulation_steps": 16}, 2, 16, []),
        ({"train_micro_batch_size_per_gpu": 3}, 3, 1, ["train_batch_size"]),
        ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}, 4, 2, ["train_batch_size"]),
    ],
)
def test_global_batch_size_is_kept(said: dict[str, Any], size: int, accumulation: int, kept: list[str]) -> None:
    """64 on two processes. If the options cannot give 64, the key is kept and a rule reports the mismatch."""
    spec, options_set = import_config(json.dumps({"train_batch_size": 64, **said}), RunSpec())
    assert (spec.train.per_device_train_batch_size, spec.train.gradient_accumulation_steps, options_set) == (
        size,
        accumulation,
        kept,
    )


def test_a_second_import_keeps_what_the_first_set() -> None:
    spec, _ = import_config(json.dumps(OFFLOADED), RunSpec())
    again, remaining = import_config(json.dumps({"zero_optimization": {"stage": 2}}), spec)
    assert (again.parallel.strategy, again.train.gradient_accumulation_steps, remaining) == ("zero2", 8, [])
    assert again.parallel.extra_config == ""


ACCELERATE: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": True,
    "distributed_type": "FSDP",
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": False,
        "fsdp_offload_params": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer,LlamaMLP",
        "fsdp_activation_checkpointing": True,
        "fsdp_cpu_ram_efficient_loading": True,
    },
    "machine_rank": 1,
    "main_process_ip": "10.0.0.1",
    "main_process_port": 29501,
    "mixed_precision": "bf16",
    "num_machines": 2,
    "num_processes": 16,
    "tpu_env": [],
}


def test_accelerate_config_becomes_options() -> None:
    spec, remaining = import_config(yaml.safe_dump(ACCELERATE), RunSpec())
    options_set = changes(spec)
    assert (options_set["parallel.strategy"], options_set["launch.launcher"]) == ("fsdp2", "accelerate")
    assert (options_set.get("launch.nnodes", spec.launch.nnodes), spec.launch.nproc_per_node) == (2, 8)
    assert (options_set["launch.master_addr"], options_set["launch.master_port"], options_set["launch.node_rank"]) == (
        "10.0.0.1",
        29501,
        1,
    )
    assert options_set["parallel.transformer_layer_cls_to_wrap"] == ("LlamaDecoderLayer", "LlamaMLP")
    assert options_set["parallel.cpu_offload"] and options_set["train.activation_checkpointing"]
    assert not spec.parallel.reshard_after_forward
    assert (spec.parallel.state_dict_type, spec.precision.compute) == ("sharded", "bf16")
    assert set(remaining) == {"debug"}  # an empty tpu_env changes nothing
    assert yaml.safe_load(accelerate_config.text(spec, resolve(spec, Machine())))["debug"] is True


def test_how_other_launchers_start_nodes_is_left_out() -> None:
    """accelerate config writes rdzv_backend c10d, or pdsh and a hostfile, which would be errors of the run."""
    for backend, named in (("c10d", ["rdzv_backend: c10d"]), ("static", [])):
        found = accelerate_file(**{**ACCELERATE, "debug": None, "rdzv_backend": backend})
        assert not found.kept and [text.rpartition(":")[0] for text in found.different] == named
    over_ssh = {"multinode_launcher": "pdsh", "hostfile": "/job/hostfile", "inclusion_filter": "worker-0:0,1"}
    given = {f"deepspeed_{key}": value for key, value in over_ssh.items()}
    nodes = {"num_machines": 2, "num_processes": 16, "main_process_ip": "a"}
    found = accelerate_file(distributed_type="DEEPSPEED", deepspeed_config={**given, "zero_stage": 2}, **nodes)
    named = [f"deepspeed_config.{key}: {value}" for key, value in given.items()]
    assert not found.kept and [text.rpartition(":")[0] for text in found.different] == named
    mpi = {"mpirun_hostfile": "/root/hostfile", "mpirun_ccl": "1"}  # accelerate would start mpirun
    found = accelerate_file(distributed_type="MULTI_CPU", use_cpu=True, mpirun_config=mpi, **nodes)
    assert not found.kept and found.different[0].startswith("mpirun_config.mpirun_hostfile: /root/hostfile: in Foot")


def test_cpu_ram_efficient_loading_can_be_disabled() -> None:
    """Both fsdp.json, which the Trainer reads, and accelerate.yaml disable it."""
    config = {**ACCELERATE, "fsdp_config": {"fsdp_version": 2, "fsdp_cpu_ram_efficient_loading": False}}
    spec, remaining = import_config(yaml.safe_dump(config), RunSpec())
    assert "fsdp_config.fsdp_cpu_ram_efficient_loading" not in remaining
    assert json.loads(engine_of(spec.parallel.strategy).config_text(spec))["cpu_ram_efficient_loading"] is False
    fsdp_config = yaml.safe_load(accelerate_config.text(spec, resolve(spec, Machine())))["fsdp_config"]
    assert fsdp_config["fsdp_cpu_ram_efficient_loading"] is False


@pytest.mark.parametrize(
    ("theirs", "part"),
    [
        ({"zero_optimization": {"stage": 7}}, "stage must be"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "tape"}}}, "none, cpu or nvme"),
        ({"distributed_type": "TPU"}, "is not supported"),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json"}},
            "import that file",
        ),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 0}, "at least 1"),
        ({"zero_optimization": True}, "zero_optimization must contain keys and values, not True"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": "cpu"}},
            "zero_optimization.offload_optimizer must contain keys and values, not 'cpu'",
        ),
        (
            {"zero_optimization": {"stage": 2}, "optimizer": "AdamW"},
            "optimizer must contain keys and values, not 'AdamW'",
        ),
        ({"distributed_type": "FSDP", "fsdp_config": "foo"}, "fsdp_config must contain keys and values, not 'foo'"),
        ({"distributed_type": "NO", "num_processes": "all"}, "num_processes must be a positive integer, not 'all'"),
    ],
)
def test_unsupported_values_are_reported(theirs: dict[str, Any], part: str) -> None:
    with pytest.raises(SpecError, match=part):
        import_config(json.dumps(theirs), RunSpec())


ACCELERATE_DEEPSPEED = {
    "distributed_type": "DEEPSPEED",
    "deepspeed_config": {"zero_stage": 3, "offload_optimizer_device": "cpu", "gradient_accumulation_steps": 2},
    "num_processes": 2,
}


@pytest.mark.parametrize("theirs", [OFFLOADED, FOOTPLATE_CONFIG, ACCELERATE, ACCELERATE_DEEPSPEED])
def test_a_value_of_any_type_is_read_or_reported(theirs: dict[str, Any]) -> None:
    for value in (True, "x", -1, float("inf"), [[]], {"a": 1}):
        for path in merge.paths(theirs) + [key for key, inner in theirs.items() if isinstance(inner, dict)]:
            changed = json.loads(json.dumps(theirs))
            *above, key = path.split(".")
            table = changed
            for name in above:
                table = table[name]
            table[key] = value
            with suppress(SpecError):
                import_config(json.dumps(changed), RunSpec())


def test_a_spec_is_not_detected_as_another_format() -> None:
    assert importers.detect_format("model:\n  builtin: tiny-llama\n") == ""
    assert importers.detect_format(": :") == ""
    assert importers.detect_format(json.dumps(OFFLOADED)) == "deepspeed"


TABBED = (
    '{\n\t"zero_optimization": {\n   \t"stage": 3,\n\t\t"overlap_comm": true\n\t},\n\t"train_batch_size": "auto"\n}\n'
)


@pytest.mark.parametrize(
    "text",
    [
        TABBED,
        "\ufeff" + TABBED,
        TABBED.replace("\n", "\r\n"),
        TABBED.replace("\n", " "),
        "\n\n" + TABBED,
        TABBED.strip(),
    ],
)
def test_json_is_read_however_it_is_indented(text: str) -> None:
    assert importers.detect_format(text) == "deepspeed"
    assert import_config(text, RunSpec())[0].parallel.strategy == "zero3"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{\n\t"train_batch_size": 8,\n}', "line 2, column 23: there must be no comma before }"),
        ('{\n\t"train_batch_size": 8\n\t"steps_per_print": 1\n}', "line 2, column 23: a comma is missing"),
        ('{\r\n\t"train_batch_size": 8\r\n\t"fp16": {}\r\n}', "line 2, column 23: a comma is missing"),
        ('{\n\t"train_batch_size": 8, // per step\n\t"fp16": {}}', "line 2, column 25: JSON has no comments"),
        ('{\n\t"train_batch_size": 8, /* x */ "fp16": {}}', "line 2, column 25: JSON has no comments"),
        ('{\n\t"fp16": {"enabled": True}\n}', "line 2, column 22: True is written true"),
        ("{\n\t'fp16': {}\n}", "line 2, column 2: text needs double quotes"),
        ('{\n\t"fp16 : {},\n\t"a": 1}', "line 2, column 13: text must end on the line where it begins"),
        ('{\n\t"fp16" {}}', "line 2, column 8: a colon is missing"),
        ('{\n\t"a": [1, 2,\n]}', "line 2, column 12: there must be no comma before ]"),
        ('{\n\t"train_batch_size": 8', "the text ends before"),
        ('// for two GPUs\n{"train_batch_size": 8}', "line 1, column 1: JSON has no comments"),
        ('{"train_batch_size": 8, "train_batch_size": 9}', 'the key "train_batch_size" occurs twice'),
    ],
)
def test_a_mistake_in_json_is_named_where_it_is(text: str, problem: str) -> None:
    found = importers.invalid_text(text)
    assert problem in found and found.startswith("invalid JSON: ")
    with pytest.raises(ValueError, match=re.escape(problem)):
        merge.parse(text)


def fsdp_file(**settings: Any) -> str:
    return yaml.safe_dump({"distributed_type": "FSDP", "num_processes": 4, "fsdp_config": settings})


@pytest.mark.parametrize(
    ("number", "strategy"),
    [(1, "full_shard"), (2, "shard_grad_op"), (3, "no_shard"), (4, "hybrid_shard"), (5, "hybrid_shard")],
)
def test_numbers_of_sharding_strategies(number: int, strategy: str) -> None:
    for value in (number, str(number)):
        found = importers.import_file(fsdp_file(fsdp_sharding_strategy=value), RunSpec(), Path())
        assert (found.spec.parallel.strategy, found.spec.parallel.sharding_strategy) == ("fsdp1", strategy)
        assert bool(found.different) == (number == 5)


@pytest.mark.parametrize("value", [0, 6, "SHARD_EVERYTHING", True])
def test_an_unknown_sharding_strategy_is_refused(value: Any) -> None:
    with pytest.raises(SpecError, match=r"FULL_SHARD \(1\)"):
        import_config(fsdp_file(fsdp_sharding_strategy=value), RunSpec())


def test_keys_without_prefix_are_those_with_it() -> None:
    settings = {
        "sharding_strategy": "SHARD_GRAD_OP", "backward_prefetch": 1, "activation_checkpointing": "true",
        "offload_params": "yes", "transformer_layer_cls_to_wrap": "LlamaDecoderLayer", "state_dict_type": 3,
        "use_orig_params": True,
    }  # fmt: skip
    bare = importers.import_file(fsdp_file(**settings), RunSpec(), Path())
    prefixed = importers.import_file(fsdp_file(**{f"fsdp_{k}": v for k, v in settings.items()}), RunSpec(), Path())
    assert bare == prefixed
    parallel = bare.spec.parallel
    assert (parallel.sharding_strategy, parallel.cpu_offload, parallel.state_dict_type) == (
        "shard_grad_op",
        True,
        "sharded",
    )
    assert bare.spec.train.activation_checkpointing
    assert set(bare.kept) == {"fsdp_config.fsdp_backward_prefetch", "fsdp_config.fsdp_use_orig_params"}
    config = yaml.safe_load(accelerate_config.text(bare.spec, resolve(bare.spec, Machine())))["fsdp_config"]
    assert all(key.startswith("fsdp_") for key in config)
    assert config["fsdp_backward_prefetch"] == "BACKWARD_PRE"


def test_extra_config_replaces_the_generated_key_in_either_spelling() -> None:
    """The launcher and the Trainer read both spellings, and one of the two would win by chance."""
    spec = edit(
        RunSpec(),
        {
            "parallel.strategy": "fsdp2",
            "launch.launcher": "accelerate",
            "launch.extra_accelerate_config": '{"fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}',
            "parallel.extra_config": '{"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}',
        },
    )
    config = yaml.safe_load(accelerate_config.text(spec, resolve(spec, Machine())))["fsdp_config"]
    assert (config["fsdp_state_dict_type"], "state_dict_type" in config) == ("SHARDED_STATE_DICT", False)
    settings = engine_of("fsdp2").configuration(spec)
    assert (settings["auto_wrap_policy"], "fsdp_auto_wrap_policy" in settings) == ("SIZE_BASED_WRAP", False)


NESTED: dict[str, Any] = {
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "sub_group_size": 1e8},
    "bf16": {"enabled": True},
    "gradient_accumulation_steps": 4,
    "train_micro_batch_size_per_gpu": 16,
}


def nested_file(**more: Any) -> str:
    return yaml.safe_dump({"distributed_type": "DEEPSPEED", "num_processes": 4, "deepspeed_config": {**NESTED, **more}})


def test_deepspeeds_own_keys_in_an_accelerate_file() -> None:
    found = importers.import_file(nested_file(), RunSpec(), Path())
    parallel, train = found.spec.parallel, found.spec.train
    assert (parallel.strategy, parallel.offload_optimizer, found.spec.launch.nproc_per_node) == ("zero3", "cpu", 4)
    assert (train.per_device_train_batch_size, train.gradient_accumulation_steps) == (16, 4)
    assert found.kept == ["deepspeed_config.zero_optimization.sub_group_size"]
    assert "zero_optimization" in found.different[0] and "ZeRO-2, and ZeRO-3 is imported" in found.different[1]
    assert found.spec.launch.extra_accelerate_config == ""


def test_the_stage_that_accelerate_uses_wins_over_a_nested_one() -> None:
    found = importers.import_file(nested_file(zero_stage=2, deepspeed_multinode_launcher="standard"), RunSpec(), Path())
    assert found.spec.parallel.strategy == "zero2"
    assert "zero_stage: 2" in found.different[1]
    assert len(importers.import_file(nested_file(zero_stage=3), RunSpec(), Path()).different) == 1


@pytest.mark.parametrize(
    ("text", "options_set"),
    [
        ("distributed_type: NO\nmixed_precision: no\nnum_processes: 1\nuse_cpu: yes\n", {"launch.device": "cpu"}),
        ("distributed_type: NO\nmixed_precision: 'no'\nuse_cpu: 'yes'\n", {"launch.device": "cpu"}),
        ("distributed_type: MULTI_GPU\nmixed_precision: BF16\ndowncast_bf16: no\n", {"precision.compute": "bf16"}),
        ("distributed_type: 'No'\nfp16: true\n", {"precision.compute": "fp16"}),
        ("distributed_type: MULTI_GPU\ndynamo_backend: NO\n", {"parallel.strategy": "ddp"}),
        ("distributed_type: fsdp\nfsdp_config: {fsdp_version: '2', fsdp_reshard_after_forward: off}\n",
         {"parallel.strategy": "fsdp2", "parallel.reshard_after_forward": False}),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_reshard_after_forward: no}\n",
         {"parallel.sharding_strategy": "shard_grad_op"}),
        ("distributed_type: FSDP\nfsdp_config: {version: 2, sharding_strategy: SHARD_GRAD_OP, offload_params: on}\n",
         {"parallel.reshard_after_forward": False, "parallel.cpu_offload": True}),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_backward_prefetch_policy: NO_PREFETCH}\n", {}),
    ],
)  # fmt: skip
def test_words_that_yaml_reads_as_booleans(text: str, options_set: dict[str, Any]) -> None:
    found = importers.import_file(text, RunSpec(), Path())
    assert {key: get(found.spec, key) for key in options_set} == options_set
    config = yaml.safe_load(accelerate_config.text(found.spec, resolve(found.spec, Machine())))
    assert {"fp16", "dynamo_backend"}.isdisjoint(config)
    assert config["distributed_type"] in ("NO", "MULTI_GPU", "FSDP")
    assert all(value is not False for key, value in config.items() if key in ("mixed_precision", "downcast_bf16"))


@pytest.mark.parametrize(
    ("zero", "options_set"),
    [
        ({"stage": 2, "cpu_offload": True}, {"parallel.offload_optimizer": "cpu"}),
        ({"stage": 3, "cpu_offload": "true"}, {"parallel.offload_optimizer": "cpu"}),
        ({"stage": 3, "cpu_offload_param": True, "cpu_offload": False}, {"parallel.offload_param": "cpu"}),
        ({"stage": 2, "cpu_offload": True, "cpu_offload_use_pin_memory": False}, {"parallel.pin_memory": False}),
        ({"stage": 3, "stage3_gather_fp16_weights_on_model_save": True}, {}),
        ({"stage": 3, "gather_16bit_weights_on_model_save": True}, {}),
    ],
)
def test_former_keys_of_deepspeed_become_options(zero: dict[str, Any], options_set: dict[str, Any]) -> None:
    spec, kept = import_config(json.dumps({"bfloat16": {"enabled": True}, "zero_optimization": zero}), RunSpec())
    assert {key: get(spec, key) for key in options_set} == options_set
    assert (spec.precision.compute, kept) == (
        "bf16",
        ["zero_optimization.cpu_offload_params"] if "cpu_offload_params" in zero else [],
    )


def test_a_file_without_bf16_and_fp16_computes_in_fp32() -> None:
    spec, _ = import_config('{"bf16": {"enabled": false}, "zero_optimization": {"stage": 2}}', RunSpec())
    assert spec.precision.compute == "fp32"
    spec, _ = import_config('{"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}}', RunSpec())
    assert spec.precision.compute == RunSpec().precision.compute


def accelerate_file(**table: Any) -> importers.Imported:
    return importers.import_file(yaml.safe_dump({"num_processes": 4, **table}), RunSpec(), Path())


def test_keys_of_accelerate_and_deepspeed_in_one_section() -> None:
    settings = {"zero_stage": 3, "offload_optimizer_device": "cpu", "seq_parallel_communication_data_type": "bf16"}
    found = accelerate_file(distributed_type="DEEPSPEED", deepspeed_config={**settings, "gradient_clipping": 0.5})
    assert (found.spec.parallel.strategy, found.spec.parallel.offload_optimizer) == ("zero3", "cpu")
    assert found.spec.train.max_grad_norm == 0.5
    assert found.kept == ["deepspeed_config.seq_parallel_communication_data_type"]
    assert merge.parse(found.spec.parallel.extra_config) == {"seq_parallel_communication_data_type": "bf16"}
    assert len(found.different) == 1


@pytest.mark.parametrize(
    ("sizes", "kind", "expected"),
    [
        ({"dp_replicate_size": 2, "dp_shard_size": 2, "tp_size": 1, "cp_size": 1}, "FSDP",
         {"parallel.strategy": "fsdp2", "parallel.replicate_size": 2}),
        ({"cp_size": 2, "cp_comm_strategy": "alltoall"}, "FSDP", {"parallel.context_parallel_size": 2}),
        ({"tp_size": 4}, "FSDP", {"parallel.strategy": "tensor", "parallel.tensor_parallel_size": 4}),
        ({"sp_size": 4, "sp_backend": "deepspeed"}, "DEEPSPEED", {"parallel.sequence_parallel_size": 4}),
    ],
)  # fmt: skip
def test_the_device_mesh_of_accelerate(sizes: dict[str, Any], kind: str, expected: dict[str, Any]) -> None:
    section = {f"parallelism_config_{key}": value for key, value in sizes.items()}
    engines: dict[str, Any] = {
        "FSDP": {"fsdp_config": {"version": 2}},
        "DEEPSPEED": {"deepspeed_config": {"zero_stage": 3}},
    }
    found = accelerate_file(distributed_type=kind, parallelism_config=section, **engines[kind])
    assert {key: get(found.spec, key) for key in expected} == expected
    assert "parallelism_config" not in found.spec.launch.extra_accelerate_config
    strings = sum(isinstance(value, str) for value in sizes.values())
    assert len(found.different) == strings + ("tp_size" in sizes and sizes["tp_size"] > 1)
    assert ("fsdp_config" in found.spec.launch.extra_accelerate_config) is False


def test_one_process_without_distributed_training() -> None:
    found = accelerate_file(distributed_type="NO", main_process_ip=None, debug=False)
    assert (found.spec.parallel.strategy, found.spec.launch.extra_accelerate_config) == ("single", "")
    assert "num_processes: 4" in found.different[0]


def test_auto_does_not_replace_a_value_that_nobody_fills_in() -> None:
    """DeepSpeed would take its default, false, and the final ZeRO-3 model could not be saved."""
    zero: dict[str, Any] = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": "auto", "overlap_comm": "auto"}
    text = json.dumps(
        {"zero_optimization": {**zero, "reduce_bucket_size": "auto", "offload_param": {"device": "auto"}}}
    )
    spec, kept = import_config(text, RunSpec())
    assert (kept, spec.parallel.offload_param) == (["zero_optimization.reduce_bucket_size"], "none")
    spec = edit(spec, {"parallel.extra_config": text})
    assert (
        engine_of("zero3").configuration(spec)["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] is True
    )


def test_null_means_unset() -> None:
    zero = {"stage": 2, "offload_optimizer": None, "overlap_comm": None, "cpu_offload": None}
    spec, kept = import_config(json.dumps({"zero_optimization": zero, "optimizer": None, "fp16": None}), RunSpec())
    assert (spec.parallel.strategy, spec.parallel.offload_optimizer, kept) == ("zero2", "none", [])
    settings = {"deepspeed_config_file": "none", "zero_stage": 1, "gradient_clipping": None}
    found = accelerate_file(distributed_type="DEEPSPEED", deepspeed_config=settings)
    assert (found.spec.parallel.strategy, found.different) == ("zero1", [])


def test_keys_of_zero_next_to_those_of_accelerate() -> None:
    settings = {
        "zero_stage": 3,
        "overlap_comm": True,
        "allgather_bucket_size": 5,
        "cpu_offload": True,
        "zero_stages": 2,
    }
    found = accelerate_file(distributed_type="DEEPSPEED", deepspeed_config=settings)
    assert (found.spec.parallel.strategy, found.spec.parallel.offload_optimizer) == ("zero3", "cpu")
    assert merge.parse(found.spec.parallel.extra_config) == {"zero_optimization": {"allgather_bucket_size": 5}}
    assert "(allgather_bucket_size, cpu_offload, overlap_comm)" in found.different[0]
    assert merge.parse(found.spec.launch.extra_accelerate_config) == {"deepspeed_config": {"zero_stages": 2}}


def test_switches_can_be_numbers() -> None:
    table = {"fsdp_version": 2, "fsdp_activation_checkpointing": 1, "fsdp_offload_params": "1"}
    spec = accelerate_file(distributed_type="FSDP", fsdp_config=table).spec
    assert (spec.train.activation_checkpointing, spec.parallel.cpu_offload) == (True, True)
    spec = accelerate_file(distributed_type="FSDP", fsdp_config={"fsdp_reshard_after_forward": 2}).spec
    assert spec.parallel.sharding_strategy == "shard_grad_op"


def test_two_values_of_one_fsdp_key_are_named() -> None:
    table = {"sharding_strategy": "FULL_SHARD", "fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_offload_params": True}
    found = accelerate_file(distributed_type="FSDP", fsdp_config=table)
    assert found.spec.parallel.sharding_strategy == "shard_grad_op"
    expected = "fsdp_config has sharding_strategy: FULL_SHARD and fsdp_sharding_strategy: SHARD_GRAD_OP"
    assert [text.split(";")[0] for text in found.different] == [expected]


def test_the_files_of_accelerate_config_need_no_extra_config() -> None:
    """Keys that `accelerate config` writes into each file, and FSDP settings in any case."""
    usual = {
        "distributed_type": "MULTI_GPU",
        "rdzv_backend": "static",
        "tpu_env": [],
        "tpu_use_cluster": False,
        "tpu_use_sudo": False,
    }
    assert accelerate_file(**usual).spec.launch.extra_accelerate_config == ""
    assert accelerate_file(distributed_type="MULTI_GPU", tpu_use_cluster=True).spec.launch.extra_accelerate_config != ""
    settings = {"fsdp_auto_wrap_policy": "transformer_based_wrap", "fsdp_state_dict_type": 2}
    found = accelerate_file(distributed_type="FSDP", fsdp_config=settings)
    assert (found.spec.launch.extra_accelerate_config, found.spec.parallel.state_dict_type) == ("", "sharded")
    assert "fsdp_state_dict_type: LOCAL_STATE_DICT: checkpoints are sharded here" in found.different


def test_sharded_final_weights_are_named() -> None:
    table = {"zero_stage": 3, "zero3_save_16bit_model": False}
    assert any(
        "Footplate gathers the weights" in text
        for text in accelerate_file(distributed_type="DEEPSPEED", deepspeed_config=table).different
    )
    table = {"zero_stage": 2, "zero3_save_16bit_model": False}
    assert not any(
        "Footplate gathers the weights" in text
        for text in accelerate_file(distributed_type="DEEPSPEED", deepspeed_config=table).different
    )


@pytest.mark.parametrize(("strategy", "imported"), [("single", "zero2"), ("zero3", "zero3")])
def test_the_stage_auto(strategy: str, imported: str) -> None:
    """accelerate 1.15's DeepSpeedPlugin fills in 2; DeepSpeed itself would not shard."""
    spec = edit(RunSpec(), {"parallel.strategy": strategy})
    found = importers.import_file('{"zero_optimization": {"stage": "auto"}}', spec, Path())
    assert found.spec.parallel.strategy == imported
    assert [text.split(":")[0] for text in found.different] == ["zero_optimization.stage"]


def test_two_precisions_at_once_are_refused() -> None:
    with pytest.raises(SpecError, match=r"bf16\.enabled and fp16\.enabled are both true"):
        import_config(
            '{"bf16": {"enabled": true}, "fp16": {"enabled": true}, "zero_optimization": {"stage": 1}}', RunSpec()
        )


@pytest.mark.parametrize(("sharding", "is_named"), [("HYBRID_SHARD", True), ("SHARD_GRAD_OP", False)])
def test_a_sharding_strategy_that_fsdp2_ignores_is_named(sharding: str, is_named: bool) -> None:
    settings = {"fsdp_version": 2, "fsdp_reshard_after_forward": "false", "fsdp_sharding_strategy": sharding}
    found = accelerate_file(distributed_type="FSDP", fsdp_config=settings)
    assert [text.split(":")[0] for text in found.different] == ["fsdp_sharding_strategy"] * is_named
    assert "reshard" not in found.spec.launch.extra_accelerate_config and not found.spec.parallel.reshard_after_forward
