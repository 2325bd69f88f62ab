"""Thresholds of the rules about machine, packages, precision, kernels, quantization, optimizers, launch and nodes: the
last value that passes and the first that fails, and what the fixes of the failing case set."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from boundaries import NO_FIX, Boundary, Patch, Setup, boundary, facts_boundary, machine_boundary

from backend import registry
from backend.config import RunSpec
from backend.config.options import edit, effective
from backend.inspect import InputFacts
from backend.machine import GIB, Machine
from backend.modelspec import ModuleSpec
from backend.rules import Case
from backend.rules.adapter import EXPERT_LAYERS, KNOWN_MOE
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
from backend.rules.kernels import LIGER_H100, with_flash_attention
from backend.rules.launch import MIG
from backend.rules.machine import MIN_SHARED_MEMORY
from backend.rules.requirements import capability_range, in_range, is_older


def on_gpu(capability: tuple[int, int], **more: Any) -> Machine:
    """One GPU of a compute capability, with every package."""
    return replace(gpus(1, "GPU", 80, capability), versions=with_flash_attention(EQUIPPED_H100).versions, **more)


def installed(**versions: str) -> Machine:
    """A laptop with other versions of some packages; underscores are dashes."""
    return replace(EQUIPPED, versions={**EQUIPPED.versions, **{k.replace("_", "-"): v for k, v in versions.items()}})


def shaped(**sizes: Any) -> InputFacts:
    """The demo's facts with other sizes of the model."""
    return replace(DEMO, shape=replace(SMOL, **sizes))


PROCESSES, ACCUMULATION, RATE = "launch.nproc_per_node", "train.gradient_accumulation_steps", "train.learning_rate"
FULL = {"method.kind": "full", RATE: 2e-5}
GALORE = {**FULL, "train.optim": "galore_adamw"}
BADAM = {**FULL, "train.optim": "badam", "train.duration": "steps", "train.badam_switch_block_every": 10}
ON_SLURM = {"launch.place": "slurm"}
DDP, FSDP2 = {"parallel.strategy": "ddp"}, {"parallel.strategy": "fsdp2"}
STATIC = {**DDP, "launch.rendezvous": "static", "launch.master_addr": "10.0.0.1"}
ELASTIC = {**STATIC, "launch.rendezvous": "elastic", "launch.nnodes": 4, "save.strategy": "steps"}
HOSTS = {**STATIC, "launch.launcher": "deepspeed", "launch.hostfile": ("a slots=2", "b slots=2")}
LAYERWISE = {**GALORE, "train.optim": "galore_adamw_layerwise"}
ZERO2 = {"parallel.strategy": "zero2"}
PDSH = {"deepspeed_config": {"deepspeed_multinode_launcher": "pdsh"}}
BUSY = tuple(replace(gpu, processes=("a (1)",)) for gpu in TWO_H100.gpus)
MUON = {**FSDP2, "train.optim": "muon", PROCESSES: 4}
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
LIGER = {"train.use_liger_kernel": True}
FLASH_2, FLASH_3 = ({"model.attn_implementation": f"flash_attention_{version}"} for version in (2, 3))
COMPILED_FP32 = {**FP32, "train.torch_compile": True}

