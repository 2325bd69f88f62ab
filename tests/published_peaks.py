"""Runs whose memory was published: what they trained, on which devices, and the estimate of the same run. For tests
and for docs/memory.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from published_throughput import gated_model

from backend.config.options import parse
from backend.inspect import InputFacts
from backend.machine import GIB, Machine
from backend.memory import Estimate
from backend.modelspec import ModelShape
from backend.rules import Case
from backend.rules.examples import gpus

QWEN_7B = gated_model("qwen2", 28, 3584, 18_944, 28, 4, 152_064)
QWEN_32B = gated_model("qwen2", 64, 5120, 27_648, 40, 8, 152_064)
LLAMA_2_70B = gated_model("llama", 80, 8192, 28_672, 64, 8, 32_000)
LLAMA_3_70B = gated_model("llama", 80, 8192, 28_672, 64, 8, 128_256)

COMMON: Mapping[str, Any] = {
    "train__per_device_train_batch_size": 1,
    "train__gradient_accumulation_steps": 4,
    "train__activation_checkpointing": True,
    "precision__compute": "bf16",
    "eval__strategy": "no",
    "lora__r": 8,
    "lora__alpha": 16,
}


def cluster(nodes: int, gib: float, ram: int) -> Machine:
    """Nodes of eight A100."""
    one = gpus(8, "A100", 80, (8, 0))
    free = round(gib * GIB)
    devices = tuple(replace(gpu, total_bytes=free, free_bytes=free) for gpu in one.gpus)
    return replace(one, nodes=nodes, gpus=devices, ram_bytes=ram * GIB, ram_free_bytes=ram * GIB)


@dataclass(frozen=True)
class Published:
    """A run; `options` are those other than COMMON."""

    model: ModelShape
    machine: Machine
    strategy: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def estimate(self, **more: Any) -> Estimate:
        """Of one process per GPU."""
        world = {"launch__nproc_per_node": len(self.machine.gpus), "parallel__strategy": self.strategy}
        if self.machine.nodes > 1:
            world |= {"launch__nnodes": self.machine.nodes, "launch__rendezvous": "static"}
        options = {**COMMON, **world, **self.options, **more}
        run_spec = parse({name.replace("__", "."): value for name, value in options.items()})
        return Case(run_spec, self.machine, InputFacts(shape=self.model)).estimate


TWO_NODES = {"data__max_length": 1024, "launch__master_addr": "10.0.0.1"}
LORA_32B = Published(QWEN_32B, cluster(2, 39.4, 360), "zero3", {**TWO_NODES, "train__stage": "pretraining"})
FULL_32B = Published(QWEN_32B, cluster(2, 39.4, 1024), "zero3", {**TWO_NODES, "method__kind": "full"})
LONG_7B = Published(
    QWEN_7B,
    cluster(1, 80, 2048),
    "zero3",
    {
        "data__max_length": 32_768,
        "model__attn_implementation": "flash_attention_2",
        "parallel__offload_optimizer": "cpu",
        "parallel__offload_param": "cpu",
    },
)

TWO_GPUS, NODE = gpus(2, "A100", 80, (8, 0)), cluster(1, 80, 2048)
SHORT = {"data__max_length": 2048}
PACKED = {**SHORT, "data__packing": True, "model__attn_implementation": "flash_attention_2"}
EIGHT = {**PACKED, "train__per_device_train_batch_size": 8}
QLORA = {**PACKED, "train__per_device_train_batch_size": 2, "method__quantization": "nf4"}
OFFLOADED = {**QLORA, "parallel__cpu_offload": True}
ONE_OFFLOADED = {
    "data__max_length": 512,
    "model__attn_implementation": "flash_attention_2",
    "method__quantization": "nf4",
    "parallel__cpu_offload": True,
}
ALL_LOGITS = {"launch__trainer": "llamafactory"}  # as the losses of other trainers
WITHIN, RESERVED, FSDP1, LOGITS, UNEXPLAINED = (
    "within", "above: reserved memory", "above: FSDP1", "above: all logits", "above: unexplained",
)  # fmt: skip


class Point(NamedTuple):
    """A published peak of a GPU. `value` is the largest one, in GiB or GB as it was published."""

    name: str
    source: str
    published: str
    value: float
    run: Published
    verdict: str


POINTS: Sequence[Point] = (
    Point("32B full, ZeRO-3, 16 GPUs", "bug report", "trained on 40 GB", 39.4, FULL_32B, WITHIN),
    Point(
        "7B LoRA, 32,768 tokens, ZeRO-3 with offload, 8 GPUs, LLaMA-Factory", "bug report", "out of memory on 80 GB",
        80, Published(QWEN_7B, NODE, "zero3", {**LONG_7B.options, **ALL_LOGITS}), WITHIN,
    ),
    Point(
        "70B LoRA, ZeRO-3, 8 GPUs", "PEFT, accelerate/deepspeed.md", "64 GB", 64,
        Published(LLAMA_2_70B, NODE, "zero3", EIGHT), RESERVED,
    ),
    Point(
        "70B LoRA, FSDP, 8 GPUs", "PEFT, accelerate/fsdp.md", "72 to 80 GB", 80,
        Published(LLAMA_2_70B, NODE, "fsdp2", EIGHT), FSDP1,
    ),
    Point(
        "70B QLoRA, FSDP, 2 GPUs", "PEFT, accelerate/fsdp.md", "35.6 GB", 35.6,
        Published(LLAMA_2_70B, TWO_GPUS, "fsdp2", QLORA), FSDP1,
    ),
    Point(
        "70B QLoRA, FSDP with offload, 2 GPUs", "PEFT, accelerate/fsdp.md", "19.6 GB", 19.6,
        Published(LLAMA_2_70B, TWO_GPUS, "fsdp2", OFFLOADED), FSDP1,
    ),
    Point(
        "70B QLoRA, 512 tokens, FSDP with offload, 2 GPUs", "axolotl, examples/llama-3 and PR 1428", "21 GB, 14 GB",
        21, Published(LLAMA_3_70B, TWO_GPUS, "fsdp2", ONE_OFFLOADED), FSDP1,
    ),
    Point(
        "7B LoRA, DDP, 2 GPUs", "ms-swift, ddp/train.sh", "27.5 GiB", 27.5,
        Published(QWEN_7B, TWO_GPUS, "ddp", SHORT), UNEXPLAINED,
    ),
    Point(
        "7B LoRA, ZeRO-3, 2 GPUs", "ms-swift, train_zero3.sh", "16 GiB", 16,
        Published(QWEN_7B, TWO_GPUS, "zero3", SHORT), LOGITS,
    ),
    Point(
        "7B LoRA, FSDP2, 2 GPUs", "ms-swift, fsdp2_lora/train.sh", "14.7 GiB", 14.7,
        Published(QWEN_7B, TWO_GPUS, "fsdp2", SHORT), LOGITS,
    ),
)  # fmt: skip
TEXT = """## Published peaks

