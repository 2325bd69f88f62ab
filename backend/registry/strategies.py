"""How processes work together.

Floor 0.
"""

from __future__ import annotations

from collections.abc import Mapping

from backend.registry.types import Choice, Strategy


def _zero(stage: int, help: str) -> Strategy:
    return Strategy(
        f"ZeRO-{stage}", help, package="deepspeed", engine="deepspeed", zero_stage=stage, shards_weights=stage == 3
    )


STRATEGIES: Mapping[str, Strategy] = {
    "single": Strategy("One process", "One device, no communication."),
    "ddp": Strategy("DDP", "A full copy a device; gradients are averaged.", engine="ddp"),
    "zero0": _zero(0, "DeepSpeed's engine with a full copy a device: a baseline for the stages below."),
    "zero1": _zero(1, "DeepSpeed spreads the optimizer's state over the devices."),
    "zero2": _zero(2, "DeepSpeed spreads optimizer state and gradients."),
    "zero3": _zero(3, "DeepSpeed spreads the weights too, gathered layer by layer: least memory, most messages."),
    "fsdp2": Strategy(
        "FSDP2",
        "PyTorch spreads weights, gradients and optimizer state, gathered layer by layer.",
        engine="fsdp",
        fsdp_version=2,
        shards_weights=True,
    ),
    "fsdp1": Strategy(
        "FSDP1 (deprecated)",
        "The first FSDP, for old configurations. Take FSDP2 for new ones.",
        engine="fsdp",
        fsdp_version=1,
        shards_weights=True,
    ),
    "tensor": Strategy(
        "Tensor parallel",
        "Every device holds a slice of every layer; all work on the same rows. For devices with fast links.",
        engine="tensor",
        shards_weights=True,
    ),
}


def _of(engine: str) -> tuple[str, ...]:
    return tuple(name for name, row in STRATEGIES.items() if row.engine == engine)


MULTI_PROCESS = tuple(name for name, row in STRATEGIES.items() if row.engine)  # those of several processes
DEEPSPEED, FSDP = _of("deepspeed"), _of("fsdp")

SHARDINGS: Mapping[str, Choice] = {
    "full_shard": Choice("FULL_SHARD", "Weights, gradients and optimizer state."),
    "shard_grad_op": Choice("SHARD_GRAD_OP", "Gradients and optimizer state; weights stay gathered in a step."),
    "no_shard": Choice("NO_SHARD", "Nothing: as DDP."),
    "hybrid_shard": Choice("HYBRID_SHARD", "Everything within a node, copies between nodes."),
}
OFFLOADS: Mapping[str, Choice] = {
    "none": Choice("Device"),
    "cpu": Choice("CPU memory"),
    "nvme": Choice("NVMe"),
}
STATE_DICTS: Mapping[str, Choice] = {
    "full": Choice("One file", "Gathered on rank 0."),
    "sharded": Choice("Sharded", "Each rank writes its part: quick for large models."),
}
