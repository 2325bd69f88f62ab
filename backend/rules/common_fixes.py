"""Fixes that many rules offer, each with what it costs.

Floor 3. Imports: base.
"""

from __future__ import annotations

from backend.rules.base import Fix

DDP = Fix("DDP", {"parallel.strategy": "ddp"}, cost="a full copy on each device")
ZERO2 = Fix("ZeRO-2", {"parallel.strategy": "zero2"}, cost="whole weights on each device")
ZERO3 = Fix("ZeRO-3", {"parallel.strategy": "zero3"}, cost="slower: more is sent")
FSDP2 = Fix("FSDP2", {"parallel.strategy": "fsdp2"}, cost="slower than whole copies")
ONE = Fix("One process", {"parallel.strategy": "single"}, safe=False, cost="one device, fewer rows a step")
ADAMW = Fix("AdamW", {"train.optim": "adamw"}, safe=False, cost="two numbers of state a weight")
ATTENTION = Fix("Adapters on attention", {"lora.targets": "attention"}, safe=False, cost="experts stay as they are")
BF16 = Fix("bf16", {"precision.compute": "bf16"}, safe=False, cost="rounds more coarsely")
