"""The preview against a guide that people come with: "Distributed Training with LLaMA-Factory", its commands and files.

Each row holds what the guide writes, flag by flag or key by key, and the options that ask for the same. What Footplate
does otherwise stands in the row with its reason; what is named there must really differ.
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

EIGHT = Machine("cuda", tuple(Gpu(i, "H100", 80 * GIB, 80 * GIB, (9, 0)) for i in range(8)), cores=64)


@dataclass(frozen=True)
class Row:
    """`wanted` is what the guide writes; `otherwise` names what is not the same here, and why."""

    patch: Mapping[str, Any]
    wanted: Mapping[str, Any]
    otherwise: Mapping[str, str] = field(default_factory=dict)
    node: str = ""


def planned(row: Row) -> Plan:
    return plan(edit(RunSpec(), row.patch), EIGHT)


def held(row: Row, found: Mapping[str, Any]) -> None:
    """What is found is what was wanted, or it is explained; nothing is explained that is the same."""
    names = row.wanted.keys() | found.keys()
    differ = {name for name in names if row.wanted.get(name, "absent") != found.get(name, "absent")}
    assert differ == set(row.otherwise), {name: (row.wanted.get(name), found.get(name)) for name in differ}


def flags(made: Plan, node: str) -> dict[str, str]:
    """The launcher, its flags (dashes and underscores are the same to it), and the program."""
    argv = list(made.others[node] if node else made.argv)
    start = argv.index("-m") + 1
    found = {"launcher": argv[start]}
    while argv[start := start + 1].startswith("-") and argv[start] not in ("-m", "--module"):
        name, _, value = argv[start].lstrip("-").partition("=")
        found[name.replace("-", "_")] = value
    return {**found, "program": " ".join(argv[start:])}


# -- commands ----------------------------------------------------------------------------------------------------------

DDP = {"parallel.strategy": "ddp", "launch.nproc_per_node": 8}
TWO = {**DDP, "launch.rendezvous": "static", "launch.master_addr": "192.168.0.1", "launch.master_port": 29500}
SAME = {
    "launcher": "the module that the script of that name starts, in the Python that was checked",
    "program": "our trainer, which reads all of its options from spec.yaml",
}
SEEN = {"log_dir": "what each rank says is kept", "tee": "and goes to the log too"}
QUIET = {
    "no_local_rank": "our trainer knows it from the environment",
    "log_level": "fewer lines of the launcher",
}
ACCELERATE = {**SAME, **SEEN}
COMMANDS = {
    "torchrun on one node": Row(
        DDP,
        {"launcher": "torchrun", "standalone": "", "nnodes": "1", "nproc_per_node": "8", "program": "src/train.py"},
        {**SAME, **SEEN, "nnodes": "standalone is one node"},
    ),
    **{
        f"torchrun, node {rank} of two": Row(
            TWO,
            {
                "launcher": "torchrun",
                "master_port": "29500",
                "nproc_per_node": "8",
                "nnodes": "2",
                "node_rank": str(rank),
                "master_addr": "192.168.0.1",
                "program": "train.py",
            },
            {**SAME, **SEEN},
            f"node-{rank}" if rank else "",
        )
        for rank in (0, 1)
    },
    "accelerate on one node": Row(
        {**DDP, "launch.launcher": "accelerate"},
        {"launcher": "accelerate launch", "config_file": "accelerate_singleNode_config.yaml", "program": "train.py"},
        {**ACCELERATE, "config_file": "the file beside the plan"},
    ),
    "accelerate, node 1 of two": Row(
        {**TWO, "launch.launcher": "accelerate"},
        {"launcher": "accelerate launch", "config_file": "accelerate_multiNode_config.yaml", "program": "train.py"},
        {**ACCELERATE, "config_file": "the file beside the plan", "machine_rank": "one file serves all nodes"},
        "node-1",
    ),
    "deepspeed on GPU 1": Row(
        {
            "parallel.strategy": "zero3",
            "launch.nproc_per_node": 1,
            "launch.devices": (1,),
            "launch.launcher": "deepspeed",
        },
        {"launcher": "deepspeed", "include": "localhost:1", "program": "your_program.py --deepspeed ds_config.json"},
        {
            **SAME,
            **QUIET,
            "master_port": "deepspeed's own, said aloud: launch.master_port changes it",
            "hostfile": "none: one that lies about, as /job/hostfile, would be read otherwise",
        },
    ),
    "deepspeed by a hostfile": Row(
        {
            **TWO,
            "parallel.strategy": "zero3",
            "launch.nproc_per_node": 4,
            "launch.launcher": "deepspeed",
            "launch.hostfile": ("worker-1 slots=4", "worker-2 slots=4"),
        },
        {"launcher": "deepspeed", "hostfile": "hostfile", "program": "your_program.py --deepspeed ds_config.json"},
        {
            **SAME,
            **QUIET,
            "no_ssh": "each node is started by itself: over ssh a stop would end every run of the other hosts",
            "node_rank": "which of them this is",
            "master_addr": "without ssh nobody asks node 0 for it",
            "master_port": "deepspeed's own, said aloud",
        },
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands(name: str) -> None:
    row = COMMANDS[name]
    held(row, flags(planned(row), row.node))


def test_the_hostfile_is_the_guides() -> None:
    made = planned(COMMANDS["deepspeed by a hostfile"])
    assert made.files["hostfile"] == "worker-1 slots=4\nworker-2 slots=4\n"


# The guide hands the trainer's options over in the command; here they are a file. Each by the option that says it.
TRAINING = {
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
NEEDED = {"model.source": "hub", "data.source": "hub", "save.strategy": "steps", "train.duration": "epochs"}
WITHOUT = {
    "do_train": "a run trains",
    "template": "the model's own chat template",
    "output_dir": "the run's folder",
    "overwrite_cache": "rows are prepared anew by each start",
    "plot_loss": "the page draws it, and keeps a picture",
}


def test_the_trainers_options_have_their_names() -> None:
    assert not TRAINING.keys() & WITHOUT.keys()
    spec = edit(RunSpec(), {**DDP, **NEEDED, **dict(TRAINING.values())})
    written = yaml.safe_load(plan(spec, EIGHT).files["spec.yaml"])
    read = edit(RunSpec(), {f"{part}.{key}": value for part, keys in written.items() for key, value in keys.items()})
    assert {name: get(read, name) for name, _ in TRAINING.values()} == dict(TRAINING.values())


# -- accelerate's file -------------------------------------------------------------------------------------------------

FILE = {
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
MEETING = {"main_process_ip": "192.168.0.1", "main_process_port": 29500}
NO_TPU = dict.fromkeys(("tpu_env", "tpu_use_cluster", "tpu_use_sudo"), "accelerate's defaults; no TPU is driven")
CHECKED = {"debug": "it compares shapes before each collective, for looking for a fault"}
HALF = {"precision.compute": "fp16", "launch.launcher": "accelerate"}
ENGINE = {**FILE, **MEETING, "debug": False, "distributed_type": "DEEPSPEED", "num_machines": 2, "num_processes": 16}
ENGINE |= {
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
IN_JSON = "stands in deepspeed.json, and accelerate refuses it in both places"
YAML = {
    "one node": Row(
        {**DDP, **HALF},
        FILE,
        {**NO_TPU, **CHECKED, "main_process_port": "0 takes a free port, so that two runs do not meet"},
    ),
    "two nodes": Row(
        {**TWO, **HALF}, {**FILE, **MEETING, "num_machines": 2, "num_processes": 16}, {**NO_TPU, **CHECKED}
    ),
    "two nodes with DeepSpeed": Row(
        {**TWO, **HALF, "parallel.strategy": "zero3", "train.gradient_accumulation_steps": 8},
        {key: value for key, value in ENGINE.items() if key != "gpu_ids"},
        {
            **NO_TPU,
            "gpu_ids": "all of those that CUDA_VISIBLE_DEVICES leaves",
            "mixed_precision": IN_JSON,
            "deepspeed_config.deepspeed_config_file": "one file for every launcher",
            "deepspeed_config.zero_stage": IN_JSON,
            "deepspeed_config.gradient_accumulation_steps": IN_JSON,
            "deepspeed_config.offload_optimizer_device": IN_JSON,
            "deepspeed_config.offload_param_device": IN_JSON,
            "deepspeed_config.zero3_init_flag": "the trainer always loads ZeRO-3's weights in parts",
        },
    ),
}


@pytest.mark.parametrize("name", YAML)
def test_accelerate_files(name: str) -> None:
    held(YAML[name], flat(yaml.safe_load(planned(YAML[name]).files["accelerate.yaml"])))


def flat(tree: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{before}{key}.") if isinstance(value, dict) else {before + key: value}
    return found


# -- DeepSpeed's file --------------------------------------------------------------------------------------------------

SHARED = {
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
BUCKETS = {
    "allgather_partitions": True,
    "allgather_bucket_size": 5e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 5e8,
    "contiguous_gradients": True,
    "round_robin_gradients": True,
}
STAGE_3 = {
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
SCALING = {f"fp16.{key}": DEFAULT for key in ("loss_scale", "loss_scale_window", "initial_scale_power")}
SCALING |= {f"fp16.{key}": DEFAULT for key in ("hysteresis", "min_loss_scale")}
SMALLER = {
    "allgather_partitions": DEFAULT,
    "reduce_scatter": DEFAULT,
    "allgather_bucket_size": BUCKET,
    "reduce_bucket_size": BUCKET,
    "round_robin_gradients": "off, DeepSpeed's default: it spreads the copying of gradients to the CPU",
}
LATER = {
    **dict.fromkeys(("sub_group_size", "stage3_max_live_parameters", "stage3_max_reuse_distance"), DEFAULT),
    "reduce_bucket_size": BUCKET,
    "allgather_bucket_size": BUCKET,
    "stage3_prefetch_bucket_size": "DeepSpeed's default; auto takes nine tenths of the hidden size's square",
    "stage3_param_persistence_threshold": "DeepSpeed's default; auto takes ten hidden sizes",
}
OPTIMIZER, WEIGHTS = "parallel.offload_optimizer", "parallel.offload_param"
OFFLOADS = {OPTIMIZER: "offload_optimizer", WEIGHTS: "offload_param"}
IN_RAM = {"device": "cpu", "pin_memory": True}


def zero(stage: int, wanted: Mapping[str, Any], otherwise: Mapping[str, str], *offloaded: str) -> Row:
    """A row of the table: the guide's keys under zero_optimization, what differs there, and what is in CPU memory."""
    inside = {"stage": stage, **wanted}
    inside |= {f"{OFFLOADS[option]}.{key}": value for option in offloaded for key, value in IN_RAM.items()}
    return Row(
        {**DDP, "parallel.strategy": f"zero{stage}", **dict.fromkeys(offloaded, "cpu")},
        {**SHARED, **{f"zero_optimization.{key}": value for key, value in inside.items()}},
        {**SCALING, **{f"zero_optimization.{key}": why for key, why in otherwise.items()}},
    )


JSON = {
    "ZeRO-0": zero(0, BUCKETS, SMALLER),
    "ZeRO-2": zero(2, BUCKETS, SMALLER),
    "ZeRO-2 with offload": zero(2, BUCKETS, SMALLER, OPTIMIZER),
    "ZeRO-3": zero(3, STAGE_3, LATER),
    "ZeRO-3 with offload": zero(3, STAGE_3, LATER, OPTIMIZER, WEIGHTS),
}


@pytest.mark.parametrize("name", JSON)
def test_deepspeed_files(name: str) -> None:
    held(JSON[name], flat(json.loads(planned(JSON[name]).files["deepspeed.json"])))
