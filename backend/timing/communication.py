"""Seconds that devices need to send what `memory.communication` counts.

Ring collectives send at the rate of the slowest link: between the GPUs of a node, or between nodes, whose network all
groups of a node share.
"""

from __future__ import annotations

from dataclasses import dataclass

from backend.memory.communication import network_bytes
from backend.memory.groups import Group, groups
from backend.timing.context import TimeContext

BLOCKING = ("tensor", "context", "sequence")  # groups whose collectives the next operation waits for


@dataclass(frozen=True)
class Communication:
    """Seconds of one optimizer step: `blocking` ones, and others that computing can hide. `rounds`: in how many batches
    of a step the other communication happens; `between_nodes`: whether some of it crosses nodes."""

    blocking: float
    hidden: float
    rounds: int
    between_nodes: bool
    bytes: int


def communication(ctx: TimeContext) -> Communication:
    """What the devices of a run send in an optimizer step."""
    memory = ctx.memory
    sent = network_bytes(memory)
    kinds = {group.name: group for group in groups(memory.spec, memory.run)}
    seconds = {name: _seconds(ctx, kinds[name], size) for name, size in sent.items() if name in kinds and size}
    batches = memory.spec.train.gradient_accumulation_steps
    each_batch = memory.run.parameter_shards > 1 or memory.engine.reduces_each_batch(memory.spec)
    return Communication(
        sum(value for name, value in seconds.items() if name in BLOCKING),
        sum(value for name, value in seconds.items() if name not in BLOCKING),
        batches if each_batch else 1,
        any(_nodes(ctx, kinds[name]) > 1 for name in seconds),
        sum(sent.values()),
    )


def _seconds(ctx: TimeContext, group: Group, size: int) -> float:
    """Seconds in which a device sends `size` bytes to the others of its group."""
    nodes, links = _nodes(ctx, group), ctx.links
    per_node = max(1, group.size // nodes)
    inside = size / links.inside if per_node > 1 else 0.0
    if nodes == 1:
        return inside
    # All groups of a node share its network; one in `per_node` links of a ring through several nodes crosses it.
    whole = size * group.size / (group.size - 1)
    crossing = whole * (nodes - 1) / nodes * ctx.memory.run.nproc_per_node / per_node
    return max(inside, crossing / links.between)


def _nodes(ctx: TimeContext, group: Group) -> int:
    """Nodes that a group spans."""
    return max(1, min(ctx.memory.run.nnodes, -(-group.size * group.stride // ctx.memory.run.nproc_per_node)))
