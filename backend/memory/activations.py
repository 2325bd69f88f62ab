"""What a step keeps for its way back, by the shape of the model. Floor 2. Imports catalog, derived, machine, shape,
spec.

Held against torch's own saved tensors, architecture by architecture (`tests/unit/test_memory.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from backend import registry
from backend.memory.sharding import Row, Spread
from backend.modelspec import Leaf, adapted
from backend.resolve import before_ampere, selected_gpus

# TRL's loss multiplies the last hidden states with the output layer in tiles of so many tokens and words; where there
# is no Triton a tile becomes about seven of fp32 on the way.
TILE_TOKENS, TILE_WORDS = 4096, 32_768
TILE_COPIES, TILE_FORWARD = 29, 12  # bytes, in training and in evaluation
# trl 1.16's ORPO takes the loss from whole logits: beside them and their gradient, in fp32, those of the chosen half.
ORPO_COPIES = 8
INDICES = 32  # bytes: where a token went for one of its experts, there and back
# Linear layers that lead back into the stream, and those that make several things at once.
BACK = ("o_proj", "dense", "c_proj", "down_proj", "fc2", "dense_4h_to_h")
FUSED = ("qkv_proj", "query_key_value", "c_attn")
COMPOSED = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh_python")  # activations made of several operations


@dataclass(frozen=True)
class Activations(Spread):
    """What a step keeps for its way back."""

    @cached_property
    def length(self) -> int:
        """Tokens of the longest row in a batch."""
        cut = self.spec.data.max_length
        return min(cut, self.longest) if self.longest and not self.spec.data.packing else cut

    @cached_property
    def stage_row(self) -> registry.Stage:
        """What the stage is like."""
        return registry.STAGES[self.spec.train.stage]

    @cached_property
    def sequences(self) -> int:
        """Sequences that a device works on at once: a row that compares two answers makes two."""
        return self.spec.train.per_device_train_batch_size * self.stage_row.sequences_per_example

    @cached_property
    def tokens(self) -> int:
        """Tokens that a device works on at once: its piece of each row, where several devices share them."""
        return -(-self.sequences * self.length // self.run.token_shards)

    def _plain_loss(self) -> bool:
        """Whether the loss is computed without Triton."""
        return self.run.device not in ("cuda", "xpu")

    @cached_property
    def autocast(self) -> bool:
        """Whether autocast casts for each operation. FSDP and DeepSpeed cast weights and inputs beforehand."""
        return self.width == 2 and self.run.fp32_master_weights and self.strategy.engine not in ("fsdp", "deepspeed")

    @cached_property
    def stream(self) -> int:
        """Bytes of a number in the stream from layer to layer: autocast leaves it in fp32 if the embeddings are."""
        return 4 if self.autocast and self.spec.method.kind == "full" else self.width

    @cached_property
    def masked(self) -> bool:
        """Whether attention is given a mask: rows of a batch are filled up, packed ones kept apart."""
        fused = self.spec.model.attn_implementation in (*registry.FLASH_ATTENTIONS, "flex_attention")
        return (self.spec.data.packing or self.sequences > 1) and not fused

    @cached_property
    def eager(self) -> bool:
        """Whether transformers computes attention step by step: requested, or the model has no SDPA."""
        asked = self.spec.model.attn_implementation
        lacks = not self.shape.sdpa and self.shape.model_type != "gemma2"  # whose scores `_square` counts
        return asked == "eager" or (asked in ("auto", "sdpa") and lacks)

    @cached_property
    def written_out(self) -> bool:
        """Whether torch computes attention step by step and keeps its scores: on NVIDIA, without a mask, heads that
        share keys have a kernel in 16 bits and on Ampere or later alone (torch 2.13 sdp_utils.cpp; PR 181528)."""
        shape, fused = self.shape, self.spec.model.attn_implementation in ("auto", "sdpa")
        bare = fused and not self.masked and not self.eager
        nvidia = self.run.device == "cuda"
        gpus = selected_gpus(self.run, self.machine) or self.machine.gpus
        late = self.width == 2 and not any(before_ampere(gpu.capability) for gpu in gpus)
        return nvidia and bare and shape.kv_heads < shape.heads and not late

    @cached_property
    def _layer(self) -> int:
        """Bytes that one layer keeps for the backward pass, for each token."""
        shape, width = self.shape, self.width
        inner, wide = shape.intermediate, shape.heads * shape.head_dim
        each = [leaf for leaf in shape.layer if leaf.inputs and leaf.stacked < 2]
        taught = [leaf for leaf in each if not self.adapter or _end(leaf) in self._adapted]
        into = [leaf for leaf in taught if leaf.inputs == shape.hidden and _end(leaf) not in BACK]
        # Under autocast every linear layer casts its input for itself; otherwise neighbours share one tensor.
        inputs = (len(into) if self.autocast else min(2, len(into))) * shape.hidden * width
        repeated = self.cpu or self.masked or self.written_out  # keys and values, for every head
        keys = 2 * (wide if repeated else shape.kv_heads * shape.head_dim)
        fused = wide if any(_end(leaf) in FUSED for leaf in shape.layer) else 0
        attention = (2 * wide + keys + fused) * width
        kept = (3 if shape.gated else 4 if shape.activation in COMPOSED else 1) * inner * width
        back = sum(leaf.inputs for leaf in taught if _end(leaf) in BACK) * width
        if not (self.adapter and self.autocast):
            back = inner * width  # the attention's own result, kept already, is the input of its projection
        if shape.experts:
            kept, back = self._chosen(), back if self.adapter and self.autocast else 0
        beside = 0
        if self.adapter:
            wide_in = sum(leaf.inputs for leaf in taught)
            if self.spec.lora.dropout:  # each adapter drops from a copy of its own, and keeps which
                inputs, back = wide_in * width, wide_in * (4 if self.cpu else 1)
            beside = self.spec.lora.r * len(taught) * width
            if self.spec.lora.use_dora:  # the results of base and adapter, for the gradient of the lengths
                beside += 2 * sum(leaf.outputs for leaf in taught) * width
        return self._norms() + inputs + attention + kept + back + beside

    @cached_property
    def _adapted(self) -> set[str]:
        """Ends of the names of modules with an adapter."""
        return {_end(leaf) for leaf in adapted(self.spec.lora, self.shape)} if self.adapter else set()

    def _chosen(self) -> int:
        """Bytes that a mixture keeps for each token: a copy of what each of its experts makes of it, and of what they
        are given where they are trained; and what the router said, in fp32 and for the loss that balances it."""
        shape, taught = self.shape, not self.adapter or self._taught_experts > 0
        each = (3 + taught) * shape.intermediate + (1 + taught) * shape.hidden
        return shape.active * (each * self._stacked_width + INDICES) + shape.experts * 8

    @cached_property
    def _stacked_width(self) -> int:
        """Bytes of a number in a mixture's experts: autocast does not know stacked weights."""
        return 4 if self.autocast and not self.adapter else self.width

    @cached_property
    def _taught_experts(self) -> int:
        """Weights of a layer's experts that carry adapters."""
        leaves = adapted(self.spec.lora, self.shape) if self.adapter and self.shape.experts else []
        return sum(leaf.parameters for leaf in leaves if leaf.stacked > 1) // self.shape.layers

    def merged(self, layers: int) -> list[Row]:
        """Experts with their adapters, which peft adds to the weights before they are used: a copy of those."""
        count = self._taught_experts
        if not count:
            return []
        words = f"{layers} layers x {count:,} x {self.width} bytes: weights and adapter, added"
        return [Row("Experts with adapters", layers * count * self.width, words)]

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
            scaled = 0 if self.adapter else self.width if inside else self.stream
            bytes_ += size * (4 + scaled)
        return bytes_

    def _layers(self) -> int:
        """Layers that the backward pass goes through: with checkpointing all, since transformers 5.23 asks the
        embeddings for a gradient, whatever is trained (modeling_utils.py, enable_input_require_grads)."""
        method = self.spec.method
        if self.spec.train.activation_checkpointing:
            return self.shape.layers
        if (
            method.kind == "freeze"
            and method.freeze_trainable_layers > 0
            and "embed" not in " ".join(method.freeze_extra_modules)
        ):
            return min(self.shape.layers, method.freeze_trainable_layers)
        return self.shape.layers

    def _activations(self, again: bool = True, done: int = 0) -> Row:
        """What the forward pass leaves; with checkpointing and `again`, also the layer that is computed once more.
        `done`: layers that the backward pass has behind it, and with them what was kept at the end."""
        spec, shape, each = self.spec, self.shape, self._layer
        layers = max(1, self._layers() - done)
        both = " x 2 answers" if self.stage_row.sequences_per_example == 2 else ""
        size = f"{spec.train.per_device_train_batch_size}{both} x {self.length} tokens"
        # The last norm's input in fp32 and, scaled, its own; the learned tokens' states, chosen.
        ends = 0 if done else self.tokens * shape.hidden * (4 + self.stream * (2 if spec.method.kind == "full" else 1))
        mask = self._square()
        if spec.train.activation_checkpointing:
            stored = self.masked * self._pairs()  # the mask as it came, a byte a pair, for all layers
            total = self.tokens * (layers * shape.hidden * self.stream + again * each) + again * mask + stored + ends
            words = f"{size} x ({layers} layers x {shape.hidden * self.stream:,} bytes"
            words += f" + {each:,} of one layer)" if again else ")"
        else:
            total = layers * (self.tokens * each + mask) + ends
            words = f"{size} x {layers} layers x {each:,} bytes"
        return Row("Activations", total, words + (", and the attention's masks" if mask else ""))

    def _square(self) -> int:
        """Bytes that a layer keeps for pairs of tokens: the mask of padded or packed rows, and scores written out."""
        shape = self.shape
        masked = self.width if self.masked else 0
        scores = 8 if shape.model_type == "gemma2" else 12 if self.cpu and shape.model_type == "gpt2" else 0
        if self.eager:
            scores, masked = 4 + (self.width if self.width == 2 else 0), 0
        if self.written_out:
            scores = 4
        return self._pairs() * (masked + scores * shape.heads)

    def _pairs(self) -> int:
        """Pairs of tokens that attention looks at; packed rows lie one behind the other."""
        rows, length = (1, self.sequences * self.length) if self.spec.data.packing else (self.sequences, self.length)
        return rows * length**2

    def _at_work(self) -> Row:
        """What the backward pass of a layer makes and drops: of its MLP, or where attention is written out twice the
        gradients of its scores, when what the MLP kept is gone."""
        shape, scores = self.shape, 0
        if self.written_out or self.eager:
            kept = self._chosen() if shape.experts else 4 * shape.intermediate * self.width
            scores = 2 * self._pairs() * shape.heads * 4 - self.tokens * kept
        row = self._choice_at_work() if shape.experts else self._mlp_at_work()
        return row if row.bytes > scores else replace(row, bytes=scores, formula="the attention's scores, twice")

    def _mlp_at_work(self) -> Row:
        """Two gradients inside of it, the stream's, and that of one matrix."""
        shape, width = self.shape, self.width
        inside = self.tokens * shape.intermediate * width
        matrix = 0 if self.adapter else shape.intermediate * shape.hidden * width
        # Adapters in fp32 take their inputs in fp32, which autocast casts back.
        count, stream = (3, 4) if self.adapter and self.autocast else (2, self.stream)
        size = count * inside + self.tokens * shape.hidden * stream + matrix
        words = (
            f"{self.tokens:,} tokens x ({count} x {shape.intermediate:,} x {width} + {shape.hidden:,} x {stream}) bytes"
        )
        return Row("A layer's gradients", size, words)

    def _choice_at_work(self) -> Row:
        """As `_mlp_at_work`, of a mixture: inside of the chosen experts, at what they made and the inner gradient; or
        with adapters on them, the gradient of a weight and its adapter."""
        shape, width = self.shape, self._stacked_width
        inside = max(2 * shape.intermediate, shape.intermediate + 2 * shape.hidden) * shape.active * width
        matrix = shape.experts * shape.intermediate * shape.hidden * self.width * (self._taught_experts > 0)
        size = max(self.tokens * inside, matrix) + self.tokens * shape.hidden * self.stream
        words = f"{self.tokens:,} tokens x ({inside:,} in {shape.active} experts"
        return Row("A layer's gradients", size, f"{words} + {shape.hidden:,} x {self.stream}) bytes")

    def _dora(self) -> Row:
        """What DoRA makes and drops again in every layer, to know the lengths of the rows."""
        leaves = adapted(self.spec.lora, self.shape) if self.adapter and self.spec.lora.use_dora else []
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
        if self.stage_row.is_reward_model:
            return Row("Loss", self.tokens * 4, f"{self.tokens:,} tokens x 4 bytes: a score for each")
        if self.spec.train.stage == "orpo":
            each = ORPO_COPIES + 2 * width
            said = f"{self.tokens:,} tokens x {shape.vocabulary:,} words x {each} bytes: ORPO keeps all probabilities"
            return Row("Loss", self.tokens * shape.vocabulary * each, said)
        rows, words = min(self.tokens, TILE_TOKENS), min(shape.vocabulary, TILE_WORDS)
        if not self._plain_loss():
            return self._fused_loss(rows)
        each = width + TILE_COPIES
        weights = words * shape.hidden * ((2 + 4 * self.cpu) if width == 2 else 0)
        return Row("Loss", rows * words * each + weights, f"a tile of {rows:,} tokens x {words:,} words x {each} bytes")

    def _fused_loss(self, rows: int) -> Row:
        """By Triton: a tile, as wide as it may be; its weights where they must be cast, beside those of the one before;
        the states' gradient in fp32, and cast (trl 1.16 kernels/chunked_logprob.py)."""
        shape, width = self.shape, self.width
        tiles = -(-self.tokens // TILE_TOKENS) * -(-shape.vocabulary // TILE_WORDS)
        cast = min(2, tiles) * min(shape.vocabulary, TILE_WORDS) * shape.hidden * width if self.stream > width else 0
        states = self.tokens * shape.hidden * (4 + (width if self.stream == 2 else 0))
        words = f"a tile of {rows:,} tokens x {TILE_WORDS:,} words x {width} bytes, and the states' gradient"
        return Row("Loss", rows * TILE_WORDS * width + cast + states, words)


def _end(leaf: Leaf) -> str:
    return leaf.path.rpartition(".")[2]