BOUNDARIES = (
    # Machine
    machine_boundary("HW005", {}, H100, replace(H100, nodes=2)),
    boundary("HW005", {}, {**STATIC, "launch.nnodes": 2}, {}, machine=replace(TWO_H100, nodes=2)),
    machine_boundary("HW006", {}, on_gpu((0, 0), name="AMD"),
                     replace(on_gpu((0, 0)), versions={**INSTALLED, "torch": "2.13.0+cu130"})),
    machine_boundary("HW006", {}, replace(on_gpu((0, 0)), versions={**INSTALLED, "torch": "2.13.0+rocm7.1"}),
                     replace(on_gpu((0, 1)), versions={**INSTALLED, "torch": "2.13.0+rocm7.1"})),
    machine_boundary("HW009", {"train.dataloader_num_workers": 1}, replace(LAPTOP, shm_free_bytes=GIB),
                     replace(LAPTOP, shm_free_bytes=GIB - 1)),
    boundary("HW009", DDP, {PROCESSES: 1}, {PROCESSES: 2}, machine=replace(TWO_H100, shm_free_bytes=0)),
    machine_boundary("HW010", NVLINK, nvlinked((1,), (0,)), nvlinked((1,), ())),
    machine_boundary("HW010", NVLINK, nvlinked(None, None), nvlinked(None, ())),
    boundary("HW011", {}, {"launch.device": "cpu"}, {}, NO_FIX, words="this run would use the CPU",
             machine=replace(LAPTOP, lost_gpus={0: "GPU is lost", 1: "Unknown Error"})),
    machine_boundary("HW011", {}, TWO_H100, replace(TWO_H100, lost_gpus={2: "GPU is lost"})),
    boundary("HW011", {}, ON_SLURM, {}, NO_FIX, machine=replace(TWO_H100, lost_gpus={2: "GPU is lost"})),
    # Packages
    machine_boundary("HW007", {"method.quantization": "nf4"}, installed(bitsandbytes="0.46.1"),
                     installed(bitsandbytes="0.46.0")),
    machine_boundary("HW007", {"train.optim": "schedule_free_adamw"}, installed(schedulefree="1.2.6"),
                     installed(schedulefree="1.2.5")),
    machine_boundary("HW007", {"train.optim": "schedule_free_radam"}, installed(schedulefree="1.4.0"),
                     installed(schedulefree="1.3.9")),
    machine_boundary("HW007", {"train.optim": "adamw_torch_8bit"}, installed(torchao="0.15.0+cpu"),
                     installed(torchao="0.14.9+cpu")),
    machine_boundary("HW007", FLASH_2, replace(H100, versions={**INSTALLED, "flash_attn": "2.3.3"}),
                     replace(H100, versions={**INSTALLED, "flash_attn": "2.3.2"})),
    machine_boundary("HW007", {"train.use_liger_kernel": True}, installed(liger_kernel="0.3.0"),
                     installed(liger_kernel="0.2.9")),
    *(machine_boundary("HW007", {}, installed(**{package: least}), installed(**{package: older}),
                       replace(DEMO, quant_method=kind))
      for kind, package, least, older in (
          ("awq", "gptqmodel", "5.0.0", "4.9"),
          ("hqq", "hqq", "0.2.1", "0.2.0"),
          ("compressed-tensors", "compressed-tensors", "0.15.0", "0.14.9"),
          ("bitsandbytes", "bitsandbytes", "0.46.1", "0.46.0"),
      )),
    # GPU generations
    machine_boundary("PRC002", BF16, on_gpu((8, 0)), on_gpu((7, 9))),
    machine_boundary("PRC002", BF16, on_gpu((0, 0)), on_gpu((0, 1))),
    machine_boundary("PRC004", FP32, on_gpu((7, 9)), on_gpu((8, 0))),
    machine_boundary("PRC005", TF32, on_gpu((8, 0)), on_gpu((7, 9))),
    machine_boundary("PRC005", TF32, H100, on_gpu((0, 0))),
    machine_boundary("PRC006", FP8, on_gpu((8, 9)), on_gpu((8, 8))),
    machine_boundary("PRC006", FP8, on_gpu((8, 9)), on_gpu((0, 0))),
    boundary("PRC006", FP8, {"precision.fp8_backend": "torchao"}, {"precision.fp8_backend": "te"}, machine=EQUIPPED),
    machine_boundary("PRC013", COMPILED_FP32, on_gpu((7, 9)), on_gpu((8, 0))),
    machine_boundary("KRN003", FLASH_2, on_gpu((8, 0)), on_gpu((7, 9))),
    machine_boundary("KRN003", FLASH_2, on_gpu((0, 0)), on_gpu((0, 1))),
    machine_boundary("KRN003", FLASH_3, on_gpu((8, 0)), on_gpu((7, 9))),
    machine_boundary("KRN003", FLASH_3, on_gpu((9, 0)), on_gpu((9, 1))),
    machine_boundary("QNT008", {"method.quantization": "int8"}, on_gpu((7, 5)), on_gpu((7, 4))),
    # The model
    facts_boundary("KRN005", FLASH_2, shaped(head_dim=256), shaped(head_dim=264), machine=on_gpu((9, 0))),
    facts_boundary("KRN005", FLASH_2, shaped(head_dim=64), shaped(head_dim=65), machine=on_gpu((9, 0))),
    facts_boundary("KRN008", LIGER, shaped(model_type="qwen3_moe"), shaped(model_type="qwen2_moe"), machine=LIGER_H100),
    Boundary("KRN008", Setup(LIGER, replace(LIGER_H100, versions={"liger-kernel": "0.8.6"}), shaped(model_type="olmo")),
             Setup(LIGER, LIGER_H100, shaped(model_type="olmo")), words="kernels for the model type olmo"),
    boundary("KRN012", {"parallel.strategy": "zero2"}, {}, {"parallel.sequence_parallel_size": 2}, machine=TWO_H100,
             facts=shaped(unsupported_attentions=("sdpa",))),
    facts_boundary("PRC011", FP8, shaped(hidden=592), shaped(hidden=584), machine=EQUIPPED_H100),
    boundary("OPT010", GALORE, {"train.projection_rank": SMOL.hidden - 1}, {"train.projection_rank": SMOL.hidden},
             machine=EQUIPPED),
    boundary("OPT024", REVERSE, {"train.projection_rank": WIDE - 1}, {"train.projection_rank": WIDE}, machine=EQUIPPED),
    facts_boundary("QNT018", {"method.quantization": "nf4"}, DEMO, replace(DEMO, shape=MOE), machine=H100),
    # Optimizers
    boundary("OPT004", {**LAYERWISE, **DDP}, {PROCESSES: 1}, {PROCESSES: 2}, machine=EQUIPPED),
    boundary("OPT004", {**LAYERWISE, **STATIC, PROCESSES: 1}, {"launch.nnodes": 1}, {"launch.nnodes": 2},
             machine=EQUIPPED, words="this run uses DDP with 2 processes"),
    boundary("OPT005", LAYERWISE, {ACCUMULATION: 1}, {ACCUMULATION: 2}, machine=EQUIPPED),
    boundary("OPT012", {"train.optim": "lion_32bit"}, {RATE: 1e-4}, {RATE: 1.01e-4}, machine=EQUIPPED),
    boundary("OPT012", {**FULL, "train.optim": "paged_lion_8bit"}, {RATE: 1e-5}, {RATE: 1.01e-5}, machine=EQUIPPED,
             words="is 1.01e-5; for Lion and full fine-tuning, at most 1e-5 is"),
    boundary("OPT012", {"method.kind": "freeze", "train.optim": "lion_8bit"}, {RATE: 1e-5},
             {RATE: 1.01e-5}, machine=EQUIPPED),
    boundary("OPT013", {"train.optim": "sgd"}, {RATE: 1e-3}, {RATE: 0.99e-3}, words="is 9.9e-4; for SGD, at least"),
    boundary("OPT014", {"train.optim": "adafactor"}, {"train.max_grad_norm": 0.0}, {"train.max_grad_norm": 0.01}),
    boundary("OPT018", BADAM, {"train.max_steps": 10 * SMOL.layers}, {"train.max_steps": 10 * SMOL.layers - 1},
             machine=EQUIPPED),
    *(boundary("OPT018", {**BADAM, "method.kind": "freeze", "method.freeze_trainable_layers": layers},
               {"train.max_steps": 10 * count}, {"train.max_steps": 10 * count - 1}, machine=EQUIPPED, words=words)
      for layers, count, words in ((-2, 2, "2 trained layers with 10 steps each"), (1, 1, "1 trained layer with"))),
    boundary("OPT021", {**FULL, "train.optim": "adagrad"}, {"parallel.strategy": "zero0"},
             {"parallel.strategy": "zero1"}, machine=EQUIPPED_TWO),
    boundary("OPT025", MUON, {"lora.r": 4}, {"lora.r": 3}),
    boundary("OPT025", {**MUON, "lora.r": 2}, {"parallel.replicate_size": 2}, {"parallel.replicate_size": 1}),
    boundary("OPT026", MINI, {PROCESSES: 3}, {PROCESSES: 9}, machine=EQUIPPED),
    boundary("OPT026", MINI, {PROCESSES: 2, "parallel.replicate_size": 4}, {PROCESSES: 9}, machine=EQUIPPED),
    # RWKV has keys, but no attention, so its heads have size 0.
    facts_boundary("OPT029", {**MINI, "parallel.strategy": "single"},
                   shaped(heads=0, head_dim=0, layer=(ModuleSpec("attention.key", 576 * 576, 576, 576),)),
                   replace(DEMO, model_type="gemma4_text"), words="heads of gemma4_text differ", machine=EQUIPPED),
    facts_boundary("OPT026", {**MINI, PROCESSES: 2}, shaped(heads=4, kv_heads=2),
                   shaped(heads=3, kv_heads=2), machine=EQUIPPED),
    Boundary("OPT013", Setup({"train.optim": "rmsprop", RATE: 1e-5}), Setup({**FULL, "train.optim": "lomo"}, EQUIPPED)),
    *(Boundary(code, Setup({**patch, "train.optim": optim, RATE: 0.05}, EQUIPPED), Setup({**patch, RATE: 0.05}))
      for code, patch in (("MTH010", FULL), ("STG008", {**FULL, "train.stage": "dpo"}))
      for optim in ("sgd", "sgd_momentum", "schedule_free_sgd", "lomo")),  # for which OPT013 advises such a rate
    boundary("OPT019", {"train.optim": "adamw_torch_8bit", **FSDP2}, {}, {"parallel.cpu_offload": True},
             machine=replace(EQUIPPED_TWO, has_cpp_compiler=False)),
    boundary("KRN011", REWARD, {}, {"model.attn_implementation": "flex_attention"},
             machine=replace(H100, triton_can_compile=False)),
    # Launch
    boundary("LCH001", {**DDP, "launch.launcher": "python"}, {PROCESSES: 1}, {PROCESSES: 2}),
    boundary("LCH002", DDP, {PROCESSES: 2}, {PROCESSES: 3}, machine=TWO_H100),
    boundary("LCH002", DDP, {PROCESSES: 1}, {PROCESSES: 2}, machine=replace(LAPTOP, device="mps")),
    boundary("LCH003", {}, {"launch.devices": (1,)}, {"launch.devices": (2,)}, machine=TWO_H100),
    boundary("LCH004", DDP, {"launch.devices": (1, 0)}, {"launch.devices": (1, 0, 1)}, machine=TWO_H100),
    boundary("LCH005", {**DDP, "launch.devices": (0, 1)}, {PROCESSES: 2}, {PROCESSES: 3},
             machine=gpus(3, "H100", 80, (9, 0))),
    boundary("LCH005", {**DDP, PROCESSES: 2}, {"launch.devices": (0, 0)}, {"launch.devices": (0,)}, machine=TWO_H100),
    boundary("LCH006", {**DDP, "launch.devices": (0, 1)}, {PROCESSES: 2}, {PROCESSES: 1}, machine=TWO_H100),
    boundary("LCH007", DDP, {PROCESSES: 2}, {PROCESSES: 1}),
    boundary("LCH018", {}, {}, {"launch.launcher": "deepspeed"}, {"launch.launcher": "torchrun"}, machine=MIG),
    boundary("LCH008", {**DDP, PROCESSES: 2}, {"launch.omp_num_threads": 4}, {"launch.omp_num_threads": 5}),
    boundary("LCH009", DDP, {PROCESSES: 8}, {PROCESSES: 9}),
    boundary("LCH008", {**DDP, **ON_SLURM, PROCESSES: 2, "slurm.cpus": 6}, {"launch.omp_num_threads": 3},
             {"launch.omp_num_threads": 4}, {"slurm.cpus": 8}, {"launch.omp_num_threads": 0}, words="has 6 CPUs"),
    boundary("LCH008", {**DDP, **ON_SLURM, PROCESSES: 1}, {"launch.omp_num_threads": 16},  # half of 32, as of the GPUs
             {"launch.omp_num_threads": 17}, machine=TWO_H100),
    *(boundary("LCH009", {**DDP, "launch.place": place, "launch.device": "cpu", f"{place}.cpus": 2}, {PROCESSES: 2},
               {PROCESSES: 3}, {f"{place}.cpus": 3}, {PROCESSES: 2}, words="the job has 2 CPUs on each node")
      for place in ("slurm", "ray", "kubernetes")),
    Boundary("LCH013", accelerate({"main_process_port": 1234}),
             accelerate({"main_process_port": 1234}, **{**STATIC, "launch.nnodes": 2})),
    Boundary("LCH013", accelerate(PDSH, **ZERO2), accelerate(PDSH, **{**STATIC, **ZERO2, "launch.nnodes": 2})),
    boundary("LCH011", {"launch.launcher": "deepspeed", **DDP}, {"launch.env": {"CUDA_VISIBLE_DEVICES": "1"}},
             {"launch.env": {"HIP_VISIBLE_DEVICES": "1"}}),
    boundary("LCH011", {**DDP, "launch.env": {"CUDA_VISIBLE_DEVICES": "1"}}, {"launch.launcher": "deepspeed"},
             {"launch.launcher": "torchrun"}, machine=TWO_H100),
    # Nodes
    boundary("NOD001", STATIC, {"launch.node_rank": 1}, {"launch.node_rank": 2}),
    boundary("NOD002", {**STATIC, "launch.master_addr": ""}, {"launch.nnodes": 1}, {"launch.nnodes": 2}),
    boundary("NOD003", {**STATIC, "launch.master_addr": "localhost"}, {"launch.nnodes": 1}, {"launch.nnodes": 2}),
    boundary("NOD003", STATIC, {"launch.master_addr": "128.0.0.1"}, {"launch.master_addr": "127.255.255.255"}),
    boundary("NOD003", STATIC, {"launch.master_addr": "fe80::1"}, {"launch.master_addr": "::"}),
    boundary("NOD002", STATIC, {"launch.master_addr": "fe80::1"}, {"launch.master_addr": "fe80::1%eth0"}),
    boundary("NOD004", ELASTIC, {"launch.min_nnodes": 4}, {"launch.min_nnodes": 5}),
    boundary("NOD006", {**CHECKPOINTS, PROCESSES: 1}, {"launch.min_nnodes": 2}, {"launch.min_nnodes": 1}),
    boundary("NOD006", {**ELASTIC, "parallel.strategy": "zero0"}, {"launch.min_nnodes": 4}, {"launch.min_nnodes": 3}),
    boundary("NOD006", {**CHECKPOINTS, "parallel.replicate_size": 2, "launch.min_nnodes": 1},
             {PROCESSES: 4}, {PROCESSES: 2}),
    boundary("NOD006", {**CHECKPOINTS, "parallel.replicate_size": 2, "launch.min_nnodes": 2},
             {PROCESSES: 2}, {PROCESSES: 3}),
    boundary("NOD006", {**CHECKPOINTS, "parallel.context_parallel_size": 2, "launch.min_nnodes": 1},
             {PROCESSES: 4}, {PROCESSES: 2}),
    boundary("NOD006", {**CHECKPOINTS, "parallel.strategy": "fsdp1", "launch.min_nnodes": 1},
             {PROCESSES: 2}, {PROCESSES: 1}),
    boundary("NOD007", ELASTIC, {"launch.min_nnodes": 4}, {"launch.min_nnodes": 3}),
    boundary("NOD009", {**HOSTS, "launch.hostfile": ("a",)}, {"launch.nnodes": 1}, {"launch.nnodes": 2}),
    boundary("NOD011", HOSTS, {}, {"launch.nnodes": 3}),
    boundary("NOD011", HOSTS, {}, {PROCESSES: 3}),
)  # fmt: skip


