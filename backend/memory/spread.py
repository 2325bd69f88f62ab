"""What a strategy spreads over the devices, what it gathers again, and what it keeps away from them. Floor 2. Imports
catalog, derived, machine, shape, spec.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from backend import catalog
from backend.derived import device, precision, world
from backend.machine import Machine
from backend.memory import packed
from backend.shape import Leaf, ModelShape, trainable
from backend.spec import RunSpec

BYTES: Mapping[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4}
MIB = 2**20
LIVE = 10**9  # deepspeed 0.19 runtime/zero/config.py: stage3_max_live_parameters
AT_ONCE = 2  # layers: the one at work and the next, already on its way (torch 2.13 fsdp/_fully_shard)


@dataclass(frozen=True)
class Row:
    """One line of the account: `where` is device, host or disk; `formula` says in words how the bytes come about."""

    name: str
    bytes: int
    formula: str
    where: str = "device"


@dataclass(frozen=True)
class Spread:
    """The quantities of one spec on one machine, each a method."""

    spec: RunSpec
    machine: Machine
    shape: ModelShape
    longest: int = 0

    @property
    def cpu(self) -> bool:
        """Whether it runs on the processor."""
        return device(self.spec, self.machine) == "cpu"

    @property
    def width(self) -> int:
        """Bytes of a number in the computing."""
        return BYTES[precision(self.spec, self.machine)]

    @cached_property
    def trained(self) -> int:
        """Parameters that are trained."""
        return trainable(self.spec, self.shape)

    @property
    def adapter(self) -> bool:
        """Whether new weights are trained beside the model's own."""
        return self.spec.method.kind == "lora"

    @property
    def frozen(self) -> int:
        """Parameters that are not trained."""
        return self.shape.parameters - (0 if self.adapter else self.trained)

    @cached_property
    def packed(self) -> list[Leaf]:
        """The modules whose weights are packed."""
        return packed.leaves(self.spec, self.shape)

    @property
    def plain(self) -> int:
        """Frozen parameters that are not packed."""
        return self.frozen - packed.weights(self.packed)

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed weights themselves."""
        return packed.weights(self.packed) * packed.bits(self.spec, self.shape) // 8

    @property
    def strategy(self) -> catalog.Strategy:
        """The row of the strategy."""
        return catalog.STRATEGIES[self.spec.parallel.strategy]

    @property
    def zero(self) -> bool:
        """Whether DeepSpeed holds the weights: in the computing precision, with masters of its own in fp32."""
        return self.strategy.engine == "deepspeed"

    @property
    def holders(self) -> int:
        """Devices that the weights are spread over."""
        parallel, row = self.spec.parallel, self.strategy
        if not row.spread or (row.version == 1 and parallel.sharding == "no_shard"):
            return 1
        return max(1, world(self.spec) // (parallel.replicas if row.version == 2 else 1))

    @property
    def sharers(self) -> int:
        """Devices that the optimizer's state is spread over."""
        return world(self.spec) if self.strategy.stage else self.holders

    @property
    def spreads_gradients(self) -> bool:
        """Whether gradients are spread too."""
        return self.strategy.stage >= 2 or self.strategy.engine in ("fsdp", "tensor")

    @property
    def optimizer_away(self) -> str:
        """Where optimizer state and fp32 weights live instead of the device: cpu, nvme, or nowhere else ('').

        On a CPU run its own memory is the device, so only a disk is elsewhere.
        """
        parallel, row = self.spec.parallel, self.strategy
        place = parallel.offload_optimizer if row.stage else "none"
        if row.engine == "fsdp" and parallel.cpu_offload:
            place = "cpu"
        return "" if place == "none" or (place == "cpu" and self.cpu) else place

    @property
    def weights_away(self) -> str:
        """As `optimizer_away`, of the weights."""
        parallel, row = self.spec.parallel, self.strategy
        place = parallel.offload_parameters if row.stage == 3 else "none"
        if row.engine == "fsdp" and parallel.cpu_offload:
            place = "cpu"
        return "" if place == "none" or (place == "cpu" and self.cpu) else place

    @property
    def shared(self) -> str:
        """The end of a formula that divides by the sharers."""
        return f" / {self.sharers} devices" if self.sharers > 1 else ""

    @property
    def held(self) -> str:
        """The end of a formula that divides by the holders."""
        return f" / {self.holders} devices" if self.holders > 1 else ""

    def gathered(self) -> list[Row]:
        """Weights that a device has whole for a while."""
        shape, width = self.shape, self.width
        if self.strategy.stage == 3:
            live = min(self.plain + self.trained + self.packed_bytes // width, LIVE)
            words = f"{live:,} x {width} bytes: weights that DeepSpeed keeps gathered, at most a billion"
            return [Row("Gathered weights", live * width, words)]
        if self.strategy.engine != "fsdp" or self.holders == 1:
            return []
        layer, ends = (sum(leaf.parameters for leaf in part) for part in (shape.layer, shape.outside))
        parallel, first = self.spec.parallel, self.strategy.version == 1
        keeps = parallel.sharding == "shard_grad_op" if first else not parallel.reshard_after_forward
        layers = shape.layers if keeps else min(AT_ONCE, shape.layers)
        count = layers * (layer - (packed.weights(self.packed) - self.packed_bytes // width) // shape.layers) + ends
        rows = [Row("Gathered weights", count * width, f"{layers} layers and the ends: {count:,} x {width} bytes")]
        if self.spec.method.kind != "lora":
            size = layer * (width + 4)
            rows.append(Row("Gradients of a layer", size, f"{layer:,} x ({width} + 4) bytes on their way"))
        return rows

    def parcels(self) -> list[Row]:
        """Gradients on their way."""
        if self.zero:
            mb = self.spec.parallel.bucket_mb
            return [Row("Gradient buckets", 3 * mb * MIB, f"3 x {mb} MiB: two to reduce, one to gather")]
        if self.strategy.engine == "ddp" and world(self.spec) > 1:
            return [Row("Gradient buckets", self.trained * 4, f"{self.trained:,} x 4 bytes: DDP's parcels")]
        return []
