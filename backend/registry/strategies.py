"""Distributed strategies, and the values of their options."""

from __future__ import annotations

from collections.abc import Mapping

from backend.registry.types import Choice, Strategy


def _zero(stage: int, help: str) -> Strategy:
    return Strategy(
        f"ZeRO-{stage}", help, package="deepspeed", engine="deepspeed", zero_stage=stage, shards_weights=stage == 3
    )


STRATEGIES: Mapping[str, Strategy] = {
    "single": Strategy("Single process", "One device, no communication."),
    "ddp": Strategy("DDP", "A full copy of the model on each device; gradients are averaged.", engine="ddp"),
    "zero0": _zero(0, "DeepSpeed engine with a full copy on each device: a baseline for the other ZeRO stages."),
    "zero1": _zero(1, "DeepSpeed shards the optimizer state over the devices."),
    "zero2": _zero(2, "DeepSpeed shards optimizer state and gradients."),
    "zero3": _zero(
        3, "DeepSpeed shards the weights too and gathers them layer by layer: least memory, most communication."
    ),
    "fsdp2": Strategy(
        "FSDP2",
        "PyTorch shards weights, gradients and optimizer state and gathers the weights layer by layer.",
        engine="fsdp",
        fsdp_version=2,
        shards_weights=True,
    ),
    "fsdp1": Strategy(
        "FSDP1 (deprecated)",
        "The FlatParameter version of FSDP, for existing configs; use FSDP2 for new runs.",
        engine="fsdp",
        fsdp_version=1,
        shards_weights=True,
    ),
    "tensor": Strategy(
        "Tensor parallelism",
        "Each device holds a part of every weight matrix; all train on the same examples. For GPUs with NVLink.",
        engine="tensor",
        shards_weights=True,
    ),
}


def _of(engine: str) -> tuple[str, ...]:
    return tuple(name for name, row in STRATEGIES.items() if row.engine == engine)


MULTI_PROCESS = tuple(name for name, row in STRATEGIES.items() if row.engine)
DEEPSPEED, FSDP = _of("deepspeed"), _of("fsdp")

SHARDINGS: Mapping[str, Choice] = {
    "full_shard": Choice("FULL_SHARD", "Shards weights, gradients and optimizer state."),
    "shard_grad_op": Choice(
        "SHARD_GRAD_OP", "Shards gradients and optimizer state; weights stay gathered during a step."
    ),
    "no_shard": Choice("NO_SHARD", "Shards nothing, like DDP."),
    "hybrid_shard": Choice("HYBRID_SHARD", "Shards everything within a node and replicates across nodes."),
}
OFFLOADS: Mapping[str, Choice] = {
    "none": Choice("No offload"),
    "cpu": Choice("CPU memory"),
    "nvme": Choice("NVMe"),
}
STATE_DICTS: Mapping[str, Choice] = {
    "full": Choice("Full", "Unsharded, gathered on rank 0."),
    "sharded": Choice("Sharded", "Each rank writes its shard: fast for large models."),
}
