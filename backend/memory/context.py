"""MemoryContext: the inputs of an estimate, and the basic quantities that follow from them, each computed once.

How many processes share a tensor, where it is offloaded to and the compute dtype come from ResolvedRun.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import NamedTuple, TypeVar

from backend import registry
from backend.config import RunSpec
from backend.engines import Engine
from backend.machine import Machine
from backend.memory import quantized
from backend.memory.optimizer_state import OptimizerState
from backend.modelspec import ModelShape, trainable_parameters
from backend.resolve import ResolvedRun
from backend.wording import counted

T = TypeVar("T")
MIB = 2**20
DTYPE_BYTES: Mapping[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4}


class Row(NamedTuple):
    """One row of the estimate's breakdown. `where` is device, host or disk; `formula` says how the bytes follow. A
    named tuple, because a check creates thousands of them."""

    name: str
    bytes: int
    formula: str
    where: str = "device"


def once(function: Callable[[MemoryContext], T]) -> Callable[[MemoryContext], T]:
    """Decorates a function of a context: its result is kept in the context, because several moments of a step need
    it."""
    name = f"{function.__module__}.{function.__name__}"

    @wraps(function)
    def get(ctx: MemoryContext) -> T:
        known: dict[str, T] = ctx.__dict__
        if name not in known:
            known[name] = function(ctx)
        return known[name]

    return get


@dataclass(frozen=True)
class MemoryContext:
    """A spec, what it resolves to on a machine, and the shape of its model. `longest_example`: tokens; 0 if unknown.
    `token_lengths`: of some examples."""

    spec: RunSpec
    run: ResolvedRun
    machine: Machine
    shape: ModelShape
    longest_example: int = 0
    token_lengths: Sequence[int] = ()

    @cached_property
    def engine(self) -> Engine:
        """The engine of the strategy."""
        return self.run.engine

    @cached_property
    def stage(self) -> registry.Stage:
        """The registry row of the training stage."""
        return registry.STAGES[self.spec.train.stage]

    @cached_property
    def on_cpu(self) -> bool:
        """Whether the run uses the CPU: then "device" means the RAM of one process."""
        return self.run.device == "cpu"

    @cached_property
    def is_lora(self) -> bool:
        """Whether adapters are trained instead of the model's own parameters."""
        return self.spec.method.kind == "lora"

    # Parameters.

    @cached_property
    def trainable_count(self) -> int:
        """Trainable parameters, adapters included."""
        return trainable_parameters(self.spec, self.shape)

    @cached_property
    def frozen_count(self) -> int:
        """Frozen parameters, quantized ones included."""
        return self.shape.parameters - (0 if self.is_lora else self.trainable_count)

    @cached_property
    def quantized_matrices(self) -> Mapping[tuple[int, int], int]:
        """The sizes of the matrices that are quantized, (rows, columns), and how often each occurs."""
        return quantized.quantized_matrices(self.spec, self.shape)

    @cached_property
    def quantized_count(self) -> int:
        """Quantized weights."""
        return quantized.weight_count(self.quantized_matrices)

    @cached_property
    def unquantized_count(self) -> int:
        """Frozen parameters that are not quantized."""
        return self.frozen_count - self.quantized_count

    @cached_property
    def quantized_bytes(self) -> int:
        """Bytes of the quantized weights, without their scales."""
        return self.quantized_count * quantized.bits(self.spec, self.shape) // 8

    @cached_property
    def compute_bytes(self) -> int:
        """Bytes of an element in the compute dtype."""
        return DTYPE_BYTES[self.run.compute_dtype]

    @cached_property
    def trainable_bytes(self) -> int:
        """Bytes of a trainable parameter, and of its gradient, as the optimizer sees them."""
        return 4 if self.run.fp32_master_weights else 2

    @cached_property
    def optimizer(self) -> OptimizerState:
        """The optimizer's state. DeepSpeed's ZeRO passes flat tensors to the optimizer."""
        return OptimizerState(self.spec, self.shape, flat=self.run.zero_stage > 0)

    # Where tensors are kept.

    @cached_property
    def optimizer_offload(self) -> str:
        """Where optimizer state is offloaded to: cpu, nvme, or '' if it stays on the device."""
        return self._other_place(self.run.optimizer_offload)

    @cached_property
    def param_offload(self) -> str:
        """Where parameters are offloaded to: cpu, nvme, or '' if they stay on the device."""
        return self._other_place(self.run.param_offload)

    def _other_place(self, place: str) -> str:
        """On a CPU run, RAM is the device, so only NVMe is another place."""
        return "" if place == "none" or (place == "cpu" and self.on_cpu) else place

    @cached_property
    def optimizer_is_on_host(self) -> bool:
        """Whether the optimizer itself keeps its state in RAM, whatever the strategy."""
        return self.optimizer.row.state_on_cpu and not self.on_cpu

    @cached_property
    def gathers_layers(self) -> bool:
        """Whether sharded parameters are gathered layer by layer (FSDP)."""
        return self.engine.gathers_layers and self.run.parameter_shards > 1

    def divided_by(self, shards: int) -> str:
        """The end of a formula that divides by the number of processes that share a tensor."""
        return f" / {counted(shards, registry.DEVICES[self.run.device].noun)}" if shards > 1 else ""

    # Batch.

    @cached_property
    def sequence_length(self) -> int:
        """Tokens of the longest sequence of a batch."""
        limit = self.spec.data.max_length
        return min(limit, self.longest_example) if self.longest_example and not self.spec.data.packing else limit

    @cached_property
    def batch_size(self) -> int:
        """Examples in a per-device batch. One process takes all examples there are if they are fewer; accelerate gives
        several processes full batches, in which some examples occur twice. Pretraining splits a long text into several
        sequences."""
        size, examples = self.spec.train.per_device_train_batch_size, self.run.num_train_examples
        is_smaller = self.run.world_size == 1 and examples and self.spec.train.stage != "pretraining"
        return min(size, examples) if is_smaller and examples else size

    @cached_property
    def sequences(self) -> int:
        """Sequences in a per-device batch; a preference pair counts as two."""
        return self.batch_size * self.stage.sequences_per_example

    @cached_property
    def tokens(self) -> int:
        """Tokens in a per-device batch; with context or sequence parallelism, this device's share of them."""
        return -(-self.sequences * self.sequence_length // self.run.token_shards)

    @cached_property
    def uses_autocast(self) -> bool:
        """Whether autocast casts in each operation. Other engines cast parameters and inputs beforehand."""
        return self.compute_bytes == 2 and self.run.fp32_master_weights and self.engine.uses_autocast

    @cached_property
    def hidden_state_bytes(self) -> int:
        """Bytes of an element of the hidden states: autocast leaves them in fp32 if the embeddings are."""
        return 4 if self.uses_autocast and self.spec.method.kind == "full" else self.compute_bytes
