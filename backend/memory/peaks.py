"""What comes and goes in a step: the forward pass with the loss, and the backward pass through the output layer, the
last layer and the first one. Floor 2. Imports the rooms below.

Devices are looked at in a few moments. Between them memory goes up or down evenly, layer by layer, so one of them is
the peak of both passes. On a CPU the process's peak was measured instead, with what its allocator keeps. Held against
torch's own tracker (`tests/process/test_tracked.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from backend.memory.activations import Activations
from backend.memory.optimizer_state import State
from backend.memory.sharding import AT_ONCE, Row

# In RAM freed activations leave holes that glibc keeps: so much of what a step without checkpointing keeps. Adapters
# make more short-lived tensors between the lasting ones. Measured on a CPU; devices have an allocator of torch's own.
HOLES: Mapping[str, float] = {"lora": 0.55, "full": 0.2, "freeze": 0.2}


@dataclass(frozen=True)
class Passes(Activations):
    """The moments of both passes, each a method that says its rows."""

    def passes(self) -> list[list[Row]]:
        """The rows of each moment."""
        if self.cpu:
            return [self._forward()]
        return [
            *self._gathering(),
            self._ahead(),
            self._turning(),
            self._upper(0),
            self._upper(1),
            self._first_layer(),
            self._embeddings(),
        ]

    @cached_property
    def state(self) -> State:
        """What the optimizer keeps."""
        return State(self.spec, self.shape, flat=self.strategy.zero_stage > 0)

    def _forward(self) -> list[Row]:
        """The end of the forward pass, on a CPU."""
        rows = [
            self._activations(),
            self._dora(),
            self._unpacked(),
            self._loss(),
            self._copies(1),
            *self.gathered(2, 1),
        ]
        rows += [
            *self.merged(self._copied),
            *self._on_the_way(0),
            *(self._kept_gradients() or self._coming(self._head_gradient())),
        ]
        share = HOLES[self.spec.method.kind]
        kept = round(share * self._layers() * self.tokens * self._layer)
        return [*rows, Row("Held by the allocator", kept, f"{share:.0%} of all activations, as measured")]

    def _ahead(self) -> list[Row]:
        """The loss, going forward. Autocast has a copy of every weight; FSDP still has what it gathered last."""
        tail = 1 if self.shape.tied else 2
        rows = [self._activations(again=False), self._dora(), self._unpacked(), self._loss(), self._copies(1)]
        rows += [*self.merged(self._copied), *self.gathered(1 if self.shape.tied else 0, tail)]
        return [*rows, *self._kept_gradients()]

    def _gathering(self) -> list[list[Row]]:
        """FSDP on its way to the output layer, which comes last; tied to the embeddings it comes first, and the first
        layers after it. Then there are two of it, before and after it was put together; so there are of the last layer,
        beside the one before as it came."""
        if not self.shards:
            return []
        layers = [self._activations(again=False, done=1), *self.gathered(1, 0, apart=2), *self._kept_gradients()]
        if self.shape.tied:
            return [self.gathered(AT_ONCE, 2), layers]
        copied = self.merged(0 if self._checkpoints else self._copied)
        return [[self._activations(again=False), *copied, *self.gathered(1, 2), *self._kept_gradients()], layers]

    def _turning(self) -> list[Row]:
        """The loss, on its way back: the output layer's gradient is added up in fp32."""
        rows = [self._activations(again=False), self._loss(), self._copies(0 if self._checkpoints else 1)]
        count, width = self._head_gradient(), 2 if self.stream == 2 else 0
        words = f"{count:,} x {4 + width} bytes of the output layer, added up in fp32{', and cast' if width else ''}"
        head = Row("Output layer's gradient", count * (4 + width), words)
        rows += self.merged(0 if self._checkpoints else self._copied)
        return [*rows, *self.gathered(1, 1), head, *self._kept_gradients()]

    def _upper(self, done: int) -> list[Row]:
        """The backward pass of the last layer, with all activations, or of the one before, with its gradients."""
        rows = [self._activations(done=done), self._dora(), self._unpacked(), self._at_work()]
        rows += [self._copies(1 / self.shape.layers if self._checkpoints else 1), *self.gathered(AT_ONCE, 0)]
        rows += self._kept_gradients() or self._coming(self._head_gradient() + done * self._each)
        rows += self.merged(self._copied - (0 if self._checkpoints else done))
        return [*rows, *self._on_the_way(self._each if done else self._head_gradient())]

    def _first_layer(self) -> list[Row]:
        """The backward pass of the first layer, with few activations and nearly all gradients."""
        each = self.tokens * self._layer + self._square()
        words = f"{self.tokens:,} tokens x {self._layer:,} bytes of one layer"
        rows = [Row("Activations", each, words), self._dora(), self._unpacked(), self._at_work()]
        rows += [self._copies(1 / self.shape.layers), *self.gathered(AT_ONCE, 0, last=True)]
        ends = self.ends[0] if self.spec.method.kind == "full" else 0
        rows += self._kept_gradients() or self._coming(self.trained - self._each - ends)
        return [*rows, *self.merged(1), *self._on_the_way(self._each)]

    def _embeddings(self) -> list[Row]:
        """The end of the backward pass: the embeddings' gradient."""
        full = (self._kept_gradients() or [self.full_gradients()])[0]
        if self.spec.method.kind != "full" or self.state.row.state_layout == "one_block" or self.state.row.steps_in_backward:
            return [full]
        size, times = self.shape.vocabulary * self.shape.hidden, 2 if self.shape.tied else 1
        if not self.shards:
            more = (times - 1) * size * self.state.width
            return [full, Row("Embeddings' gradient", more, f"{size:,} x {self.state.width} bytes, to be added")]
        words = f"{size:,} x {times} x {self.width} bytes"
        return [
            full,
            *self.gathered(0, 1, last=True),
            Row("Embeddings' gradient", size * times * self.width, words),
            *self._reduced(size),
        ]

    @cached_property
    def _each(self) -> int:
        """Trained weights of a layer."""
        method = self.spec.method
        if method.kind == "lora":
            return self.trained // self.shape.layers
        return self.shape.layer_parameters if method.kind == "full" or method.freeze_trainable_layers else 0

    @cached_property
    def _checkpoints(self) -> bool:
        return self.spec.train.activation_checkpointing

    @cached_property
    def _copied(self) -> int:
        """Layers whose experts are there with their adapters when the forward pass has ended."""
        return 1 if self._checkpoints else self._layers()

    def _copies(self, share: float) -> Row:
        """Trained weights of linear layers: autocast keeps a copy of each until the forward pass has ended, and longer
        where its gradient asks for it."""
        linear = sum(leaf.parameters for leaf in self.shape.layer if leaf.linear) * self._layers()
        count = round(share * self.autocast * (self.trained if self.adapter else min(linear, self.trained)))
        return Row("Copies for mixed precision", count * 2, f"{count:,} trained weights x 2 bytes")

    def _gradients(self, count: int) -> tuple[int, str]:
        """(bytes, formula) of the gradients of `count` weights."""
        width = self.width if self.zero else self.state.width
        away = self.optimizer_away and self.strategy.zero_stage != 1
        words = f"{count:,} x {width} bytes{self.shared if self.spreads_gradients else ''}"
        size = count * width // (self.sharers if self.spreads_gradients else 1)
        return (0, words) if away else (size, words)

    def _reduced(self, count: int) -> list[Row]:
        """Gradients of FSDP on their way to the devices that hold them, whole."""
        width = 4 if self.spec.parallel.reduce_dtype == "fp32" else self.width
        words = f"{count:,} x {width} bytes, to be added up and spread"
        return [Row("Gradients on their way", count * width, words)]

    def _on_the_way(self, before: int) -> list[Row]:
        """With FSDP: a layer's gradients as they come, as far as they are more than what goes meanwhile of its work and
        its activations, and the `before` that are being spread. Those of a tied output layer wait for the embeddings'.
        """
        if not self.shards:
            return []
        tied = self.shape.tied and self.spec.method.kind == "full"
        waiting = self.ends[1] * self.width if tied else 0
        gone = 0 if self.written_out else self._at_work().bytes + self.tokens * self._layer // 2  # scores come last
        coming = waiting + max(0, self._each * self.width - gone)
        said = (
            f"{self._each:,} x {self.width} bytes as they come, less what goes"
            + bool(waiting) * ", and the output layer's"
        )
        return [
            Row("Gradients that come", coming, said),
            *self._reduced(0 if tied and before == self.ends[1] else before),
        ]

    def _coming(self, count: int) -> list[Row]:
        """Gradients of the first `count` weights, or as many as there ever are at once."""
        size, words = self._gradients(max(0, count))
        return [Row("Gradients", min(size, self.full_gradients().bytes), f"{words}, those that came first")]

    def _kept_gradients(self) -> list[Row]:
        """All of them, where they are added up over several batches."""
        full = self.full_gradients()
        words = f"{full.formula}, kept over accumulation"
        return [Row("Gradients", full.bytes, words)] if self.spec.train.gradient_accumulation_steps > 1 else []

    def full_gradients(self) -> Row:
        """Gradients when the backward pass has ended, or is in the midst of steps of its own."""
        row, state = self.state.row, self.state
        if row.steps_in_backward:
            size, words = self._gradients(state.largest)
            return Row("Gradients", size, f"{words} of the largest matrix: each is freed once it was used")
        if row.state_layout == "one_block":
            size, words = self._gradients(state.block)
            return Row("Gradients", size, f"{words} of one layer")
        return Row("Gradients", *self._gradients(self.trained))

    def _head_gradient(self) -> int:
        """Parameters of the output layer, if it is trained: its gradient comes while activations are full."""
        size = self.shape.vocabulary * self.shape.hidden
        if self.stage_row.is_reward_model:
            return self.shape.hidden
        if self.spec.method.kind == "full":
            return 0 if self.state.row.state_layout == "one_block" else size
        names = self.spec.lora.modules_to_save if self.adapter else self.spec.method.freeze_extra_modules
        return size if "lm_head" in names or (self.shape.tied and "embed_tokens" in names) else 0
