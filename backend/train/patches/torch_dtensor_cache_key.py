"""torch's cache of compiled functions on disk takes the shards of two ranks for equal, although their sizes differ.

distributed/tensor/_api.py, `DTensor._stable_hash_for_caching`: the key has the size of the whole tensor, not that of a
rank's shard. torchao's optimizers compile their step. Without the patch a run on a machine that has had such a run
before ends in its first step, or when it resumes, if a dimension is not divisible by the number of ranks, as with a
LoRA rank of 3 on two ranks: a rank loads what was compiled for another one ("expected size 1==2").
"""

from __future__ import annotations

import functools

from torch.distributed.tensor import DTensor

LIBRARY, SEEN_IN = "torch", "2.13.0"


def apply() -> None:
    """Add the size of the shard to the key."""
    original = getattr(DTensor, "_stable_hash_for_caching", None)  # torch 2.11 may not have it
    if original is None or hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def stable_hash(tensor: DTensor) -> str:
        return f"{original(tensor)} {tuple(tensor._local_tensor.shape)}"

    DTensor._stable_hash_for_caching = stable_hash
