"""What a step keeps for its way back, by the shape of the model. Floor 2. Imports catalog, derived, machine, shape,
spec.

Held against torch's own saved tensors, architecture by architecture (`tests/unit/test_memory.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from backend import catalog
from backend.derived import device
from backend.memory.spread import Row, Spread
from backend.shape import Leaf, adapted

# TRL's loss multiplies the last hidden states with the output layer in tiles of so many tokens and words; where there
# is no Triton a tile becomes about seven of fp32 on the way.
TILE_TOKENS, TILE_WORDS = 4096, 32_768
TILE_COPIES, TILE_FORWARD = 29, 12  # bytes, in training and in evaluation
# trl 1.16's ORPO takes the loss from whole logits: beside them and their gradient, in fp32, those of the chosen half.
ORPO_COPIES = 8
# Linear layers that lead back into the stream, and those that make several things at once.
BACK = ("o_proj", "dense", "c_proj", "down_proj", "fc2", "dense_4h_to_h")
FUSED = ("qkv_proj", "query_key_value", "c_attn")
COMPOSED = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh_python")  # activations made of several operations


@dataclass(frozen=True)
class Activations(Spread):
    """What a step keeps for its way back."""

    @property
    def length(self) -> int:
        """Tokens of the longest row in a batch."""
        cut = self.spec.data.max_length
        return min(cut, self.longest) if self.longest and not self.spec.data.packing else cut

    @property
    def stage_row(self) -> catalog.Stage:
        """What the stage is like."""
        return catalog.STAGES[self.spec.train.stage]

    @property
    def sequences(self) -> int:
        """Sequences that a device works on at once: a row that compares two answers makes two."""
        return self.spec.train.batch_size * self.stage_row.sequences

    @property
    def tokens(self) -> int:
        """Tokens that a device works on at once: its piece of each row, where several devices share them."""
        return -(-self.sequences * self.length // self.spec.parallel.pieces)

    def _plain_loss(self) -> bool:
        """Whether the loss is computed without Triton."""
        return device(self.spec, self.machine) not in ("cuda", "xpu")

    def _layer(self) -> int:
        """Bytes that one layer keeps for the backward pass, for each token."""
        shape, width = self.shape, self.width
        inner, wide = shape.intermediate, shape.heads * shape.head_dim
        found = {leaf.path.rpartition(".")[2]: leaf for leaf in adapted(self.spec.method, shape)}
        taught = [leaf for leaf in shape.layer if leaf.inputs and (not self.adapter or _end(leaf) in found)]
        into = [leaf for leaf in taught if leaf.inputs == shape.hidden and _end(leaf) not in BACK]
        # In mixed precision every linear layer casts its input for itself; in fp32 neighbours share one tensor.
        inputs = (len(into) if width == 2 else min(2, len(into))) * shape.hidden * width
        keys = 2 * (wide if self.cpu else shape.kv_heads * shape.head_dim)  # repeated for every head where it must be
        fused = wide if any(_end(leaf) in FUSED for leaf in shape.layer) else 0
        attention = (2 * wide + keys + fused) * width
        kept = (3 if shape.gated else 4 if shape.activation in COMPOSED else 1) * inner * width
        back = sum(leaf.inputs for leaf in taught if _end(leaf) in BACK) * width
        if not self.adapter or width == 4:
            back = inner * width  # the attention's own result, kept already, is the input of its projection
        beside = 0
        if self.adapter:
            method, wide_in = self.spec.method, sum(leaf.inputs for leaf in taught)
            if method.lora_dropout:  # each adapter drops from a copy of its own, and keeps which
                inputs, back = wide_in * width, wide_in * (4 if self.cpu else 1)
            beside = method.lora_rank * len(taught) * width
            if method.lora_dora:  # the results of base and adapter, for the gradient of the lengths
                beside += 2 * sum(leaf.outputs for leaf in taught) * width
        return self._norms() + inputs + attention + kept + back + beside

    def _norms(self) -> int:
        """Bytes that the norms of a layer keep for each token: the input in fp32, and what a trained weight scaled."""
        shape, bytes_ = self.shape, 0
        for leaf in shape.layer:
            if leaf.inputs:
                continue
            if not shape.gated:  # LayerNorm: one fused kernel
                bytes_ += shape.hidden * 4
                continue
            inside = _end(leaf) in ("q_norm", "k_norm")
            heads = shape.heads if _end(leaf) == "q_norm" else shape.kv_heads
            size = heads * shape.head_dim if inside else shape.hidden
            scaled = 0 if self.adapter else self.width if inside else 4
            bytes_ += size * (4 + scaled)
        return bytes_

    def _layers(self) -> int:
        """Layers that the backward pass goes through."""
        method = self.spec.method
        if method.kind == "freeze" and method.freeze_layers > 0 and "embed" not in " ".join(method.freeze_also):
            return min(self.shape.layers, method.freeze_layers)
        return self.shape.layers

    def _activations(self) -> Row:
        spec, shape, layers, each = self.spec, self.shape, self._layers(), self._layer()
        both = " x 2 answers" if self.stage_row.sequences == 2 else ""
        size = f"{spec.train.batch_size}{both} x {self.length} tokens"
        stream = 4 if not self.adapter else self.width
        ends = self.tokens * shape.hidden * (12 if not self.adapter else 4 + self.width)
        mask = self._square()
        if spec.train.activation_checkpointing:
            total = self.tokens * (layers * shape.hidden * stream + each) + mask + ends
            words = f"{size} x ({layers} layers x {shape.hidden * stream:,} bytes + {each:,} of one layer)"
        else:
            total = layers * (self.tokens * each + mask) + ends
            words = f"{size} x {layers} layers x {each:,} bytes"
        return Row("Activations", total, words + (", and the attention's masks" if mask else ""))

    def _square(self) -> int:
        """Bytes that a layer keeps for pairs of tokens: the mask of padded or packed rows, and scores written out."""
        spec, shape = self.spec, self.shape
        batch, length = self.sequences, self.length
        if spec.data.packing:
            batch, length = 1, batch * length  # packed rows lie one behind the other
        asked, flash = spec.model.attention, spec.model.attention in (*catalog.FLASH, "flex_attention")
        masked = self.width if (spec.data.packing or batch > 1) and not flash else 0
        scores = 8 if shape.model_type == "gemma2" else 12 if self.cpu and shape.model_type == "gpt2" else 0
        if asked == "eager":
            scores, masked = 4 + (self.width if self.width == 2 else 0), 0
        return batch * length**2 * (masked + scores * shape.heads)

    def _dora(self) -> Row:
        """What DoRA makes and drops again in every layer, to know the lengths of the rows."""
        leaves = adapted(self.spec.method, self.shape) if self.adapter and self.spec.method.lora_dora else []
        largest = max(leaves, key=lambda leaf: leaf.inputs * (3 * leaf.outputs + leaf.inputs), default=Leaf("", 0))
        size = largest.inputs * (3 * largest.outputs + largest.inputs) * 4
        words = f"3 x {largest.inputs} x {largest.outputs} and {largest.inputs} x {largest.inputs}, 4 bytes each"
        return Row("DoRA's work", size, words)

    def _unpacked(self) -> Row:
        """The packed layer at work, in the computing precision."""
        largest = max((leaf.inputs * leaf.outputs for leaf in self.packed), default=0)
        return Row(
            "A layer unpacked", largest * self.width, f"{largest:,} x {self.width} bytes, one layer after another"
        )

    def _loss(self) -> Row:
        shape, width = self.shape, self.width
        if self.stage_row.scores:
            return Row("Loss", self.tokens * 4, f"{self.tokens:,} tokens x 4 bytes: a score for each")
        if self.spec.train.stage == "orpo":
            each = ORPO_COPIES + 2 * width
            said = f"{self.tokens:,} tokens x {shape.vocabulary:,} words x {each} bytes: ORPO keeps all probabilities"
            return Row("Loss", self.tokens * shape.vocabulary * each, said)
        rows, words = min(self.tokens, TILE_TOKENS), min(shape.vocabulary, TILE_WORDS)
        each = width + (TILE_COPIES if self._plain_loss() else 0)
        weights = words * shape.hidden * ((2 + 4 * self.cpu) if width == 2 else 0)
        return Row("Loss", rows * words * each + weights, f"a tile of {rows:,} tokens x {words:,} words x {each} bytes")


def _end(leaf: Leaf) -> str:
    return leaf.path.rpartition(".")[2]