The table compares GPU memory peaks that others published with the estimates for the same runs, in GiB, with their
ranges. Figures in GB are compared as if they were GiB. For the first two runs, only the outcome was published; there,
*within* means that the range contains the memory of the GPU.

{table}

For the second run, the estimate says that it may run out of memory, not that it does. 55.7 GiB of the estimate are
exact arithmetic, so the range does not begin below them: 32,768 tokens x 152,064 words x 12 bytes, for
log-probabilities and two gradients in fp32. The forward pass needs 10 bytes per logit. torch's allocator may keep the
9.3 GiB of the bf16 logits that are freed in between, so up to 75.2 GiB could be reserved; a GPU with 80 GB has about 79
GiB. This was not measured on a GPU, and what else that run held is not known.

Figures above the range have one of these remarks:

- *reserved memory*: the figure is from a screenshot of the GPU's memory use, which includes reserved memory. How much
  of the difference this explains was not measured.
- *FSDP1*: the run used FSDP1, which Footplate does not offer with LoRA. The estimate is for FSDP2. How much of the
  difference FSDP1 explains was not measured.
- *all logits*: the run's loss keeps all logits in fp32, while Footplate computes it in chunks. The estimates for such a
  loss are {zero3} with ZeRO-3 and {fsdp2} with FSDP2, and the figures are within their ranges.
- *unexplained*: with all logits, the estimate is {ddp}. The same source reports 17.2 GiB for this
  run on one GPU.

LoRA training of a 32B model with ZeRO-3 on 2 x 8 GPUs ran with 360 GB of host RAM per node, of which 38.9 GB were used
after loading. The estimate of the peak while loading is {host:.0f} GiB."""


def section() -> str:
    """The section of docs/memory.md."""
    rows = [[p.name, p.source, p.published, estimated(p.run.estimate()), p.verdict] for p in POINTS]
    lines = [["run", "source", "published", "estimate", "published value"], ["---"] * 5, *rows]
    with_logits = {p.run.strategy: estimated(p.run.estimate(**ALL_LOGITS)) for p in POINTS[-3:]}
    host = LORA_32B.estimate().host_bytes / GIB
    return TEXT.format(table="\n".join(f"| {' | '.join(line)} |" for line in lines), host=host, **with_logits)


def estimated(estimate: Estimate) -> str:
    """The peak with its range, in GiB."""
    peak, low, high = (size / GIB for size in (estimate.device_bytes, estimate.low_bytes, estimate.high_bytes))
    return f"{peak:.1f} ({low:.1f} to {high:.1f})"
