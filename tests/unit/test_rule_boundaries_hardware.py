"""Thresholds of the rules about machine, packages, precision, kernels, quantization, optimizers, launch and nodes: the
last value that passes and the first that fails, and what the fixes of the failing case set."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from specs import rule_finding

from backend import registry
from backend.config import RunSpec
from backend.config.options import edit, effective
from backend.inspect import InputFacts
from backend.machine import GIB, Machine
from backend.rules import Case, Finding
from backend.rules.examples import (
    DEMO,
    EQUIPPED,
    EQUIPPED_H100,
    EQUIPPED_TWO,
    H100,
    INSTALLED,
    LAPTOP,
    MOE,
    SMOL,
    T4,
    TWO_H100,
    gpus,
)
from backend.rules.kernels import with_flash_attention
from backend.rules.machine import MIN_SHARED_MEMORY
from backend.rules.requirements import capability_range, in_range, is_older

Patch = Mapping[str, Any]


@dataclass(frozen=True)
class Setup:
    """A patch of the default spec, on a machine, with inspected facts."""

    patch: Patch = field(default_factory=dict)
    machine: Machine = LAPTOP
    facts: InputFacts = DEMO

    def finding(self, code: str) -> Finding | None:
        """What the rule says of it."""
        return rule_finding(code, self.patch, self.machine, self.facts)


def on_gpu(capability: tuple[int, int], **more: Any) -> Machine:
    """One GPU of a compute capability, with every package."""
    return replace(gpus(1, "GPU", 80, capability), versions=with_flash_attention(EQUIPPED_H100).versions, **more)


def installed(**versions: str) -> Machine:
    """A laptop with other versions of some packages; underscores are dashes."""
    return replace(EQUIPPED, versions={**EQUIPPED.versions, **{k.replace("_", "-"): v for k, v in versions.items()}})


def shaped(**sizes: Any) -> InputFacts:
    """The demo's facts with other sizes of the model."""
    return replace(DEMO, shape=replace(SMOL, **sizes))


FULL = {"method.kind": "full", "train.learning_rate": 2e-5}
GALORE = {**FULL, "train.optim": "galore_adamw"}
BADAM = {**FULL, "train.optim": "badam", "train.duration": "steps", "train.badam_switch_block_every": 10}
DDP, FSDP2 = {"parallel.strategy": "ddp"}, {"parallel.strategy": "fsdp2"}
STATIC = {**DDP, "launch.rendezvous": "static", "launch.master_addr": "10.0.0.1"}
ELASTIC = {**STATIC, "launch.rendezvous": "elastic", "launch.nnodes": 4, "save.strategy": "steps"}
HOSTS = {**STATIC, "launch.launcher": "deepspeed", "launch.hostfile": ("a slots=2", "b slots=2")}
MUON = {**FSDP2, "train.optim": "muon", "launch.nproc_per_node": 4}
MINI = {**FULL, **FSDP2, "train.optim": "adam_mini"}
REVERSE = {**GALORE, "train.galore_proj_type": "reverse_std"}
REWARD = {"train.stage": "reward", "data.builtin": "train-pairs"}
NVLINK = {"parallel.strategy": "tensor", **FULL, "save.strategy": "no"}
WIDE, KV = 192, 3  # the fewest rows of a wide matrix in SmolLM2-135M: 3 KV heads of 64
CHECKPOINTS = {**ELASTIC, **FSDP2}


def nvlinked(*links: tuple[int, ...] | None) -> Machine:
    return replace(TWO_H100, gpus=tuple(replace(g, nvlink_peers=links[g.id]) for g in TWO_H100.gpus))


def accelerate(extra: Patch, **more: Any) -> Setup:
    spec = {**DDP, "launch.launcher": "accelerate", "launch.extra_accelerate_config": json.dumps(extra), **more}
    return Setup(spec, TWO_H100)


BF16, FP32, TF32, FP8 = ({"precision.compute": name} for name in ("bf16", "fp32", "tf32", "fp8"))
FLASH_2, FLASH_3 = ({"model.attn_implementation": f"flash_attention_{version}"} for version in (2, 3))
COMPILED_FP32 = {**FP32, "train.torch_compile": True}

