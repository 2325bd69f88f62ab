"""Options and machines that the examples of several distributed rules share."""

from __future__ import annotations

from dataclasses import replace

from backend.machine import Machine
from backend.rules.examples import DEMO, LAPTOP, LLAMA_8B, TINY

FULL = {"method.kind": "full", "train.learning_rate": 1e-5}
FOUR_PROCESSES = {"launch.nproc_per_node": 4}
ZERO2_STRATEGY = {"parallel.strategy": "zero2"}
WITHOUT_DEEPSPEED = replace(
    LAPTOP, versions={name: version for name, version in LAPTOP.versions.items() if name != "deepspeed"}
)
TINY_FACTS = replace(DEMO, shape=TINY)  # two KV heads, which two devices can divide
LLAMA_8B_FACTS = replace(DEMO, shape=LLAMA_8B)


def with_cores(machine: Machine, cores: int) -> Machine:
    """The machine with this many CPU cores, so that many processes raise no other rule."""
    return replace(machine, cores=cores)
