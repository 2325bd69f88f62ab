"""accelerate turns on FSDP and device meshes for accelerators only.

accelerate state.py: with FSDP or tensor parallelism on a CPU it keeps MULTI_CPU. Without the patch such a run silently
trains as DDP, with the whole model on every rank.
"""

from __future__ import annotations

from accelerate import PartialState
from accelerate.utils import DistributedType

LIBRARY, SEEN_IN = "accelerate", "1.15.0"


def apply() -> None:
    """Let accelerate treat a CPU as an accelerator. Only for CPU runs."""
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
