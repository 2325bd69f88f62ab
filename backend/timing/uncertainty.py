"""How far the real time may be from the prediction, by what takes most of a step (docs/time.md has the shares of
published runs that lie within the range)."""

from __future__ import annotations

from backend import registry
from backend.modelspec import ARCHITECTURES
from backend.timing.context import TimeContext

ONE_GPU, SEVERAL_GPUS, CPU, BUSY_CPU = 1.3, 1.45, 1.4, 2.0
LONG_ATTENTION, WAITING, LONGEST_ATTENTION, UNCOMPARED = 1.5, 1.7, 1.8, 2.0
# Shares of a step from which a range is as wide as it gets.
MUCH_ATTENTION, MOST_ATTENTION, MUCH_WAITING, SOME_WAITING = 0.3, 0.4, 0.3, 0.1
CPU_EXPERTS, FEW_TOKENS = 2.5, 256  # as docs/time.md has them for CPUs; tokens in a batch
CPU_LIMIT = 0.5  # what the CPU needs for a batch, as a share of the batch, from which the range is WAITING


def step_range(ctx: TimeContext, waiting: float, host: float, attention: float) -> tuple[float, str]:
    """(a factor: the real time is between the prediction divided by it and multiplied by it, the reason). `waiting`,
    `host`, `attention`: shares of a step that wait for other GPUs, that the CPU needs, and of attention."""
    found = _cpu_ranges(ctx) if ctx.cpu else _gpu_ranges(ctx, waiting, host)
    for width, limit in ((LONG_ATTENTION, MUCH_ATTENTION), (LONGEST_ATTENTION, MOST_ATTENTION)):
        found.append((_up_to(width, attention, limit), "attention over long sequences takes much of a step"))
    found.append((_up_to(WAITING, waiting, MUCH_WAITING), "communication takes much of a step"))
    return max([*found, *_uncompared(ctx)], key=lambda each: each[0])


def _up_to(width: float, share: float, limit: float) -> float:
    """`width` from the share `limit` on, and in proportion below: a step that another part makes shorter, such as a
    faster optimizer, has a larger share of this one, and its range must not reach further up for that."""
    return width * min(1.0, share / limit)


def _gpu_ranges(ctx: TimeContext, waiting: float, host: float) -> list[tuple[float, str]]:
    found = [(ONE_GPU, "published speeds on one GPU differ this much from the prediction")]
    if ctx.links.assumed:
        width = max(SEVERAL_GPUS, _up_to(WAITING, waiting, SOME_WAITING))
        found.append((width, f"the estimate assumes {ctx.links.assumed}"))
    if ctx.memory.run.world_size > 1:
        found.append((SEVERAL_GPUS, "how long several GPUs wait for each other is hard to predict"))
    found.append((_up_to(WAITING, host, CPU_LIMIT), "the CPU needs much of the time of a batch"))
    return found


def _cpu_ranges(ctx: TimeContext) -> list[tuple[float, str]]:
    found = [(CPU, "it was predicted from a short benchmark of this CPU")]
    if ctx.cpu and ctx.cpu.is_busy:
        found.append((BUSY_CPU, "other programs use the CPU"))
    if ctx.tokens < FEW_TOKENS:
        found.append((WAITING, "batches of few tokens took longer than predicted on CPUs"))
    return found


def _uncompared(ctx: TimeContext) -> list[tuple[float, str]]:
    """What was not compared with measurements."""
    memory, found = ctx.memory, []
    if memory.shape.model_type not in ARCHITECTURES or memory.shape.activations_unknown:
        found.append((UNCOMPARED, "this architecture was not compared with measurements"))
    if memory.shape.most_experts:
        width = CPU_EXPERTS if ctx.cpu else UNCOMPARED
        found.append((width, "the speed of mixture-of-experts models depends on their kernels"))
    if memory.spec.train.stage not in registry.NEXT_TOKEN_STAGES:
        found.append((UNCOMPARED, "preference and reward training was not compared with measurements"))
    if ctx.cpu and memory.spec.train.torch_compile:
        found.append((UNCOMPARED, "torch.compile on a CPU was not compared with measurements"))
    if ctx.cpu and memory.quantized_count:
        found.append((UNCOMPARED, "quantized weights on a CPU were not compared with measurements"))
    if ctx.cpu and memory.is_lora and memory.spec.lora.use_dora:
        found.append((UNCOMPARED, "DoRA on a CPU was not compared with measurements"))
    if memory.spec.launch.trainer != "footplate":
        found.append((UNCOMPARED, "LLaMA-Factory's own kernels are not modeled"))
    return found
