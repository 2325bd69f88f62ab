"""What a strategy spreads over the devices, what it gathers again, and what it keeps away from them. Floor 2. Imports
catalog, derived, machine, shape, spec.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from backend import registry
from backend.config import RunSpec
from backend.machine import Machine
from backend.memory import quantized
from backend.modelspec import Leaf, ModelShape, trainable
from backend.resolve import ResolvedRun, resolve

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

    @cached_property
    def run(self) -> ResolvedRun:
        """What follows from the spec and the machine."""
        return resolve(self.spec, self.machine)

    @cached_property
    def cpu(self) -> bool:
        """Whether it runs on the processor."""
        return self.run.device == "cpu"

    @cached_property
    def width(self) -> int:
        """Bytes of a number in the computing."""
        return BYTES[self.run.compute_dtype]

    @cached_property
    def trained(self) -> int:
        """Parameters that are trained."""
        return trainable(self.spec, self.shape)

    @cached_property
    def adapter(self) -> bool:
        """Whether new weights are trained beside the model's own."""
        return self.spec.method.kind == "lora"

    @cached_property
    def frozen(self) -> int:
        """Parameters that are not trained."""
        return self.shape.parameters - (0 if self.adapter else self.trained)

    @cached_property
    def packed(self) -> list[Leaf]:
        """The modules whose weights are packed."""
        return quantized.leaves(self.spec, self.shape)

    @cached_property
    def plain(self) -> int:
        """Frozen parameters that are not packed."""
        return self.frozen - quantized.weights(self.packed)

    @cached_property
    def packed_bytes(self) -> int:
        """Bytes of the packed weights themselves."""
        return quantized.weights(self.packed) * quantized.bits(self.spec, self.shape) // 8

    @cached_property
    def strategy(self) -> registry.Strategy:
        """The row of the strategy."""
        return registry.STRATEGIES[self.spec.parallel.strategy]

    @cached_property
    def zero(self) -> bool:
        """Whether DeepSpeed holds the weights: in the computing precision, with masters of its own in fp32."""
        return self.strategy.engine == "deepspeed"

    @cached_property
    def holders(self) -> int:
        """Devices that the weights are spread over."""
        parallel, row = self.spec.parallel, self.strategy
        if not row.shards_weights or (row.fsdp_version == 1 and parallel.sharding_strategy == "no_shard"):
            return 1
        return max(1, self.run.world_size // (parallel.replicate_size if row.fsdp_version == 2 else 1))

    @cached_property
    def sharers(self) -> int:
        """Devices that the optimizer's state is spread over."""
        return self.run.world_size if self.strategy.zero_stage else self.holders

    @cached_property
    def spreads_gradients(self) -> bool:
        """Whether gradients are spread too."""
        return self.strategy.zero_stage >= 2 or self.strategy.engine in ("fsdp", "tensor")

    @cached_property
    def optimizer_away(self) -> str:
        """Where optimizer state and fp32 weights live instead of the device: cpu, nvme, or nowhere else ('').

        On a CPU run its own memory is the device, so only a disk is elsewhere.
        """
        parallel, row = self.spec.parallel, self.strategy
        place = parallel.offload_optimizer if row.zero_stage else "none"
        if row.engine == "fsdp" and parallel.cpu_offload:
            place = "cpu"
        return "" if place == "none" or (place == "cpu" and self.cpu) else place

    @cached_property
    def weights_away(self) -> str:
        """As `optimizer_away`, of the weights."""
        parallel, row = self.spec.parallel, self.strategy
        place = parallel.offload_param if row.zero_stage == 3 else "none"
        if row.engine == "fsdp" and parallel.cpu_offload:
            place = "cpu"
        return "" if place == "none" or (place == "cpu" and self.cpu) else place

    @cached_property
    def shared(self) -> str:
        """The end of a formula that divides by the sharers."""
        return f" / {self.sharers} devices" if self.sharers > 1 else ""

    @cached_property
    def held(self) -> str:
        """The end of a formula that divides by the holders."""
        return f" / {self.holders} devices" if self.holders > 1 else ""

    def live(self) -> list[Row]:
        """Weights that DeepSpeed keeps gathered."""
        if self.strategy.zero_stage != 3:
            return []
        count = min(self.plain + self.trained + self.packed_bytes // self.width, LIVE)
        words = f"{count:,} x {self.width} bytes: weights that DeepSpeed keeps gathered, at most a billion"
        return [Row("Gathered weights", count * self.width, words)]

    @cached_property
    def shards(self) -> bool:
        """Whether FSDP spreads the weights."""
        return self.strategy.engine == "fsdp" and self.holders > 1

    @cached_property
    def ends(self) -> tuple[int, int]:
        """Parameters of the embeddings where they are apart from the output layer, and of the output layer."""
        outside = sum(leaf.parameters for leaf in self.shape.outside)
        last = self.shape.vocabulary * self.shape.hidden if self.shape.tied else self.shape.outside[-1].parameters
        return outside - last, last

    def gathered(self, layers: int, tail: int, last: bool = False, apart: int = 0) -> list[Row]:
        """What FSDP has gathered of `layers` layers, and the output layer so many times: while the next layer's weights
        come, those of the one at work are there; the output layer stays from its norm to its gradient. `apart`: so many
        layers more are there as they came, not yet put together, or not yet let go."""
        if not self.shards:
            return []
        shape, parallel, first = self.shape, self.spec.parallel, self.strategy.fsdp_version == 1
        keeps = parallel.sharding_strategy == "shard_grad_op" if first else not parallel.reshard_after_forward
        keeps = keeps and not last  # when the backward pass has gone through them
        layers, embedded = (shape.layers, self.ends[0]) if keeps else (min(layers, shape.layers), 0)
        layers += apart
        unpacked = quantized.weights(self.packed) - self.packed_bytes // self.width
        tail = max(tail, 1) if shape.tied else tail
        count = layers * (shape.layer_parameters - unpacked // shape.layers) + embedded + tail * self.ends[1]
        said = f"{layers} layers" + (" and the ends" if tail or embedded else "")
        return [Row("Gathered weights", count * self.width, f"{said}: {count:,} x {self.width} bytes")]

    def parcels(self) -> list[Row]:
        """Gradients on their way."""
        if self.zero:
            mb = self.spec.parallel.bucket_cap_mb
            return [Row("Gradient buckets", 3 * mb * MIB, f"3 x {mb} MiB: two to reduce, one to gather")]
        if self.strategy.engine == "ddp" and self.run.world_size > 1:
            width = 4 if self.run.fp32_master_weights else self.width
            return [Row("Gradient buckets", self.trained * width, f"{self.trained:,} x {width} bytes: DDP's parcels")]
        return []