# Code and what is varied -> the last that passes, the first that fails.
BOUNDARIES: dict[str, tuple[Setup, Setup]] = {
    # Machine
    "HW005 nodes of the machine": (Setup(machine=H100), Setup(machine=replace(H100, nodes=2))),
    "HW005 nodes of the run": (
        Setup({**STATIC, "launch.nnodes": 2}, replace(TWO_H100, nodes=2)),
        Setup(machine=replace(TWO_H100, nodes=2)),
    ),
    "HW006 an AMD GPU, ROCm build": (
        Setup(machine=on_gpu((0, 0), name="AMD")),
        Setup(machine=replace(on_gpu((0, 0)), versions={**INSTALLED, "torch": "2.13.0+cu130"})),
    ),
    "HW006 ROCm build": (
        Setup(machine=replace(on_gpu((0, 0)), versions={**INSTALLED, "torch": "2.13.0+rocm7.1"})),
        Setup(machine=replace(on_gpu((0, 1)), versions={**INSTALLED, "torch": "2.13.0+rocm7.1"})),
    ),
    "HW009 bytes free": (
        Setup({"train.dataloader_num_workers": 1}, replace(LAPTOP, shm_free_bytes=GIB)),
        Setup({"train.dataloader_num_workers": 1}, replace(LAPTOP, shm_free_bytes=GIB - 1)),
    ),
    "HW009 NCCL": (
        Setup({**DDP, "launch.nproc_per_node": 1}, replace(TWO_H100, shm_free_bytes=0)),
        Setup({**DDP, "launch.nproc_per_node": 2}, replace(TWO_H100, shm_free_bytes=0)),
    ),
    "HW010 links": (Setup(NVLINK, nvlinked((1,), (0,))), Setup(NVLINK, nvlinked((1,), ()))),
    "HW010 unknown links": (Setup(NVLINK, nvlinked(None, None)), Setup(NVLINK, nvlinked(None, ()))),
    # Packages
    "HW007 bitsandbytes": (
        Setup({"method.quantization": "nf4"}, installed(bitsandbytes="0.46.1")),
        Setup({"method.quantization": "nf4"}, installed(bitsandbytes="0.46.0")),
    ),
    "HW007 schedulefree": (
        Setup({"train.optim": "schedule_free_adamw"}, installed(schedulefree="1.2.6")),
        Setup({"train.optim": "schedule_free_adamw"}, installed(schedulefree="1.2.5")),
    ),
    "HW007 schedulefree for RAdam": (
        Setup({"train.optim": "schedule_free_radam"}, installed(schedulefree="1.4.0")),
        Setup({"train.optim": "schedule_free_radam"}, installed(schedulefree="1.3.9")),
    ),
    "HW007 torchao": (
        Setup({"train.optim": "adamw_torch_8bit"}, installed(torchao="0.15.0+cpu")),
        Setup({"train.optim": "adamw_torch_8bit"}, installed(torchao="0.14.9+cpu")),
    ),
    "HW007 flash-attn": (
        Setup(FLASH_2, replace(H100, versions={**INSTALLED, "flash_attn": "2.3.3"})),
        Setup(FLASH_2, replace(H100, versions={**INSTALLED, "flash_attn": "2.3.2"})),
    ),
    "HW007 liger-kernel": (
        Setup({"train.use_liger_kernel": True}, installed(liger_kernel="0.3.0")),
        Setup({"train.use_liger_kernel": True}, installed(liger_kernel="0.2.9")),
    ),
    **{
        f"HW007 {package} for {kind}": (
            Setup({}, installed(**{package: least}), replace(DEMO, quant_method=kind)),
            Setup({}, installed(**{package: older}), replace(DEMO, quant_method=kind)),
        )
        for kind, package, least, older in (
            ("awq", "gptqmodel", "5.0.0", "4.9"),
            ("hqq", "hqq", "0.2.1", "0.2.0"),
            ("compressed-tensors", "compressed-tensors", "0.15.0", "0.14.9"),
            ("bitsandbytes", "bitsandbytes", "0.46.1", "0.46.0"),
        )
    },
    # GPU generations
    "PRC002 capability": (Setup(BF16, on_gpu((8, 0))), Setup(BF16, on_gpu((7, 9)))),
    "PRC002 another vendor": (Setup(BF16, on_gpu((0, 0))), Setup(BF16, on_gpu((0, 1)))),
    "PRC004 capability": (Setup(FP32, on_gpu((7, 9))), Setup(FP32, on_gpu((8, 0)))),
    "PRC005 capability": (Setup(TF32, on_gpu((8, 0))), Setup(TF32, on_gpu((7, 9)))),
    "PRC005 another vendor": (Setup(TF32, H100), Setup(TF32, on_gpu((0, 0)))),
    "PRC006 capability": (Setup(FP8, on_gpu((8, 9))), Setup(FP8, on_gpu((8, 8)))),
    "PRC006 another vendor": (Setup(FP8, on_gpu((8, 9))), Setup(FP8, on_gpu((0, 0)))),
    "PRC006 Transformer Engine on a CPU": (
        Setup({**FP8, "precision.fp8_backend": "torchao"}, EQUIPPED),
        Setup({**FP8, "precision.fp8_backend": "te"}, EQUIPPED),
    ),
    "PRC013 capability": (Setup(COMPILED_FP32, on_gpu((7, 9))), Setup(COMPILED_FP32, on_gpu((8, 0)))),
    "KRN003 version 2": (Setup(FLASH_2, on_gpu((8, 0))), Setup(FLASH_2, on_gpu((7, 9)))),
    "KRN003 version 2, another vendor": (Setup(FLASH_2, on_gpu((0, 0))), Setup(FLASH_2, on_gpu((0, 1)))),
    "KRN003 version 3, older": (Setup(FLASH_3, on_gpu((8, 0))), Setup(FLASH_3, on_gpu((7, 9)))),
    "KRN003 version 3, newer": (Setup(FLASH_3, on_gpu((9, 0))), Setup(FLASH_3, on_gpu((9, 1)))),
    "QNT008 capability": (
        Setup({"method.quantization": "int8"}, on_gpu((7, 5))),
        Setup({"method.quantization": "int8"}, on_gpu((7, 4))),
    ),
    # The model
    "KRN005 largest": (
        Setup(FLASH_2, on_gpu((9, 0)), shaped(head_dim=256)),
        Setup(FLASH_2, on_gpu((9, 0)), shaped(head_dim=264)),
    ),
    "KRN005 multiple": (
        Setup(FLASH_2, on_gpu((9, 0)), shaped(head_dim=64)),
        Setup(FLASH_2, on_gpu((9, 0)), shaped(head_dim=65)),
    ),
    "KRN012 sequence parallelism": (
        Setup({"parallel.strategy": "zero2"}, TWO_H100, shaped(unsupported_attentions=("sdpa",))),
        Setup(
            {"parallel.strategy": "zero2", "parallel.sequence_parallel_size": 2},
            TWO_H100,
            shaped(unsupported_attentions=("sdpa",)),
        ),
    ),
    "PRC011 hidden size": (
        Setup(FP8, EQUIPPED_H100, shaped(hidden=592)),
        Setup(FP8, EQUIPPED_H100, shaped(hidden=584)),
    ),
    "OPT010 rank": (
        Setup({**GALORE, "train.projection_rank": SMOL.hidden - 1}, EQUIPPED),
        Setup({**GALORE, "train.projection_rank": SMOL.hidden}, EQUIPPED),
    ),
    "OPT024 rank": (
        Setup({**REVERSE, "train.projection_rank": WIDE - 1}, EQUIPPED),
        Setup({**REVERSE, "train.projection_rank": WIDE}, EQUIPPED),
    ),
    "QNT018 experts": (
        Setup({"method.quantization": "nf4"}, H100),
        Setup({"method.quantization": "nf4"}, H100, replace(DEMO, shape=MOE)),
    ),
    # Optimizers
    "OPT004 processes": (
        Setup({**GALORE, **DDP, "train.optim": "galore_adamw_layerwise", "launch.nproc_per_node": 1}, EQUIPPED),
        Setup({**GALORE, **DDP, "train.optim": "galore_adamw_layerwise", "launch.nproc_per_node": 2}, EQUIPPED),
    ),
    "OPT005 steps": (
        Setup({**GALORE, "train.optim": "galore_adamw_layerwise", "train.gradient_accumulation_steps": 1}, EQUIPPED),
        Setup({**GALORE, "train.optim": "galore_adamw_layerwise", "train.gradient_accumulation_steps": 2}, EQUIPPED),
    ),
    "OPT012 LoRA": (
        Setup({"train.optim": "lion_32bit", "train.learning_rate": 1e-4}, EQUIPPED),
        Setup({"train.optim": "lion_32bit", "train.learning_rate": 1.01e-4}, EQUIPPED),
    ),
    "OPT012 full": (
        Setup({**FULL, "train.optim": "paged_lion_8bit", "train.learning_rate": 1e-5}, EQUIPPED),
        Setup({**FULL, "train.optim": "paged_lion_8bit", "train.learning_rate": 1.01e-5}, EQUIPPED),
    ),
    "OPT012 freeze": (
        Setup({"method.kind": "freeze", "train.optim": "lion_8bit", "train.learning_rate": 1e-5}, EQUIPPED),
        Setup({"method.kind": "freeze", "train.optim": "lion_8bit", "train.learning_rate": 1.01e-5}, EQUIPPED),
    ),
    "OPT013 rate": (
        Setup({"train.optim": "sgd", "train.learning_rate": 1e-3}),
        Setup({"train.optim": "sgd", "train.learning_rate": 0.99e-3}),
    ),
    "OPT014 norm": (
        Setup({"train.optim": "adafactor", "train.max_grad_norm": 0.0}),
        Setup({"train.optim": "adafactor", "train.max_grad_norm": 0.01}),
    ),
    "OPT018 steps": (
        Setup({**BADAM, "train.max_steps": 10 * SMOL.layers}, EQUIPPED),
        Setup({**BADAM, "train.max_steps": 10 * SMOL.layers - 1}, EQUIPPED),
    ),
    "OPT021 ZeRO stage": (
        Setup({**FULL, "train.optim": "adagrad", "parallel.strategy": "zero0"}, EQUIPPED_TWO),
        Setup({**FULL, "train.optim": "adagrad", "parallel.strategy": "zero1"}, EQUIPPED_TWO),
    ),
    "OPT025 rows": (Setup({**MUON, "lora.r": 4}), Setup({**MUON, "lora.r": 3})),
    "OPT025 replicas": (
        Setup({**MUON, "lora.r": 2, "parallel.replicate_size": 2}),
        Setup({**MUON, "lora.r": 2, "parallel.replicate_size": 1}),
    ),
    "OPT026 KV heads": (
        Setup({**MINI, "launch.nproc_per_node": 3}, EQUIPPED),
        Setup({**MINI, "launch.nproc_per_node": 9}, EQUIPPED),
    ),
    "OPT026 heads": (
        Setup({**MINI, "launch.nproc_per_node": 2}, EQUIPPED, shaped(heads=4, kv_heads=2)),
        Setup({**MINI, "launch.nproc_per_node": 2}, EQUIPPED, shaped(heads=3, kv_heads=2)),
    ),
    "OPT013 LOMO": (
        Setup({"train.optim": "rmsprop", "train.learning_rate": 1e-5}),
        Setup({**FULL, "train.optim": "lomo"}, EQUIPPED),
    ),
    "OPT019 offload": (
        Setup({"train.optim": "adamw_torch_8bit", **FSDP2}, replace(EQUIPPED_TWO, has_cpp_compiler=False)),
        Setup(
            {"train.optim": "adamw_torch_8bit", **FSDP2, "parallel.cpu_offload": True},
            replace(EQUIPPED_TWO, has_cpp_compiler=False),
        ),
    ),
    "KRN011 FlexAttention": (
        Setup(REWARD, replace(H100, triton_can_compile=False)),
        Setup({**REWARD, "model.attn_implementation": "flex_attention"}, replace(H100, triton_can_compile=False)),
    ),
    # Launch
    "LCH001 processes": (
        Setup({**DDP, "launch.launcher": "python", "launch.nproc_per_node": 1}),
        Setup({**DDP, "launch.launcher": "python", "launch.nproc_per_node": 2}),
    ),
    "LCH002 devices": (
        Setup({**DDP, "launch.nproc_per_node": 2}, TWO_H100),
        Setup({**DDP, "launch.nproc_per_node": 3}, TWO_H100),
    ),
    "LCH002 without GPUs": (
        Setup({**DDP, "launch.nproc_per_node": 1}, replace(LAPTOP, device="mps")),
        Setup({**DDP, "launch.nproc_per_node": 2}, replace(LAPTOP, device="mps")),
    ),
    "LCH003 ids": (Setup({"launch.devices": (1,)}, TWO_H100), Setup({"launch.devices": (2,)}, TWO_H100)),
    "LCH004 ids": (
        Setup({**DDP, "launch.devices": (1, 0)}, TWO_H100),
        Setup({**DDP, "launch.devices": (1, 0, 1)}, TWO_H100),
    ),
    "LCH005 ids": (
        Setup({**DDP, "launch.devices": (0, 1), "launch.nproc_per_node": 2}, gpus(3, "H100", 80, (9, 0))),
        Setup({**DDP, "launch.devices": (0, 1), "launch.nproc_per_node": 3}, gpus(3, "H100", 80, (9, 0))),
    ),
    "LCH005 repeated ids": (
        Setup({**DDP, "launch.devices": (0, 0), "launch.nproc_per_node": 2}, TWO_H100),
        Setup({**DDP, "launch.devices": (0,), "launch.nproc_per_node": 2}, TWO_H100),
    ),
    "LCH006 ids": (
        Setup({**DDP, "launch.devices": (0, 1), "launch.nproc_per_node": 2}, TWO_H100),
        Setup({**DDP, "launch.devices": (0, 1), "launch.nproc_per_node": 1}, TWO_H100),
    ),
    "LCH007 processes": (
        Setup({**DDP, "launch.nproc_per_node": 2}),
        Setup({**DDP, "launch.nproc_per_node": 1}),
    ),
    "LCH008 threads": (
        Setup({**DDP, "launch.omp_num_threads": 4, "launch.nproc_per_node": 2}),
        Setup({**DDP, "launch.omp_num_threads": 5, "launch.nproc_per_node": 2}),
    ),
    "LCH009 cores": (
        Setup({**DDP, "launch.nproc_per_node": 8}),
        Setup({**DDP, "launch.nproc_per_node": 9}),
    ),
    "LCH013 rendezvous": (
        accelerate({"main_process_port": 1234}),
        accelerate({"main_process_port": 1234}, **{**STATIC, "launch.nnodes": 2}),
    ),
    "LCH013 multi-node launcher": (
        accelerate({"deepspeed_config": {"deepspeed_multinode_launcher": "pdsh"}}, **{"parallel.strategy": "zero2"}),
        accelerate(
            {"deepspeed_config": {"deepspeed_multinode_launcher": "pdsh"}},
            **{**STATIC, "parallel.strategy": "zero2", "launch.nnodes": 2},
        ),
    ),
    "LCH011 launcher": (
        Setup({**DDP, "launch.launcher": "deepspeed", "launch.env": {"CUDA_VISIBLE_DEVICES": "1"}}, TWO_H100),
        Setup({**DDP, "launch.launcher": "torchrun", "launch.env": {"CUDA_VISIBLE_DEVICES": "1"}}, TWO_H100),
    ),
    # Nodes
    "NOD001 rank": (Setup({**STATIC, "launch.node_rank": 1}), Setup({**STATIC, "launch.node_rank": 2})),
    "NOD002 nodes": (
        Setup({**STATIC, "launch.master_addr": "", "launch.nnodes": 1}),
        Setup({**STATIC, "launch.master_addr": "", "launch.nnodes": 2}),
    ),
    "NOD003 nodes": (
        Setup({**STATIC, "launch.master_addr": "localhost", "launch.nnodes": 1}),
        Setup({**STATIC, "launch.master_addr": "localhost", "launch.nnodes": 2}),
    ),
    "NOD003 address": (
        Setup({**STATIC, "launch.master_addr": "128.0.0.1"}),
        Setup({**STATIC, "launch.master_addr": "127.255.255.255"}),
    ),
    "NOD004 nodes": (Setup({**ELASTIC, "launch.min_nnodes": 4}), Setup({**ELASTIC, "launch.min_nnodes": 5})),
    "NOD006 nodes": (
        Setup({**CHECKPOINTS, "launch.nproc_per_node": 1, "launch.min_nnodes": 2}),
        Setup({**CHECKPOINTS, "launch.nproc_per_node": 1, "launch.min_nnodes": 1}),
    ),
    "NOD006 all nodes": (
        Setup({**ELASTIC, "parallel.strategy": "zero0", "launch.min_nnodes": 4}),
        Setup({**ELASTIC, "parallel.strategy": "zero0", "launch.min_nnodes": 3}),
    ),
    "NOD006 replicas": (
        Setup({**CHECKPOINTS, "launch.nproc_per_node": 4, "parallel.replicate_size": 2, "launch.min_nnodes": 1}),
        Setup({**CHECKPOINTS, "launch.nproc_per_node": 2, "parallel.replicate_size": 2, "launch.min_nnodes": 1}),
    ),
    "NOD006 replicas over nodes": (
        Setup({**CHECKPOINTS, "launch.nproc_per_node": 2, "parallel.replicate_size": 2, "launch.min_nnodes": 2}),
        Setup({**CHECKPOINTS, "launch.nproc_per_node": 3, "parallel.replicate_size": 2, "launch.min_nnodes": 2}),
    ),
    "NOD006 context parallelism": (
        Setup({**CHECKPOINTS, "launch.nproc_per_node": 4, "parallel.context_parallel_size": 2, "launch.min_nnodes": 1}),
        Setup({**CHECKPOINTS, "launch.nproc_per_node": 2, "parallel.context_parallel_size": 2, "launch.min_nnodes": 1}),
    ),
    "NOD006 FSDP1": (
        Setup({**CHECKPOINTS, "parallel.strategy": "fsdp1", "launch.nproc_per_node": 2, "launch.min_nnodes": 1}),
        Setup({**CHECKPOINTS, "parallel.strategy": "fsdp1", "launch.nproc_per_node": 1, "launch.min_nnodes": 1}),
    ),
    "NOD007 nodes": (Setup({**ELASTIC, "launch.min_nnodes": 4}), Setup({**ELASTIC, "launch.min_nnodes": 3})),
    "NOD009 nodes": (
        Setup({**HOSTS, "launch.hostfile": ("a",), "launch.nnodes": 1}),
        Setup({**HOSTS, "launch.hostfile": ("a",), "launch.nnodes": 2}),
    ),
    "NOD011 hosts": (Setup(HOSTS), Setup({**HOSTS, "launch.nnodes": 3})),
    "NOD011 slots": (Setup(HOSTS), Setup({**HOSTS, "launch.nproc_per_node": 3})),
}


