"""OptimizerState: the optimizer's state, trainable tensor by trainable tensor.

Tested against the state of the real optimizers (tests/process/test_optimizers.py).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from backend import registry
from backend.config import RunSpec
from backend.modelspec import (
    ModelShape,
    ModuleSpec,
    count_equal_tensors,
    token_rows,
    trainable_parameters,
    trainable_tensors,
)

SMALL = 4096  # elements: bitsandbytes and torchao do not quantize the state of smaller tensors


@dataclass(frozen=True)
class OptimizerState:
    """The optimizer state of a spec. `flat`: the engine passes flat 1-D tensors to the optimizer, not matrices."""

    spec: RunSpec
    shape: ModelShape
    flat: bool = False

    @cached_property
    def row(self) -> registry.Optimizer:
        """The optimizer's registry row."""
        return registry.OPTIMIZERS[self.spec.train.optim]

    @cached_property
    def parameter_bytes(self) -> int:
        """Bytes of a trainable parameter, and of its gradient."""
        return 4 if self.spec.fp32_master_weights else 2

    @cached_property
    def tensors(self) -> tuple[ModuleSpec, ...]:
        """The trainable tensors."""
        return (*trainable_tensors(self.spec.method, self.spec.lora, self.shape), *token_rows(self.spec, self.shape))

    @cached_property
    def largest_layer(self) -> int:
        """Trainable parameters of the largest layer; BAdam trains one layer at a time."""
        sums: dict[str, int] = {}
        for leaf in self.tensors:
            if number := self._layer_of(leaf):
                sums[number] = sums.get(number, 0) + leaf.parameters
        return max(sums.values(), default=0)

    @property
    def num_layers(self) -> int:
        """The layers with trainable parameters, which BAdam trains one after the other."""
        tensors = trainable_tensors(self.spec.method, self.spec.lora, self.shape, each_layer=True)
        return len({*map(self._layer_of, tensors)} - {""})

    def _layer_of(self, leaf: ModuleSpec) -> str:
        """The number of the layer that has this tensor, as in its name; '' for one outside of the layers."""
        inside, _, rest = leaf.path.partition(f"{self.shape.layers_path}.")
        return "" if inside.strip(".") else rest.partition(".")[0]

    @cached_property
    def largest_tensor(self) -> int:
        """Elements of the largest trainable tensor."""
        return max((leaf.parameters for leaf in self.tensors), default=0)

    @cached_property
    def bytes(self) -> int:
        """The whole state, before it is sharded."""
        if self.flat:
            states = 1 if self.row.factored else self.row.states
            return round(trainable_parameters(self.spec, self.shape) * states * self._element_bytes(SMALL, False))
        if self.row.state_layout == "one_block":
            return 12 * self.largest_layer
        train = self.spec.train
        weights = Counter(count_equal_tensors(self.spec.method, self.spec.lora, self.shape))
        weights.update(token_rows(self.spec, self.shape))
        if (
            self.row.state_layout == "low_rank" and train.optim_targets == "custom"
        ):  # names may include a layer's number
            each = any(character.isdigit() for name in train.optim_target_modules for character in name)
            listed = trainable_tensors(self.spec.method, self.spec.lora, self.shape, each)
            weights = Counter()
            for leaf in listed:
                weights[leaf] += leaf.count
        return round(sum(count * self._tensor_bytes(leaf) for leaf, count in weights.items()))

    def formula(self) -> str:
        """How the bytes follow."""
        row, count = self.row, trainable_parameters(self.spec, self.shape)
        bytes_ = f"{row.state_bytes * (self.parameter_bytes / 4 if row.bits == 0 and not self.flat else 1):.3g} bytes"
        if self.flat:
            text = f"{count:,} parameters x {bytes_} ({row.label})"
        elif row.state_layout == "one_block":
            text = f"{self.largest_layer:,} parameters of one layer x 12 bytes: an fp32 copy and two moments"
        elif row.state_layout == "low_rank":
            others = "row and column sums in fp32" if row.factored else f"{bytes_} per parameter"
            text = f"moments of rank {self.spec.train.projection_rank} for projected matrices, {others} for others"
        elif row.factored:
            text = f"row and column sums in fp32 for the matrices of {count:,} parameters"
        elif row.state_layout == "matrix_momentum":
            text = f"{self.parameter_bytes} bytes per parameter of matrices, {2 * self.parameter_bytes} of others"
        elif row.state_layout == "per_head":
            text = f"{count:,} parameters x {self.parameter_bytes} bytes, and one element per head or row"
        else:
            text = f"{count:,} parameters x {bytes_} ({row.label})"
            if row.bits == 8 and row.package == "bitsandbytes":
                text += f", {row.states * 4:g} bytes for embeddings"
        return f"{text}; paged: may be evicted to host RAM" if row.paged else text

    def _element_bytes(self, count: int, embedding: bool) -> float:
        """Bytes of each state element of a tensor of `count` elements."""
        bits = self.row.bits
        if bits in (8, 4):
            whole = count < SMALL or (embedding and self.row.package == "bitsandbytes")
            scales = {8: 4 / 256, 4: 4 / 128}[bits]
            return (4 if self.row.package != "torchao" else self.parameter_bytes) if whole else bits / 8 + scales
        return 4 if bits == 32 or self.flat else self.parameter_bytes

    def _tensor_bytes(self, leaf: ModuleSpec) -> float:
        """Bytes of one tensor's state."""
        row, count, rows, columns = self.row, leaf.parameters, leaf.out_features, leaf.in_features
        embedding = leaf.path.endswith(EMBEDDINGS)
        if row.state_layout == "low_rank" and self.is_projected(leaf):
            low, projector = self._projection(rows, columns)
            state = 4 * sum(low) if row.factored else row.states * low[0] * low[1] * self._element_bytes(SMALL, False)
            return state + projector * (4 if row.factored else self.parameter_bytes)  # Adafactor computes in fp32
        if row.factored:
            return 4 * ((rows + columns) * max(1, leaf.stacked) or count)
        if row.state_layout == "matrix_momentum":
            return count * self.parameter_bytes * (1 if self.updates_as_matrix(leaf) else 2)
        if row.state_layout == "per_head":
            return count * self.parameter_bytes + (rows or 1) * self.parameter_bytes
        states = row.states + (row.kahan and self.parameter_bytes == 2)
        return states * count * self._element_bytes(count, embedding)

    def updates_as_matrix(self, leaf: ModuleSpec) -> bool:
        """Whether the optimizer updates a tensor as one matrix: with projected gradients, and with Muon, which uses
        AdamW for vectors, single rows, stacked experts, embeddings and the output layer."""
        if self.row.state_layout == "low_rank":
            return self.is_projected(leaf)
        inside = not leaf.path.endswith(EMBEDDINGS) and leaf.path != self.shape.head
        return (
            self.row.state_layout == "matrix_momentum"
            and min(leaf.out_features, leaf.in_features) > 1
            and leaf.stacked < 2
            and inside
        )

    def is_projected(self, leaf: ModuleSpec) -> bool:
        """Whether the gradients of a tensor are projected, as in linear layers, the output layer included."""
        train = self.spec.train
        if not leaf.is_linear or leaf.path.endswith(EMBEDDINGS):
            return False
        if train.optim_targets == "attention":
            return "attn" in leaf.path or "attention" in leaf.path
        return train.optim_targets == "all-linear" or any(name in leaf.path for name in train.optim_target_modules)

    def _projection(self, rows: int, columns: int) -> tuple[tuple[int, int], int]:
        """(rows, columns) of a projected gradient, and the elements of its projector."""
        train, random = self.spec.train, "apollo_proj" in self.row.reads
        short = min(rows, columns)
        rank = train.projection_rank if random and train.apollo_proj == "random" else min(train.projection_rank, short)
        side = "std" if random else train.galore_proj_type
        if side == "full":
            return (rank, rank), rank * (rows + columns)
        right = {"std": rows >= columns, "reverse_std": rows < columns, "right": True, "left": False}[side]
        return ((rows, rank), rank * columns) if right else ((rank, columns), rank * rows)


EMBEDDINGS = ("embed_tokens", "wte", "wpe", "embed_in")
