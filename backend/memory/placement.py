"""What each device of a run holds, and what it shares or exchanges with which other devices: the data of the placement
picture."""

from __future__ import annotations

from typing import Any

from backend import registry
from backend.config import RunSpec
from backend.memory.communication import host_bytes, network_bytes
from backend.memory.context import MemoryContext
from backend.memory.estimate import Estimate
from backend.memory.groups import Group, groups, sharded_state
from backend.memory.kinds import bytes_by_kind, kind_label
from backend.resolve import ResolvedRun
from backend.wording import plural


def placement(spec: RunSpec, run: ResolvedRun, estimate: Estimate, ctx: MemoryContext | None) -> dict[str, Any]:
    """Nodes, device ids and processes of a run; what a device holds at its peak, by kind; its process groups, each with
    the bytes that a device sends to the others of its group per optimizer step, None if that is not known; the bytes
    that it exchanges with host RAM per step. `ctx` is None if the model's shape is not known."""
    known = ctx is not None and not spec.other_backend
    sent = network_bytes(ctx) if ctx and known else {}
    noun, sizes = registry.DEVICES[run.device].noun, bytes_by_kind(estimate.rows)
    return {
        "noun": noun,
        "plural": plural(noun),
        "nodes": run.nnodes,
        "per_node": run.nproc_per_node,
        "ids": list(run.device_ids),
        "kinds": [{"kind": k, "label": kind_label(k, run.device), "bytes": size} for k, size in sizes.items()],
        "groups": [
            {
                "name": group.name, "size": group.size, "stride": group.stride, "text": _text(group, run),
                "bytes": sent.get(group.name, 0) if known else None,
            }
            for group in (groups(spec, run) if not ctx or known else [])
        ],
        "host_bytes": host_bytes(ctx) if ctx and known and not ctx.on_cpu else 0,
    }  # fmt: skip


def _text(group: Group, run: ResolvedRun) -> str:
    """What a device does with the others of a group: completes "With ranks 0 to 7 it ..." and "In groups of 8, each GPU
    ..."."""
    parts = sharded_state(run)
    state = " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]])) if parts else ""
    return {
        "tensor": "holds a shard of every weight matrix (tensor parallelism)",
        "context": "splits the tokens of each sequence (context parallelism)",
        "sequence": "splits the tokens of each sequence (sequence parallelism)",
        "shard": f"shards {state}",
        "replicate": "averages gradients",
    }[group.name]