@pytest.mark.parametrize("name", BOUNDARIES)
def test_boundary(name: str) -> None:
    code = name.partition(" ")[0]
    passes, fails = BOUNDARIES[name]
    assert passes.finding(code) is None
    assert fails.finding(code) is not None


# Code and what is varied -> the failing case, and what its first fixes set.
FIXES: dict[str, tuple[Setup, list[dict[str, Any]]]] = {
    "HW008": (
        Setup(
            {},
            replace(TWO_H100, gpus=tuple(replace(g, processes=("a (1)",) if g.id == 0 else ()) for g in TWO_H100.gpus)),
        ),
        [{"launch.devices": (1,)}],
    ),
    "HW008 with all busy": (
        Setup({}, replace(TWO_H100, gpus=tuple(replace(g, processes=("a (1)",)) for g in TWO_H100.gpus))),
        [],
    ),
    "OPT005": (
        Setup(
            {
                **GALORE,
                "train.optim": "galore_adamw_layerwise",
                "train.gradient_accumulation_steps": 3,
                "train.per_device_train_batch_size": 5,
            },
            EQUIPPED,
        ),
        [
            {"train.gradient_accumulation_steps": 1, "train.per_device_train_batch_size": 15},
            {"train.gradient_accumulation_steps": 1},
        ],
    ),
    "OPT010": (Setup({**GALORE, "train.projection_rank": 1024}, EQUIPPED), [{"train.projection_rank": 144}]),
    "OPT011": (Setup({"train.optim": "paged_adamw_8bit"}, EQUIPPED), [{"train.optim": "adamw_bnb_8bit"}]),
    "OPT012": (Setup({"train.optim": "lion_32bit"}, EQUIPPED), [{"train.learning_rate": 5e-5}]),
    "OPT012 full": (
        Setup({**FULL, "train.optim": "lion_32bit", "train.learning_rate": 1e-3}, EQUIPPED),
        [{"train.learning_rate": 5e-6}],
    ),
    "OPT013": (Setup({"train.optim": "sgd"}), [{"train.learning_rate": 0.05}]),
    "OPT018": (
        Setup({**BADAM, "train.max_steps": 3 * SMOL.layers}, EQUIPPED),
        [{"train.badam_switch_block_every": 3}],
    ),
    "OPT018 with fewer steps than layers": (Setup({**BADAM, "train.max_steps": SMOL.layers - 1}, EQUIPPED), []),
    "OPT024": (
        Setup({**REVERSE, "train.projection_rank": WIDE}, EQUIPPED),
        [{"train.galore_proj_type": "std"}, {"train.projection_rank": WIDE // 4}],
    ),
    "LCH002": (
        Setup({**DDP, "launch.nproc_per_node": 4}, TWO_H100),
        [{"launch.nproc_per_node": 2, "train.gradient_accumulation_steps": 2}],
    ),
    "LCH002 with an odd count": (
        Setup({**DDP, "launch.nproc_per_node": 3, "train.gradient_accumulation_steps": 1}, TWO_H100),
        [{"launch.nproc_per_node": 2}],
    ),
    "LCH002 with ids": (
        Setup({**DDP, "launch.nproc_per_node": 4, "launch.devices": (0, 1, 2)}, TWO_H100),
        [{"launch.nproc_per_node": 2, "train.gradient_accumulation_steps": 2, "launch.devices": (0, 1)}],
    ),
    "LCH002 with as many ids as devices": (
        Setup({**DDP, "launch.nproc_per_node": 4, "launch.devices": (1, 0)}, TWO_H100),
        [{"launch.nproc_per_node": 2, "train.gradient_accumulation_steps": 2}],
    ),
    "LCH002 with one GPU": (
        Setup({**DDP, "launch.nproc_per_node": 2}, H100),
        [{"parallel.strategy": "single", "train.gradient_accumulation_steps": 2}],
    ),
    "LCH003 with fewer devices than processes": (
        Setup({**DDP, "launch.nproc_per_node": 3, "launch.devices": (0, 1, 2)}, TWO_H100),
        [{"launch.devices": (), "launch.nproc_per_node": 2}],
    ),
    "LCH003 with as many devices as processes": (
        Setup({**DDP, "launch.nproc_per_node": 2, "launch.devices": (0, 2)}, TWO_H100),
        [{"launch.devices": ()}],
    ),
    "LCH003 with one device": (
        Setup({**DDP, "launch.nproc_per_node": 2, "launch.devices": (0, 1)}, H100),
        [{"parallel.strategy": "single", "launch.devices": (), "train.gradient_accumulation_steps": 2}],
    ),
    "LCH003": (
        Setup({"launch.devices": (0, 9)}, TWO_H100),
        [{"launch.devices": (0,)}, {"launch.devices": ()}],
    ),
    "LCH004": (
        Setup({**DDP, "launch.devices": (1, 0, 1), "launch.nproc_per_node": 2}, TWO_H100),
        [{"launch.devices": (1, 0)}],
    ),
    "LCH004 with too few ids": (
        Setup({**DDP, "launch.devices": (1, 1), "launch.nproc_per_node": 2}, TWO_H100),
        [{"launch.devices": ()}],
    ),
    "LCH005": (
        Setup({**DDP, "launch.devices": (0, 1), "launch.nproc_per_node": 3}, gpus(3, "H100", 80, (9, 0))),
        [{"launch.devices": ()}, {"launch.nproc_per_node": 2}],
    ),
    "LCH005 with too few devices": (
        Setup({**DDP, "launch.devices": (0, 1), "launch.nproc_per_node": 4}, TWO_H100),
        [{"launch.nproc_per_node": 2, "train.gradient_accumulation_steps": 2}],
    ),
    "LCH005 with one id": (
        Setup({**DDP, "launch.devices": (1,), "launch.nproc_per_node": 2}, H100),
        [{"parallel.strategy": "single", "train.gradient_accumulation_steps": 2}],
    ),
    "LCH009": (
        Setup({**DDP, "launch.nproc_per_node": 16}),
        [{"launch.nproc_per_node": 8, "train.gradient_accumulation_steps": 2}],
    ),
    "LCH009 with one core": (
        Setup({**DDP, "launch.nproc_per_node": 2}, replace(LAPTOP, cores=1)),
        [{"parallel.strategy": "single", "train.gradient_accumulation_steps": 2}],
    ),
    "NOD008": (
        Setup({**ELASTIC, "save.strategy": "steps", "save.only_model": True}),
        [{"save.only_model": False}],
    ),
    "NOD008 without checkpoints": (
        Setup({**ELASTIC, "save.strategy": "no"}),
        [
            {
                "save.only_model": False,
                "save.strategy": "steps",
                "save.steps": RunSpec().save.steps,
                "save.total_limit": RunSpec().save.total_limit,
            }
        ],
    ),
    "NOD008 without room": (
        Setup({**ELASTIC, "save.strategy": "steps", "save.only_model": True}, replace(LAPTOP, disk_free_bytes=0)),
        [],
    ),
    "NOD011": (Setup({**HOSTS, "launch.nnodes": 3}), [{"launch.nnodes": 2, "launch.nproc_per_node": 2}]),
    "NOD011 with one host": (Setup({**HOSTS, "launch.hostfile": ("a slots=2",)}), []),
    "NOD011 with unequal slots": (Setup({**HOSTS, "launch.hostfile": ("a slots=2", "b slots=1")}), []),
    "NOD015 without a free port": (
        Setup(
            STATIC,
            replace(LAPTOP, name=""),
            replace(DEMO, port_in_use=29500, free_port=0),
        ),
        [],
    ),
}


@pytest.mark.parametrize("name", FIXES)
def test_fixes_set_these_values(name: str) -> None:
    setup, patches = FIXES[name]
    found = setup.finding(name.partition(" ")[0])
    assert found is not None
    assert [dict(fix.patch) for fix in found.fixes][: len(patches) or None] == patches


def test_safety_of_fixes_that_keep_the_batch_size() -> None:
    even = Setup({**DDP, "launch.nproc_per_node": 4}, TWO_H100).finding("LCH002")
    odd = Setup({**DDP, "launch.nproc_per_node": 3, "train.gradient_accumulation_steps": 1}, TWO_H100).finding("LCH002")
    assert even is not None and odd is not None
    assert even.fixes[0].safe and not odd.fixes[0].safe


def test_the_disk_must_have_room_for_full_checkpoints() -> None:
    patch = {**ELASTIC, "save.only_model": True}
    spec = effective(edit(RunSpec(), patch))
    case = Case(spec, LAPTOP, DEMO)
    need = case.estimated(case.with_patch({"save.only_model": False})).disk_bytes
    for free, offered in ((need, True), (need - 1, False)):
        found = Setup(patch, replace(LAPTOP, disk_free_bytes=free)).finding("NOD008")
        assert found is not None
        assert bool(found.fixes) is offered


def test_texts_count() -> None:
    """One device is a device, two are devices."""
    busy = replace(TWO_H100.gpus[0], processes=("a (1)",))
    four = gpus(4, "H100", 80, (9, 0))
    on = replace(four, gpus=(busy, *four.gpus[1:]))
    for processes, label in ((1, "Use GPU 1"), (2, "Use GPUs 1 and 2")):
        found = Setup({**DDP, "launch.nproc_per_node": processes}, on).finding("HW008")
        assert found is not None and found.fixes[0].label == label
    for workers, words in ((1, "1 DataLoader worker "), (2, "2 DataLoader workers ")):
        found = Setup({"train.dataloader_num_workers": workers}, replace(LAPTOP, shm_free_bytes=0)).finding("HW009")
        assert found is not None and words in found.message


def test_global_batch_size_with_the_fewest_nodes() -> None:
    found = Setup({**ELASTIC, "launch.nproc_per_node": 2, "launch.min_nnodes": 3}).finding("NOD007")
    assert found is not None
    assert found.message == "The global batch size is 32 examples with 4 nodes and 24 with 3."


# Code -> a case, and words of its message that depend on a count.
WORDS = {
    "HW004": (Setup({"logging.report_to": "wandb"}), "the package wandb, which is not installed"),
    "HW002": (
        Setup(machine=replace(LAPTOP, versions={k: v for k, v in INSTALLED.items() if k not in ("trl", "peft")})),
        "the packages peft and trl, which are not installed",
    ),
    "OPT002": (Setup({**GALORE, "train.optim": "galore_adamw_8bit"}, EQUIPPED), "only the device type CUDA"),
    "KRN006": (Setup({"train.use_liger_kernel": True}), "only the device types CUDA"),
    "PRC005": (Setup(TF32, on_gpu((7, 9))), "GPU 0 (GPU) has 7.9."),
    "PRC005 on another vendor's GPU": (Setup(TF32, on_gpu((0, 0))), "GPU 0 (GPU) has none."),
    "OPT018": (Setup({**BADAM, "train.max_steps": 100}, EQUIPPED), "need 300 steps; the run has 100 steps."),
    "OPT023": (
        Setup({**GALORE, "train.optim_targets": "custom", "train.optim_target_modules": ("foo",)}, EQUIPPED),
        "GaLore would project foo;",
    ),
    "NOD006": (
        Setup({**ELASTIC, "parallel.strategy": "zero2", "train.optim": "sgd", "method.kind": "full"}),
        "ZeRO-2 checkpoints with an optimizer other than AdamW cannot be resumed on 1 node.",
    ),
    "NOD006 without a reason": (
        Setup({**ELASTIC, "parallel.strategy": "zero0"}),
        "ZeRO-0 checkpoints cannot be resumed on 1 node.",
    ),
}


@pytest.mark.parametrize("name", WORDS)
def test_words_of_messages(name: str) -> None:
    setup, words = WORDS[name]
    found = setup.finding(name.partition(" ")[0])
    assert found is not None
    assert words in found.message


def test_share_of_experts() -> None:
    found = Setup({"method.quantization": "nf4"}, H100, replace(DEMO, shape=MOE)).finding("QNT018")
    assert found is not None and "93% of the model's weights" in found.message


@pytest.mark.parametrize(
    ("installed_version", "minimum", "older"),
    [("1.2.10", "1.2.9", False), ("1.2.9", "1.2.10", True), ("1.2.dev1", "1.2", True), ("?", "1", False)],
)
def test_versions_are_compared_as_versions(installed_version: str, minimum: str, older: bool) -> None:
    assert is_older(installed_version, minimum) is older


def test_capability_ranges() -> None:
    row = replace(registry.ATTENTIONS["flash_attention_3"], min_capability=(9, 0))
    assert capability_range(row) == "compute capability 9.0"
    assert capability_range(replace(row, max_capability=(9, 1))) == "compute capability 9.0 to 9.1"
    assert capability_range(replace(row, max_capability=(0, 0))) == "compute capability 9.0 or later"
    assert in_range((10, 0), replace(row, max_capability=(0, 0))) and not in_range((10, 0), row)
    newest = replace(row, min_capability=(0, 0))
    assert in_range((8, 9), newest) and not in_range((9, 1), newest)
    assert MIN_SHARED_MEMORY == GIB and T4.gpus[0].capability == (7, 5)
