"""How processes work together.

Floor 0.
"""

from __future__ import annotations

from collections.abc import Mapping

from backend.catalog.kinds import Strategy

STRATEGIES: Mapping[str, Strategy] = {
    "single": Strategy("One process", "One device, no communication."),
    "ddp": Strategy("DDP", "A full copy a device; gradients are averaged.", engine="ddp"),
    "zero1": Strategy(
        "ZeRO-1",
        "DeepSpeed spreads the optimizer's state over the devices.",
        package="deepspeed",
        engine="deepspeed",
        stage=1,
    ),
    "zero2": Strategy(
        "ZeRO-2",
        "DeepSpeed spreads optimizer state and gradients.",
        package="deepspeed",
        engine="deepspeed",
        stage=2,
    ),
    "zero3": Strategy(
        "ZeRO-3",
        "DeepSpeed spreads the weights too, gathered layer by layer: least memory, most messages.",
        package="deepspeed",
        engine="deepspeed",
        stage=3,
    ),
}
MANY = tuple(name for name, row in STRATEGIES.items() if row.engine)  # those of several processes
DEEPSPEED = tuple(name for name, row in STRATEGIES.items() if row.engine == "deepspeed")
