"""Why the time of a run is not predicted: where no number would be honest, the reason is given instead."""

from __future__ import annotations

from backend import registry
from backend.config import RunSpec
from backend.inspect import CpuSpeed, InputFacts
from backend.machine import Machine
from backend.memory import MemoryContext
from backend.memory.quantized import bits
from backend.modelspec import lora_modules
from backend.resolve import ResolvedRun, estimated_gpus
from backend.wording import counted

MAX_GPUS = 100  # without a measured network: slow nodes and switches decide about larger clusters
UNKNOWN_OPTIMIZERS = ("low_rank", "matrix_momentum", "one_block")  # layouts whose steps compute more than they move
MEASURED_BITS = 4  # bits of quantized weights whose speed was measured
LINEAR_ATTENTION = ("linear_attn", "mamba", "ssm", "rwkv", "conv1d", "recurrent")  # parts of the names of modules


def _cpu_reason(run: ResolvedRun, machine: Machine, cpu: CpuSpeed | None) -> str:
    if run.nnodes > 1:
        return "the network between the nodes was not measured"
    if cpu is None and machine.name:
        return f"the CPU of {machine.name} cannot be measured from this machine"
    if cpu is None:
        return "the speed of the CPU has not been measured yet (`footplate estimate` measures the CPU of this machine)"
    if cpu.processes != run.nproc_per_node:
        return f"the CPU was measured with {counted(cpu.processes, 'process')}, and this run has {run.nproc_per_node}"
    return ""


def device_reason(run: ResolvedRun, machine: Machine, facts: InputFacts) -> str:
    """Why nothing is known about the devices, the end of a sentence; '' if something is."""
    if run.device == "cpu":
        return facts.cpu_unknown or _cpu_reason(run, machine, facts.cpu)
    if run.device != "cuda":
        return f"training on this device type ({registry.DEVICES[run.device].label}) was not compared with measurements"
    gpus = estimated_gpus(run, machine)
    if not gpus:
        return "the machine has none of the GPUs that the run uses"
    for gpu in gpus:
        model = registry.gpu_model(gpu.name)
        if model is None:
            return f"the rates of {gpu.name} are not known"
        if not model.generation:
            return f"no published training on {gpu.name} was compared with the estimate"
        if not {"bf16": model.bf16, "fp16": model.fp16}.get(run.compute_dtype):
            return f"the rate of {gpu.name} in {run.compute_dtype} is not known"
    if run.world_size > MAX_GPUS and run.nnodes > 1 and not machine.network_rate:
        return f"more than {MAX_GPUS} GPUs need a measured network bandwidth (network_gb_per_s of the machine)"
    return ""


def run_reason(spec: RunSpec, facts: InputFacts) -> str:
    """Why nothing is known about the trainer or the model, the end of a sentence; '' if something is."""
    shape = facts.shape
    if shape is None:
        return facts.shape_unknown_reason
    if spec.other_backend:
        return "LLaMA-Factory's Megatron-Core and KTransformers were not compared with measurements"
    if any(word in leaf.path for leaf in shape.layer_modules for word in LINEAR_ATTENTION):
        return "layers with linear attention or recurrence depend on kernels that were not measured"
    if not (shape.layers and shape.layer and shape.heads):
        return "models without attention or without a list of layers were not compared with measurements"
    if shape.weight_bits and facts.quant_method not in ("", "bitsandbytes"):
        return f"the kernels for {facts.quant_method} checkpoints were not compared with measurements"
    if bits(spec, shape) > MEASURED_BITS:
        return "8-bit weights (LLM.int8) were not compared with measurements"
    if spec.precision.compute == "fp8":
        return "fp8 was not compared with measurements"
    return ""


def step_reason(ctx: MemoryContext) -> str:
    """Why the time of a step is not known although device and model are, the end of a sentence; '' if it is."""
    if ctx.optimizer_offload or ctx.param_offload or ctx.spec.parallel.cpu_offload or ctx.optimizer_is_on_host:
        return "offloading depends on rates of host RAM, CPU and NVMe, which were not measured"
    if ctx.optimizer.row.paged:
        return "how much of a paged optimizer's state moves to host RAM is not known before the run"
    if ctx.optimizer.row.state_layout in UNKNOWN_OPTIMIZERS:
        return f"the time of a step of {ctx.optimizer.row.label} was not measured"
    is_zero3 = ctx.run.parameter_shards > 1 and not ctx.gathers_layers and ctx.run.tensor_parallel_size == 1
    if ctx.shape.most_experts and is_zero3:
        return "ZeRO-3 gathers each expert on its own, which can take many times the time of computing"
    if ctx.is_lora and any(leaf.stacked > 1 for leaf in lora_modules(ctx.spec.lora, ctx.shape)):
        return "adapters on experts were not measured"
    return ""
