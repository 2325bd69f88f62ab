"""The optimizer's state, weight by weight: what stands beside each trained matrix and vector.

Floor 2. Imports catalog, derived, shape, spec. Held against the state of real optimizers
(`tests/process/test_optimizers.py`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from backend import registry
from backend.config import RunSpec
from backend.modelspec import Leaf, ModelShape, alike, tensors, trainable

SMALL = 4096  # bitsandbytes and torchao keep smaller tensors' state whole


@dataclass(frozen=True)
class State:
    """The state of one spec's optimizer. `flat`: an engine hands it one long vector instead of matrices."""

    spec: RunSpec
    shape: ModelShape
    flat: bool = False

    @cached_property
    def row(self) -> registry.Optimizer:
        """The optimizer."""
        return registry.OPTIMIZERS[self.spec.train.optim]

    @cached_property
    def width(self) -> int:
        """Bytes of a trained weight, and of a gradient."""
        return 4 if registry.PRECISIONS[self.spec.precision.compute].fp32_master_weights else 2

    @cached_property
    def weights(self) -> tuple[Leaf, ...]:
        """Trained tensors."""
        return tensors(self.spec.method, self.spec.lora, self.shape)

    @cached_property
    def block(self) -> int:
        """Trained weights of the largest layer, which takes its turn alone."""
        sums: dict[str, int] = {}
        for leaf in self.weights:
            inside, _, rest = leaf.path.partition(f"{self.shape.stack}.")
            if rest and not inside.strip("."):
                number = rest.partition(".")[0]
                sums[number] = sums.get(number, 0) + leaf.parameters
        return max(sums.values(), default=0)

    @cached_property
    def largest(self) -> int:
        """Weights of the largest trained tensor."""
        return max((leaf.parameters for leaf in self.weights), default=0)

    @cached_property
    def bytes(self) -> int:
        """All of it, over all devices that share it."""
        if self.flat:
            states = 1 if self.row.factored else self.row.states
            return round(trainable(self.spec, self.shape) * states * self._number(SMALL, False))
        if self.row.state_layout == "one_block":
            return 12 * self.block
        train, weights = self.spec.train, alike(self.spec.method, self.spec.lora, self.shape)
        if self.row.state_layout == "low_rank" and train.optim_targets == "custom":  # which may tell layers apart
            weights = Counter(self.weights)
        return round(sum(count * self._beside(leaf) for leaf, count in weights.items()))

    def words(self) -> str:
        """The formula."""
        row, count = self.row, trainable(self.spec, self.shape)
        rank = self.spec.train.projection_rank
        each = f"{row.state_bytes * (self.width / 4 if row.bits == 0 and not self.flat else 1):.3g} bytes"
        if self.flat:
            said = f"{count:,} x {each} for {row.label}"
        elif row.state_layout == "one_block":
            said = f"{self.block:,} of one layer x 12 bytes: a copy in fp32 and two moments"
        elif row.state_layout == "low_rank":
            said = f"rank {rank} beside projected matrices, {each} beside each other weight"
            said = f"rank {rank} beside projected matrices, rows and columns beside others" if row.factored else said
        elif row.factored:
            said = f"a row and a column of fp32 beside each matrix of {count:,} weights"
        elif row.state_layout == "matrix_momentum":
            said = f"{self.width} bytes beside the layers' matrices, {2 * self.width} beside other weights"
        elif row.state_layout == "per_head":
            said = f"{count:,} x {self.width} bytes, and one number a row"
        else:
            said = f"{count:,} x {each} for {row.label}"
            if row.bits == 8 and row.package == "bitsandbytes":
                said += f", {row.states * 4:g} for embeddings"
        return f"{said}; paged: what does not fit moves to the host's RAM" if row.paged else said

    def _number(self, count: int, embedding: bool) -> float:
        """Bytes of each of `count` numbers that belong together."""
        bits = self.row.bits
        if bits in (8, 4):
            whole = count < SMALL or (embedding and self.row.package == "bitsandbytes")
            scales = {8: 4 / 256, 4: 4 / 128}[bits]
            return (4 if self.row.package != "torchao" else self.width) if whole else bits / 8 + scales
        return 4 if bits == 32 or self.flat else self.width

    def _beside(self, leaf: Leaf) -> float:
        """Bytes beside one tensor."""
        row, count, rows, columns = self.row, leaf.parameters, leaf.outputs, leaf.inputs
        embedding = leaf.path.endswith(EMBEDDINGS)
        if row.state_layout == "low_rank" and self.projected(leaf):
            low, projector = self._low(rows, columns)
            state = 4 * sum(low) if row.factored else row.states * low[0] * low[1] * self._number(SMALL, False)
            return state + projector * (4 if row.factored else self.width)  # Adafactor works in fp32
        if row.factored:
            return 4 * ((rows + columns) * max(1, leaf.stacked) or count)
        if row.state_layout == "matrix_momentum":
            return count * self.width * (1 if self.whole(leaf) else 2)
        if row.state_layout == "per_head":
            return count * self.width + (rows or 1) * self.width
        states = row.states + (row.kahan and self.width == 2)
        return states * count * self._number(count, embedding)

    def whole(self, leaf: Leaf) -> bool:
        """Whether the step works on it as one matrix: a projection, or Muon, which leaves AdamW what is none, as a
        heap of experts or a single row, and what the words go in and out by."""
        if self.row.state_layout == "low_rank":
            return self.projected(leaf)
        inside = not leaf.path.endswith(EMBEDDINGS) and leaf.path != self.shape.head
        return self.row.state_layout == "matrix_momentum" and min(leaf.outputs, leaf.inputs) > 1 and leaf.stacked < 2 and inside

    def projected(self, leaf: Leaf) -> bool:
        """Whether its gradients are projected: linear layers, the output layer among them."""
        train = self.spec.train
        if not leaf.linear or leaf.path.endswith(EMBEDDINGS):
            return False
        if train.optim_targets == "attention":
            return "attn" in leaf.path or "attention" in leaf.path
        return train.optim_targets == "all-linear" or any(name in leaf.path for name in train.optim_target_modules)

    def _low(self, rows: int, columns: int) -> tuple[tuple[int, int], int]:
        """(rows, columns) of a projected gradient, and the numbers of its projector."""
        train, random = self.spec.train, "apollo_proj" in self.row.reads
        short = min(rows, columns)
        rank = train.projection_rank if random and train.apollo_proj == "random" else min(train.projection_rank, short)
        side = "std" if random else train.galore_proj_type
        if side == "full":
            return (rank, rank), rank * (rows + columns)
        right = {"std": rows >= columns, "reverse_std": rows < columns, "right": True, "left": False}[side]
        return ((rows, rank), rank * columns) if right else ((rank, columns), rank * rows)


EMBEDDINGS = ("embed_tokens", "wte", "wpe", "embed_in")
