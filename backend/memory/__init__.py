"""Memory estimate: bytes on each device, in host RAM and on disk, each row with its formula.

Closed formulas, no torch. On a CPU run "device" is the RAM of one process.

- context: the inputs and basic quantities; quantized, optimizer_state: those two parts in detail
- sharding, gradients, activations, loss: the tensors on a device
- backends: what LLaMA-Factory keeps with Megatron-Core or KTransformers
- peaks: the moments at which device memory may peak; host, disk: the other places
- estimate: the largest peak, and totals; uncertainty: the estimated range; fit: the verdict; kinds: rows by kind
- groups: which ranks share what; communication: bytes that are sent; placement: all of this for a picture
"""

from __future__ import annotations

from backend.memory.context import MemoryContext, Row
from backend.memory.estimate import OVERHEAD, Estimate, estimate, free_bytes
from backend.memory.fit import Fit