@pytest.mark.parametrize("row", BOUNDARIES, ids=str)
def test_boundary(row: Boundary) -> None:
    row.check()


# The failing case of a rule, and what its first fixes set; []: it has none.
FIXES: tuple[tuple[str, Setup, list[dict[str, Any]]], ...] = (
    ("HW008", Setup({}, replace(TWO_H100, gpus=(BUSY[0], TWO_H100.gpus[1]))), [{"launch.devices": (1,)}]),
    ("HW008", Setup({}, replace(TWO_H100, gpus=BUSY)), []),
    ("OPT005", Setup({**LAYERWISE, ACCUMULATION: 3, "train.per_device_train_batch_size": 5}, EQUIPPED),
     [{ACCUMULATION: 1, "train.per_device_train_batch_size": 15}, {ACCUMULATION: 1}]),
    ("OPT010", Setup({**GALORE, "train.projection_rank": 1024}, EQUIPPED), [{"train.projection_rank": 144}]),
    ("OPT011", Setup({"train.optim": "paged_adamw_8bit"}, EQUIPPED), [{"train.optim": "adamw_bnb_8bit"}]),
    ("OPT012", Setup({"train.optim": "lion_32bit"}, EQUIPPED), [{RATE: 5e-5}]),
    ("OPT012", Setup({**FULL, "train.optim": "lion_32bit", RATE: 1e-3}, EQUIPPED), [{RATE: 5e-6}]),
    ("OPT013", Setup({"train.optim": "sgd"}), [{RATE: 0.05}]),
    ("OPT018", Setup({**BADAM, "train.max_steps": 3 * SMOL.layers}, EQUIPPED), [{"train.badam_switch_block_every": 3}]),
    ("OPT018", Setup({**BADAM, "train.max_steps": SMOL.layers - 1}, EQUIPPED), []),
    ("OPT024", Setup({**REVERSE, "train.projection_rank": WIDE}, EQUIPPED),
     [{"train.galore_proj_type": "std"}, {"train.projection_rank": WIDE // 4}]),
    ("LCH002", Setup({**DDP, PROCESSES: 4}, TWO_H100), [{PROCESSES: 2, ACCUMULATION: 2}]),
    ("LCH002", Setup({**DDP, PROCESSES: 3, ACCUMULATION: 1}, TWO_H100), [{PROCESSES: 2}]),
    ("LCH002", Setup({**DDP, PROCESSES: 4, "launch.devices": (0, 1, 2)}, TWO_H100),
     [{PROCESSES: 2, ACCUMULATION: 2, "launch.devices": (0, 1)}]),
    ("LCH002", Setup({**DDP, PROCESSES: 4, "launch.devices": (1, 0)}, TWO_H100), [{PROCESSES: 2, ACCUMULATION: 2}]),
    ("LCH002", Setup({**DDP, PROCESSES: 2}, H100), [{"parallel.strategy": "single", ACCUMULATION: 2}]),
    ("LCH003", Setup({**DDP, PROCESSES: 3, "launch.devices": (0, 1, 2)}, TWO_H100),
     [{"launch.devices": (), PROCESSES: 2}]),
    ("LCH003", Setup({**DDP, PROCESSES: 2, "launch.devices": (0, 2)}, TWO_H100), [{"launch.devices": ()}]),
    ("LCH003", Setup({**DDP, PROCESSES: 2, "launch.devices": (0, 1)}, H100),
     [{"parallel.strategy": "single", "launch.devices": (), ACCUMULATION: 2}]),
    ("LCH003", Setup({"launch.devices": (0, 9)}, TWO_H100), [{"launch.devices": (0,)}, {"launch.devices": ()}]),
    ("LCH004", Setup({**DDP, "launch.devices": (1, 0, 1), PROCESSES: 2}, TWO_H100), [{"launch.devices": (1, 0)}]),
    ("LCH004", Setup({**DDP, "launch.devices": (1, 1), PROCESSES: 2}, TWO_H100), [{"launch.devices": ()}]),
    ("LCH005", Setup({**DDP, "launch.devices": (0, 1), PROCESSES: 3}, gpus(3, "H100", 80, (9, 0))),
     [{"launch.devices": ()}, {PROCESSES: 2}]),
    ("LCH005", Setup({**DDP, "launch.devices": (0, 1), PROCESSES: 4}, TWO_H100), [{PROCESSES: 2, ACCUMULATION: 2}]),
    ("LCH005", Setup({**DDP, "launch.devices": (1,), PROCESSES: 2}, H100),
     [{"parallel.strategy": "single", ACCUMULATION: 2}]),
    ("LCH009", Setup({**DDP, PROCESSES: 16}), [{PROCESSES: 8, ACCUMULATION: 2}]),
    ("LCH009", Setup({**DDP, PROCESSES: 2}, replace(LAPTOP, cores=1)),
     [{"parallel.strategy": "single", ACCUMULATION: 2}]),
    ("NOD008", Setup({**ELASTIC, "save.strategy": "steps", "save.only_model": True}), [{"save.only_model": False}]),
    ("NOD008", Setup({**ELASTIC, "save.strategy": "no"}),
     [{"save.only_model": False, "save.strategy": "steps", "save.steps": RunSpec().save.steps,
     "save.total_limit": RunSpec().save.total_limit}]),
    ("NOD008",
     Setup({**ELASTIC, "save.strategy": "steps", "save.only_model": True}, replace(LAPTOP, disk_free_bytes=0)), []),
    ("NOD011", Setup({**HOSTS, "launch.nnodes": 3}), [{"launch.nnodes": 2, PROCESSES: 2}]),
    ("NOD011", Setup({**HOSTS, "launch.hostfile": ("a slots=2",)}), []),
    ("NOD011", Setup({**HOSTS, "launch.hostfile": ("a slots=2", "b slots=1")}), []),
    ("NOD015", Setup(STATIC, replace(LAPTOP, name=""), replace(DEMO, port_in_use=29500, free_port=0)), []),
)  # fmt: skip


@pytest.mark.parametrize(("code", "setup", "patches"), FIXES)
def test_fixes_set_these_values(code: str, setup: Setup, patches: list[dict[str, Any]]) -> None:
    found = setup.finding(code)
    assert found is not None
    assert [dict(fix.patch) for fix in found.fixes][: len(patches) or None] == patches


def test_safety_of_fixes_that_keep_the_batch_size() -> None:
    even = Setup({**DDP, PROCESSES: 4}, TWO_H100).finding("LCH002")
    odd = Setup({**DDP, PROCESSES: 3, ACCUMULATION: 1}, TWO_H100).finding("LCH002")
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
        found = Setup({**DDP, PROCESSES: processes}, on).finding("HW008")
        assert found is not None and found.fixes[0].label == label
    for workers, words in ((1, "1 DataLoader worker "), (2, "2 DataLoader workers ")):
        found = Setup({"train.dataloader_num_workers": workers}, replace(LAPTOP, shm_free_bytes=0)).finding("HW009")
        assert found is not None and words in found.message


def test_global_batch_size_with_the_fewest_nodes() -> None:
    found = Setup({**ELASTIC, PROCESSES: 2, "launch.min_nnodes": 3}).finding("NOD007")
    assert found is not None
    assert found.message == "The global batch size is 32 examples with 4 nodes and 24 with 3."


# A case, and words of its message that depend on a count.
WORDS = (
    ("HW004", Setup({"logging.report_to": "wandb"}), "the package wandb, which is not installed"),
    ("HW002", Setup(machine=replace(LAPTOP, versions={k: v for k, v in INSTALLED.items() if k not in ("trl", "peft")})),
     "the packages peft and trl, which are not installed"),
    ("OPT002", Setup({**GALORE, "train.optim": "galore_adamw_8bit"}, EQUIPPED), "only the device type CUDA"),
    ("KRN006", Setup({"train.use_liger_kernel": True}), "only the device types CUDA"),
    ("PRC005", Setup(TF32, on_gpu((7, 9))), "GPU 0 (GPU) has 7.9."),
    ("PRC005", Setup(TF32, on_gpu((0, 0))), "GPU 0 (GPU) has none."),
    ("OPT018", Setup({**BADAM, "train.max_steps": 100}, EQUIPPED), "need 300 steps; the run has 100 steps."),
    ("OPT023", Setup({**GALORE, "train.optim_targets": "custom", "train.optim_target_modules": ("foo",)}, EQUIPPED),
     "GaLore would project foo;"),
    ("NOD006", Setup({**ELASTIC, "parallel.strategy": "zero2", "train.optim": "sgd", "method.kind": "full"}),
     "ZeRO-2 checkpoints with an optimizer other than AdamW cannot be resumed on 1 node."),
    ("NOD006", Setup({**ELASTIC, "parallel.strategy": "zero0"}), "ZeRO-0 checkpoints cannot be resumed on 1 node."),
)  # fmt: skip


@pytest.mark.parametrize(("code", "setup", "words"), WORDS)
def test_words_of_messages(code: str, setup: Setup, words: str) -> None:
    found = setup.finding(code)
    assert found is not None
    assert words in found.message


def test_share_of_experts() -> None:
    found = Setup({"method.quantization": "nf4"}, H100, replace(DEMO, shape=MOE)).finding("QNT018")
    assert found is not None and "93% of the model's weights" in found.message


@pytest.mark.parametrize(("experts", "ranks", "is_split"), [(4, 3, True), (4, 2, False), (128, 3, True), (4, 8, True)])
def test_shards_that_end_within_an_expert(experts: int, ranks: int, is_split: bool) -> None:
    """Launched with FSDP2 on three CPU processes: peft cannot reshape the shards of four experts."""
    layer = tuple(replace(leaf, stacked=experts) if leaf.stacked > 1 else leaf for leaf in MOE.layer)
    facts = replace(KNOWN_MOE, shape=replace(MOE, layer=layer))
    patch = {"parallel.strategy": "fsdp2", "launch.nproc_per_node": ranks, "save.merge_adapter": True}
    machine, lora = gpus(8, "H100", 80, (9, 0)), {**patch, "method.kind": "lora", "lora.targets": "custom"}
    found = Setup({**lora, "lora.target_modules": EXPERT_LAYERS}, machine, facts)
    assert (found.finding("STR004") is not None) == is_split
    attention = Setup({**lora, "lora.target_modules": ("q_proj",)}, machine, facts)
    assert attention.finding("STR004") is None


def test_experts_in_some_layers_only() -> None:
    """As in Llama 4 Maverick and Nemotron-H, where the most frequent kind of layer has no experts."""
    dense = tuple(leaf for leaf in MOE.layer if not leaf.stacked)
    kinds, numbers = (dense, MOE.layer), (0,) * (MOE.layers - 4) + (1,) * 4
    shape = replace(MOE, layer=dense, layer_kinds=kinds, layer_kind_indices=numbers, experts=0)
    found = Setup({"method.quantization": "nf4"}, H100, replace(DEMO, shape=shape)).finding("QNT018")
    assert found is not None and "of the model's weights (the experts)" in found.message
    facts = replace(KNOWN_MOE, shape=shape)
    patch = {"parallel.strategy": "fsdp2", "launch.nproc_per_node": 3, "save.merge_adapter": True}
    lora = {"method.kind": "lora", "lora.targets": "custom", "lora.target_modules": EXPERT_LAYERS}
    merged = Setup({**lora, **patch}, gpus(8, "H100", 80, (9, 0)), facts)
    assert merged.finding("STR004") is not None and merged.finding("ADP009") is not None


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


@pytest.mark.parametrize(
    ("patch", "words"),
    [
        ({**FULL, "train.stage": "reward"}, "the head of the reward model"),
        ({"lora.modules_to_save": ("lm_head", "norm")}, "lm_head and norm"),
        ({"method.kind": "freeze", "method.freeze_extra_modules": ("norm", "input_layernorm")}, "train norm, which"),
        ({"method.kind": "freeze", "method.freeze_extra_modules": ("input_layernorm",)}, ""),
        ({**FULL, "data.add_special_tokens": ("<a>",)}, "the embeddings of added tokens"),
        (FULL, ""),
        ({}, ""),
    ],
)
def test_what_badam_does_not_train(patch: Patch, words: str) -> None:
    found = Setup({**patch, "train.optim": "badam"}, EQUIPPED).finding("OPT033")
    assert words in found.message if words and found else found is None and not words
