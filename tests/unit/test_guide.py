"""Launch plans compared with a widely used guide, "Distributed Training with LLaMA-Factory": its commands and files.

Each case has the guide's flags or keys, and the options that request the same. Every difference is listed with its
reason, and every listed difference must exist.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import yaml

from backend.config import RunSpec
from backend.config.options import edit, get
from backend.launch.plan import plan
from backend.machine import GIB, Gpu, Machine
from backend.runs import Plan

EIGHT_H100 = Machine("cuda", tuple(Gpu(i, "H100", 80 * GIB, 80 * GIB, (9, 0)) for i in range(8)), cores=64)


@dataclass(frozen=True)
class GuideCase:
    """`expected` is what the guide has; `differences` names what Footplate does differently, and why."""

    patch: Mapping[str, Any]
    expected: Mapping[str, Any]
    differences: Mapping[str, str] = field(default_factory=dict)
    node: str = ""


def plan_case(case: GuideCase) -> Plan:
    return plan(edit(RunSpec(), case.patch), EIGHT_H100)


def assert_matches(case: GuideCase, actual: Mapping[str, Any]) -> None:
    """Everything found is expected or a listed difference, and every listed difference exists."""
    names = case.expected.keys() | actual.keys()
    differ = {name for name in names if case.expected.get(name, "absent") != actual.get(name, "absent")}
    assert differ == set(case.differences), {name: (case.expected.get(name), actual.get(name)) for name in differ}


def flags(plan_: Plan, node: str) -> dict[str, str]:
    """The launcher, its flags (with underscores: launchers accept both spellings), and the program."""
    argv = list(plan_.other_nodes[node] if node else plan_.argv)
    start = argv.index("-m") + 1
    actual = {"launcher": argv[start]}
    while argv[start := start + 1].startswith("-") and argv[start] not in ("-m", "--module"):
        name, _, value = argv[start].lstrip("-").partition("=")
        actual[name.replace("-", "_")] = value
    return {**actual, "program": " ".join(argv[start:])}


# --- Commands ---

DDP = {"parallel.strategy": "ddp", "launch.nproc_per_node": 8}
TWO_NODES = {**DDP, "launch.rendezvous": "static", "launch.master_addr": "192.168.0.1", "launch.master_port": 29500}
LAUNCHER_DIFFERENCES = {
    "launcher": "the launcher's module, started with the Python environment that was checked",
    "program": "Footplate's trainer, which reads its options from spec.yaml",
}
LOG_FLAGS = {"log_dir": "the output of each rank is saved", "tee": "and copied to the run's log"}
IN_FILE = (
    "the processes of one node meet in a file that only this user can read, not in a TCP store that is open to all"
)
FILE_RENDEZVOUS = dict.fromkeys(("rdzv_backend", "rdzv_conf"), IN_FILE)
DEEPSPEED_FLAGS = {
    "no_local_rank": "the trainer reads it from the environment",
    "log_level": "fewer log lines from the launcher",
}
ACCELERATE_DIFFERENCES = {**LAUNCHER_DIFFERENCES, **LOG_FLAGS}
COMMANDS = {
    "torchrun on one node": GuideCase(
        DDP,
        {"launcher": "torchrun", "standalone": "", "nnodes": "1", "nproc_per_node": "8", "program": "src/train.py"},
        {
            **LAUNCHER_DIFFERENCES,
            **LOG_FLAGS,
            **FILE_RENDEZVOUS,
            **dict.fromkeys(("standalone", "rdzv_id", "rdzv_endpoint", "local_addr"), IN_FILE),
            "nnodes": "one node is the default",
        },
    ),
    **{
        f"torchrun, node {rank} of two": GuideCase(
            TWO_NODES,
            {
                "launcher": "torchrun",
                "master_port": "29500",
                "nproc_per_node": "8",
                "nnodes": "2",
                "node_rank": str(rank),
                "master_addr": "192.168.0.1",
                "program": "train.py",
            },
            {**LAUNCHER_DIFFERENCES, **LOG_FLAGS},
            f"node-{rank}" if rank else "",
        )
        for rank in (0, 1)
    },
    "accelerate on one node": GuideCase(
        {**DDP, "launch.launcher": "accelerate"},
        {"launcher": "accelerate launch", "config_file": "accelerate_singleNode_config.yaml", "program": "train.py"},
        {**ACCELERATE_DIFFERENCES, **FILE_RENDEZVOUS, "config_file": "the file next to the plan"},
    ),
    "accelerate, node 1 of two": GuideCase(
        {**TWO_NODES, "launch.launcher": "accelerate"},
        {"launcher": "accelerate launch", "config_file": "accelerate_multiNode_config.yaml", "program": "train.py"},
        {
            **ACCELERATE_DIFFERENCES,
            "config_file": "the file next to the plan",
            "machine_rank": "one file for all nodes",
        },
        "node-1",
    ),
    "deepspeed on GPU 1": GuideCase(
        {
            "parallel.strategy": "zero3",
            "launch.nproc_per_node": 1,
            "launch.devices": (1,),
            "launch.launcher": "deepspeed",
        },
        {"launcher": "deepspeed", "include": "localhost:1", "program": "your_program.py --deepspeed ds_config.json"},
        {
            **LAUNCHER_DIFFERENCES,
            **DEEPSPEED_FLAGS,
            "hostfile": "/dev/null: deepspeed would read an existing /job/hostfile",
        },
    ),
    "deepspeed by a hostfile": GuideCase(
        {
            **TWO_NODES,
            "parallel.strategy": "zero3",
            "launch.nproc_per_node": 4,
            "launch.launcher": "deepspeed",
            "launch.hostfile": ("worker-1 slots=4", "worker-2 slots=4"),
        },
        {"launcher": "deepspeed", "hostfile": "hostfile", "program": "your_program.py --deepspeed ds_config.json"},
        {
            **LAUNCHER_DIFFERENCES,
            **DEEPSPEED_FLAGS,
            "no_ssh": "each node is started separately: over ssh, stopping would end every run on the other hosts",
            "node_rank": "the rank of this node",
            "master_addr": "without ssh, deepspeed does not ask node 0 for it",
            "master_port": "deepspeed's default, written out",
        },
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands(name: str) -> None:
    case = COMMANDS[name]
    assert_matches(case, flags(plan_case(case), case.node))


def test_hostfile_matches_the_guide() -> None:
    plan_ = plan_case(COMMANDS["deepspeed by a hostfile"])
    assert plan_.files["hostfile"] == "worker-1 slots=4\nworker-2 slots=4\n"


# The guide passes training options in the command; Footplate writes them to spec.yaml. The option for each.
TRAINING_OPTIONS = {
    "stage": ("train.stage", "sft"),
    "model_name_or_path": ("model.hub_id", "meta-llama/Meta-Llama-3-8B-Instruct"),
    "dataset": ("data.hub_id", "alpaca_en_demo"),
    "finetuning_type": ("method.kind", "lora"),
    "per_device_train_batch_size": ("train.per_device_train_batch_size", 1),
    "gradient_accumulation_steps": ("train.gradient_accumulation_steps", 8),
    "lr_scheduler_type": ("train.lr_scheduler_type", "cosine"),
    "logging_steps": ("logging.steps", 100),
    "save_steps": ("save.steps", 500),
    "learning_rate": ("train.learning_rate", 1e-4),
    "num_train_epochs": ("train.num_train_epochs", 2.0),
    "bf16": ("precision.compute", "bf16"),
}
REQUIRED_OPTIONS = {"model.source": "hub", "data.source": "hub", "save.strategy": "steps", "train.duration": "epochs"}
NO_EQUIVALENT = {
    "do_train": "a run trains",
    "template": "the model's own chat template",
    "output_dir": "the run folder",
    "overwrite_cache": "examples are tokenized again at each start",
    "plot_loss": "the page plots it and saves an image",
}


def test_training_options_have_an_equivalent() -> None:
    assert not TRAINING_OPTIONS.keys() & NO_EQUIVALENT.keys()
    spec = edit(RunSpec(), {**DDP, **REQUIRED_OPTIONS, **dict(TRAINING_OPTIONS.values())})
    written = yaml.safe_load(plan(spec, EIGHT_H100).files["spec.yaml"])
    read = edit(RunSpec(), {f"{part}.{key}": value for part, keys in written.items() for key, value in keys.items()})
    assert {name: get(read, name) for name, _ in TRAINING_OPTIONS.values()} == dict(TRAINING_OPTIONS.values())


# --- accelerate's configuration file ---

ACCELERATE_FILE = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": True,
    "distributed_type": "MULTI_GPU",
    "downcast_bf16": "no",
    "enable_cpu_affinity": False,
    "gpu_ids": "all",
    "machine_rank": 0,
    "main_training_function": "main",
    "mixed_precision": "fp16",
    "num_machines": 1,
    "num_processes": 8,
    "rdzv_backend": "static",
    "same_network": True,
    "tpu_env": [],
    "tpu_use_cluster": False,
    "tpu_use_sudo": False,
    "use_cpu": False,
}
RENDEZVOUS = {"main_process_ip": "192.168.0.1", "main_process_port": 29500}
NO_TPU = dict.fromkeys(("tpu_env", "tpu_use_cluster", "tpu_use_sudo"), "accelerate's defaults; TPUs are not supported")
DEBUG_OFF = {"debug": "off: it compares shapes before each collective, for debugging"}
FP16_ACCELERATE = {"precision.compute": "fp16", "launch.launcher": "accelerate"}
DEEPSPEED_ACCELERATE_FILE = {
    **ACCELERATE_FILE,
    **RENDEZVOUS,
    "debug": False,
    "distributed_type": "DEEPSPEED",
    "num_machines": 2,
    "num_processes": 16,
}
DEEPSPEED_ACCELERATE_FILE |= {
    f"deepspeed_config.{key}": value
    for key, value in {
        "deepspeed_multinode_launcher": "standard",
        "gradient_accumulation_steps": 8,
        "offload_optimizer_device": "none",
        "offload_param_device": "none",
        "zero3_init_flag": False,
        "zero_stage": 3,
    }.items()
}
IN_JSON = "in deepspeed.json; accelerate refuses it in both files"
ACCELERATE_CASES = {
    "one node": GuideCase(
        {**DDP, **FP16_ACCELERATE},
        ACCELERATE_FILE,
        {
            **NO_TPU,
            **DEBUG_OFF,
            "rdzv_backend": IN_FILE,
            "main_process_port": "0 picks a free port, so that two runs do not collide",
        },
    ),
    "two nodes": GuideCase(
        {**TWO_NODES, **FP16_ACCELERATE},
        {**ACCELERATE_FILE, **RENDEZVOUS, "num_machines": 2, "num_processes": 16},
        {**NO_TPU, **DEBUG_OFF},
    ),
    "two nodes with DeepSpeed": GuideCase(
        {**TWO_NODES, **FP16_ACCELERATE, "parallel.strategy": "zero3", "train.gradient_accumulation_steps": 8},
        {key: value for key, value in DEEPSPEED_ACCELERATE_FILE.items() if key != "gpu_ids"},
        {
            **NO_TPU,
            "gpu_ids": "all GPUs in CUDA_VISIBLE_DEVICES",
            "mixed_precision": IN_JSON,
            "deepspeed_config.deepspeed_config_file": "one file for every launcher",
            "deepspeed_config.zero_stage": IN_JSON,
            "deepspeed_config.gradient_accumulation_steps": IN_JSON,
            "deepspeed_config.offload_optimizer_device": IN_JSON,
            "deepspeed_config.offload_param_device": IN_JSON,
            "deepspeed_config.zero3_init_flag": "the trainer always loads ZeRO-3 weights sharded",
        },
    ),
}


@pytest.mark.parametrize("name", ACCELERATE_CASES)
def test_accelerate_files(name: str) -> None:
    assert_matches(
        ACCELERATE_CASES[name], flat(yaml.safe_load(plan_case(ACCELERATE_CASES[name]).files["accelerate.yaml"]))
    )


def flat(tree: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    actual: dict[str, Any] = {}
    for key, value in tree.items():
        actual |= flat(value, f"{before}{key}.") if isinstance(value, dict) else {before + key: value}
    return actual


# --- DeepSpeed's configuration file ---

COMMON_KEYS = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
    "fp16.enabled": "auto",
    "fp16.loss_scale": 0,
    "fp16.loss_scale_window": 1000,
    "fp16.initial_scale_power": 16,
    "fp16.hysteresis": 2,
    "fp16.min_loss_scale": 1,
    "bf16.enabled": "auto",
}
ZERO2_KEYS = {
    "allgather_partitions": True,
    "allgather_bucket_size": 5e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 5e8,
    "contiguous_gradients": True,
    "round_robin_gradients": True,
}
ZERO3_KEYS = {
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
DEFAULT = "DeepSpeed's default is the same"
BUCKET = "parallel.bucket_cap_mb: 25 MB, as DDP's"
LOSS_SCALE_DIFFERENCES = {f"fp16.{key}": DEFAULT for key in ("loss_scale", "loss_scale_window", "initial_scale_power")}
LOSS_SCALE_DIFFERENCES |= {f"fp16.{key}": DEFAULT for key in ("hysteresis", "min_loss_scale")}
ZERO2_DIFFERENCES = {
    "allgather_partitions": DEFAULT,
    "reduce_scatter": DEFAULT,
    "allgather_bucket_size": BUCKET,
    "reduce_bucket_size": BUCKET,
    "round_robin_gradients": "off, DeepSpeed's default: it distributes copying gradients to the CPU over ranks",
}
ZERO3_DIFFERENCES = {
    **dict.fromkeys(("sub_group_size", "stage3_max_live_parameters", "stage3_max_reuse_distance"), DEFAULT),
    "reduce_bucket_size": BUCKET,
    "allgather_bucket_size": BUCKET,
    "stage3_prefetch_bucket_size": "DeepSpeed's default; auto uses 0.9 x hidden size squared",
    "stage3_param_persistence_threshold": "DeepSpeed's default; auto uses 10 x hidden size",
}
OPTIMIZER, WEIGHTS = "parallel.offload_optimizer", "parallel.offload_param"
OFFLOADS = {OPTIMIZER: "offload_optimizer", WEIGHTS: "offload_param"}
CPU_OFFLOAD = {"device": "cpu", "pin_memory": True}


def zero(stage: int, expected: Mapping[str, Any], differences: Mapping[str, str], *offloaded: str) -> GuideCase:
    """A case for one ZeRO stage: the guide's keys of zero_optimization, the differences, and the offloaded options."""
    zero_keys = {"stage": stage, **expected}
    zero_keys |= {f"{OFFLOADS[option]}.{key}": value for option in offloaded for key, value in CPU_OFFLOAD.items()}
    return GuideCase(
        {**DDP, "parallel.strategy": f"zero{stage}", **dict.fromkeys(offloaded, "cpu")},
        {**COMMON_KEYS, **{f"zero_optimization.{key}": value for key, value in zero_keys.items()}},
        {**LOSS_SCALE_DIFFERENCES, **{f"zero_optimization.{key}": why for key, why in differences.items()}},
    )


DEEPSPEED_CASES = {
    "ZeRO-0": zero(0, ZERO2_KEYS, ZERO2_DIFFERENCES),
    "ZeRO-2": zero(2, ZERO2_KEYS, ZERO2_DIFFERENCES),
    "ZeRO-2 with offload": zero(2, ZERO2_KEYS, ZERO2_DIFFERENCES, OPTIMIZER),
    "ZeRO-3": zero(3, ZERO3_KEYS, ZERO3_DIFFERENCES),
    "ZeRO-3 with offload": zero(3, ZERO3_KEYS, ZERO3_DIFFERENCES, OPTIMIZER, WEIGHTS),
}


@pytest.mark.parametrize("name", DEEPSPEED_CASES)
def test_deepspeed_files(name: str) -> None:
    assert_matches(DEEPSPEED_CASES[name], flat(json.loads(plan_case(DEEPSPEED_CASES[name]).files["deepspeed.json"])))
