"""The account of one spec on one machine: the rows of device, host and disk. Floor 2.

There is a peak when a packed base is loaded that is spread later, in the passes of a step (`passes.py`), when the
optimizer works (gradients are full, activations gone), when an evaluation's loss is computed, and when rows are
answered. The rows are those of the largest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from backend import registry
from backend.machine import GIB
from backend.memory import quantized
from backend.memory.activations import ORPO_COPIES, TILE_FORWARD, TILE_TOKENS, TILE_WORDS
from backend.memory.peaks import Passes
from backend.memory.sharding import MIB, Row
from backend.resolve import total_steps

STORED: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}

# What a process holds before the model comes: Python and the libraries in RAM; on a GPU the context, the kernels
# and the workspaces of cuBLAS; and for several GPUs the buffers of NCCL.
LIBRARIES = 560 * MIB
CONTEXT = 1 * GIB
COLLECTIVES = GIB // 2
OVERHEAD = "Overhead"  # the row of what is no tensor: torch's allocator does not see it
FILE = 5 * 10**9  # of the files that most models on the hub come in
PAPERS = 8 * MIB  # tokenizer, configuration and the trainer's notes in each saved folder


@dataclass(frozen=True)
class Account(Passes):
    """All rows, each a method that says its formula."""

    def device(self) -> list[Row]:
        """What is held all the time, and the rows of the largest peak."""
        steady = self._steady()
        peaks = (self._loading(), *self.passes(), self._step(), self._evaluation(), self._answers())
        peak = max(peaks, key=lambda rows: sum(row.bytes for row in rows))
        return [row for row in (*steady, *peak) if row.bytes]

    def _steady(self) -> list[Row]:
        rows = [*self._weights(), *self._reference(), *self.live(), *self.parcels()]
        base = LIBRARIES if self.cpu else CONTEXT + (COLLECTIVES if self.run.world_size > 1 else 0)
        words = "Python and its libraries" if self.cpu else "context, kernels, workspaces of the device"
        return [*rows, Row(OVERHEAD, base, f"{words}, about")]

    @cached_property
    def _hosted(self) -> bool:
        """Whether the optimizer keeps its state beside the device by itself."""
        return self.state.row.state_on_cpu and not self.cpu

    def _weights(self) -> list[Row]:
        """Weights and optimizer state, each where it lives. DeepSpeed computes with a copy in the computing precision;
        its masters in fp32 lie with the optimizer's state."""
        trained, frozen, width, state = self.trained, self.plain, self.width, self.state
        copy = width if self.zero else state.width
        near, far = not self.weights_away, not self.optimizer_away
        rows = [
            *(self._packed(near) if self.packed else []),
            Row("Frozen weights", near * frozen * width // self.holders, f"{frozen:,} x {width} bytes{self.held}"),
            Row("Trained weights", near * trained * copy // self.holders, f"{trained:,} x {copy} bytes{self.held}"),
            Row(
                "Optimizer state",
                far * (not self._hosted) * state.bytes // self.sharers,
                f"{state.words()}{self.shared}",
            ),
        ]
        if self.zero:
            masters = far * trained * 4 // self.sharers
            rows.append(Row("Master weights", masters, f"{trained:,} x 4 bytes in fp32{self.shared}"))
        return rows

    def _reference(self) -> list[Row]:
        """What the model is held to: a second one; of an adapter a copy, since without it the model is as it was."""
        if not self.stage_row.uses_reference_model or self.weights_away:
            return []
        if self.adapter and not self.spec.needs_reference_model:
            return [Row("Reference adapter", self.trained * 4, f"{self.trained:,} x 4 bytes: as the adapter began")]
        if self.spec.preference.precompute_ref_log_probs:
            return []
        count, width = self.shape.parameters, self.width
        return [
            Row("Reference model", count * width // self.holders, f"{count:,} x {width} bytes, untouched{self.held}")
        ]

    def _packed(self, near: bool) -> list[Row]:
        """The base of QLoRA. Scales are not spread with the weights."""
        count, bits = quantized.weights(self.packed), quantized.bits(self.spec, self.shape)
        words = quantized.scales_in_words(self.spec, self.shape)
        return [
            Row("Packed weights", near * count * bits // 8 // self.holders, f"{count:,} x {bits} bits{self.held}"),
            Row("Scales of packed weights", quantized.scales(self.spec, self.shape, self.packed), words),
        ]

    def _loading(self) -> list[Row]:
        """A packed base on its way: each device holds all of it before it is spread (transformers 5.23
        modeling_utils.py makes quantized models whole under ZeRO-3; accelerate 1.15 utils/fsdp_utils.py sends none)."""
        if not self.packed or self.holders == 1:
            return []
        whole = self.packed_bytes + quantized.scales(self.spec, self.shape, self.packed) + self.plain * self.width
        more = whole - sum(row.bytes for row in self._steady()[:-1])  # all but the overhead, which is there already
        words = f"what is missing of {whole:,} bytes: each device loads the whole base"
        return [Row("Packed base on its way", max(0, more), words)]

    def _step(self) -> list[Row]:
        """The optimizer's step."""
        adam = self.spec.train.optim == "adamw_torch"
        largest = max((leaf.parameters for leaf in (*self.shape.layer, *self.shape.outside)), default=0)
        work = min(self.trained, largest) * 2 if self.cpu else self.trained if adam else 0
        work = 0 if self.optimizer_away else work // self.sharers
        return [
            self.full_gradients(),
            Row("Optimizer's work", work * self.state.width, f"{work:,} x {self.state.width} bytes while it steps"),
        ]

    def _evaluation(self) -> list[Row]:
        """The loss of an evaluation's batch, which may be larger than one of training."""
        if self.spec.eval.strategy == "no":
            return []
        batch = self.spec.eval.per_device_eval_batch_size * self.stage_row.sequences_per_example
        tokens = batch * self.length
        rows, words = min(tokens, TILE_TOKENS), min(self.shape.vocabulary, TILE_WORDS)
        each = self.width + (TILE_FORWARD if self._plain_loss() else 0)
        if self.spec.train.stage == "orpo":
            rows, words, each = tokens, self.shape.vocabulary, self.width + ORPO_COPIES
        tile = 0 if self.stage_row.is_reward_model else rows * words * each
        size = tile + tokens * self._layer
        said = f"{batch} x {self.length} tokens: a layer, and a tile of the loss"
        return [Row("Evaluation", size, said), *self.merged(1), *self.gathered(1, 2)]

    def _answers(self) -> list[Row]:
        """Held-out rows being answered, by weights that every device has whole, or its slice of them."""
        spec, shape, width = self.spec, self.shape, self.width
        if not spec.eval.num_generations or not self.stage_row.generates:
            return []
        tokens = spec.eval.per_device_eval_batch_size * (self.length + spec.eval.max_new_tokens)
        each = 2 * shape.layers * shape.kv_heads * shape.head_dim
        rows = [
            Row("Keys and values", tokens * each * width, f"{tokens:,} tokens of answers x {each:,} x {width} bytes")
        ]
        slices = self.run.tensor_parallel_size
        if self.holders > slices:
            whole = ((self.plain + self.trained) * width + self.packed_bytes) // slices
            more = max(0, whole - sum(row.bytes for row in self.live()))
            rows.append(Row("Weights gathered for answers", more, f"what is missing of {whole:,} bytes"))
        return rows

    def host(self) -> list[Row]:
        """RAM beside the devices: on a CPU run the processes themselves are the device. What loading takes is free
        again when the optimizer makes its state, so the larger of the two counts."""
        if self.cpu:
            return []
        count = self.run.nproc_per_node
        width = (
            self.width
            if self.adapter and not registry.LORA_INITS[self.spec.lora.init].changes_base_weights
            else self.state.width
        )
        loaded = (self.plain if self.adapter else self.shape.parameters) * width + self.packed_bytes
        if self.packed and self.strategy.zero_stage != 3:  # each weight goes to its device as it is read
            loaded = min(loaded, FILE)
        readers = 1 if self.run.loads_on_rank0 and not self.packed else count
        held = sum(row.bytes for row in self._reference())
        if self.strategy.engine == "fsdp" and self.spec.needs_reference_model:  # TRL spreads what each has read
            held = (self.plain if self.adapter else self.shape.parameters) * self.width + self.packed_bytes
        words = f"{readers} x {loaded:,} bytes until the device{'s have' if readers < count else ' has'} them"
        words += f", {count} x {held:,} of the reference" if held else ""
        away, loading = self._away(), readers * loaded + count * held
        more = loading - sum(row.bytes for row in away)
        words += ", beyond what is kept here later" if away else ""
        return [
            Row("Libraries", count * LIBRARIES, f"{count} x Python and its libraries, about", "host"),
            *away,
            *([Row("Weights on their way", more, words, "host")] if more > 0 else []),
        ]

    def _away(self) -> list[Row]:
        """What is kept in RAM instead of on the devices, of a node's devices together."""
        trained, rows, copies = self.trained, [], self.run.nproc_per_node / self.sharers
        state = self.state.row.state_bytes
        if self._hosted:
            count = self.run.nproc_per_node
            rows.append(Row("Optimizer state", count * self.state.bytes, f"{count} x {self.state.words()}", "host"))
        if self.optimizer_away == "cpu":
            # fp32 weights and gradients lie beside the state: deepspeed 0.19 stage_1_and_2.py, torch CPUOffloadPolicy.
            each = state + 8
            words = f"{trained:,} x ({state:g} + 8) bytes: state, fp32 weights and gradients"
            rows.append(Row("Optimizer state", round(copies * trained * each), words, "host"))
        if self.weights_away == "cpu":
            width = self.width
            whole = self.plain + self.packed_bytes // width + (trained if self.zero else 0)
            if self.spec.needs_reference_model and not self.spec.preference.precompute_ref_log_probs:
                whole += self.shape.parameters
            rows.append(Row("Weights", round(copies * whole * width), f"{whole:,} x {width} bytes", "host"))
        return rows

    def disk(self, rows: int | None) -> list[Row]:
        """Checkpoints and the trained model."""
        spec, found = self.spec, []
        wide = self.state.width
        weights = self.trained * wide + (0 if self.adapter else self.frozen * self.width)
        if spec.save.strategy != "no":
            copied = self.trained * wide if self.adapter and self.stage_row.uses_reference_model else 0
            state = 0 if spec.save.only_model else self.state.bytes
            count = self._written(rows)
            each = weights + copied + state + PAPERS
            words = f"{count} x {each:,} bytes of weights{' and optimizer state' if state else ''}, tokenizer"
            found.append(Row("Checkpoints", count * each, words, "disk"))
        if spec.save.final_model:
            whole = not self.adapter or spec.save.merge_adapter
            stored = STORED.get(self.shape.dtype, 4) if wide == 4 else 2
            size = self.shape.parameters * stored if whole else weights
            words = f"{self.shape.parameters:,} x {stored} bytes" if whole else f"{self.trained:,} x {wide} bytes"
            found.append(Row("Trained model", size + PAPERS, f"{words}, tokenizer", "disk"))
        return found

    def _written(self, rows: int | None) -> int:
        """Checkpoints on the disk at once: the kept ones and the one that is being written."""
        whole = total_steps(self.spec, rows, self.run.data_parallel_size)
        made = None
        if self.spec.save.strategy == "steps" and whole is not None:
            made = math.ceil(whole / self.spec.save.steps)
        elif self.spec.save.strategy == "epoch" and self.spec.train.duration == "epochs":
            made = math.ceil(self.spec.train.num_train_epochs)
        if self.spec.save.total_limit:
            return min(self.spec.save.total_limit + 1, made or self.spec.save.total_limit + 1)
        return made or 1
