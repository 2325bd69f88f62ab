"""Process groups: which ranks share what with each other.

The order of ranks is that of the libraries: tensor parallel groups are innermost, replicas outermost (accelerate 1.15
parallelism_config.py; tests/unit/test_groups.py compares them with torch's device mesh). Ranks count node by node.
"""

from __future__ import annotations

from dataclasses import dataclass

from backend.config import RunSpec
from backend.resolve import ResolvedRun


@dataclass(frozen=True)
class Group:
    """A kind of process group: `size` ranks, each `stride` after the one before. `name`: tensor, context, sequence,
    shard or replicate."""

    name: str
    size: int
    stride: int

    def of(self, rank: int) -> list[int]:
        """The ranks of the group that `rank` is in, itself included."""
        block = self.size * self.stride
        first = rank // block * block + rank % self.stride
        return [first + i * self.stride for i in range(self.size)]


def groups(spec: RunSpec, run: ResolvedRun) -> list[Group]:
    """The process groups of a run, the innermost first; [] with a single process, and with sizes that do not divide the
    world size, which another error reports."""
    tensor, sequence = run.tensor_parallel_size, run.sequence_parallel_size
    sharded = max(run.parameter_shards, run.gradient_shards, run.optimizer_shards)
    if run.world_size % (run.engine.mesh_divisor(spec) * sequence):
        return []
    found = [
        Group("tensor", tensor, 1),
        Group("context", run.context_parallel_size, 1),
        Group("sequence", sequence, 1),
        Group("shard", sharded // tensor, tensor),
        Group("replicate", run.world_size // sharded, sharded),
    ]
    return [group for group in found if group.size > 1]


def sharded_state(run: ResolvedRun) -> list[str]:
    """What is sharded over the ranks of a shard group."""
    shards = {
        "weights": run.parameter_shards, "gradients": run.gradient_shards, "optimizer state": run.optimizer_shards
    }  # fmt: skip
    return [name for name, count in shards.items() if count > 1]
