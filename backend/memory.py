"""How much memory a run takes: bytes on each device, in the host's RAM and on disk, row by row with its formula.

Floor 2. Imports: catalog, derived, machine, shape, spec. Closed form, no torch. There are three peaks: when
the forward pass has ended (activations are full, gradients still empty), when the optimizer works (gradients are full,
activations gone), and when an evaluation's loss is computed. The rows are those of the largest. On a CPU run "device"
means the RAM of one process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from backend import catalog
from backend.derived import device, precision, processes, steps
from backend.machine import GIB, Machine
from backend.shape import Leaf, ModelShape, adapted, trainable
from backend.spec import RunSpec

MIB = 2**20
BYTES: Mapping[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4}
STORED: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}

# What a process holds before the model comes: Python and the libraries in RAM; on a GPU the context, the kernels
# and the workspaces of cuBLAS; and for several GPUs the buffers of NCCL.
LIBRARIES = 560 * MIB
CONTEXT = 1 * GIB
COLLECTIVES = GIB // 2
# TRL's loss multiplies the last hidden states with the output layer in tiles of so many tokens and words; where there
# is no Triton a tile becomes about seven of fp32 on the way.
TILE_TOKENS, TILE_WORDS = 4096, 32_768
TILE_COPIES, TILE_FORWARD = 29, 12  # bytes, in training and in evaluation
# In RAM freed activations leave holes that glibc keeps: so much of what a step without checkpointing keeps. Adapters
# make more short-lived tensors between the lasting ones. Measured on a CPU; devices have an allocator of torch's own.
HOLES = {"lora": 0.55, "full": 0.2, "freeze": 0.2}
PAPERS = 8 * MIB  # tokenizer, configuration and the trainer's notes in each saved folder

# Linear layers that lead back into the stream, and those that make several things at once.
BACK = ("o_proj", "dense", "c_proj", "down_proj", "fc2", "dense_4h_to_h")
FUSED = ("qkv_proj", "query_key_value", "c_attn")
COMPOSED = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh_python")  # activations made of several operations


@dataclass(frozen=True)
class Row:
    """One line of the account: `where` is device, host or disk; `formula` says in words how the bytes come about."""

    name: str
    bytes: int
    formula: str
    where: str = "device"


@dataclass(frozen=True)
class Estimate:
    """Bytes on each device, on the host and on disk. `fits` is None, with the reason in `unknown`, if nobody knows."""

    rows: tuple[Row, ...] = ()
    capacity_bytes: int = 0
    unknown: str = ""

    def total(self, where: str) -> int:
        """Bytes of all rows of one place."""
        return sum(row.bytes for row in self.rows if row.where == where)

    @property
    def device_bytes(self) -> int:
        """The peak on each device."""
        return self.total("device")

    @property
    def host_bytes(self) -> int:
        """The peak in RAM of all processes together, beside the devices."""
        return self.total("host")

    @property
    def disk_bytes(self) -> int:
        """What the run leaves on disk at most."""
        return self.total("disk")

    @property
    def fits(self) -> bool | None:
        """Whether the peak stays within what each device has free."""
        return None if self.unknown or not self.capacity_bytes else self.device_bytes <= self.capacity_bytes


def capacity(spec: RunSpec, machine: Machine) -> int:
    """Bytes free on the fullest device that the run uses; of a CPU run, RAM for each process."""
    family, count = device(spec, machine), processes(spec)
    if family == "cpu":
        return machine.ram_free_bytes // count
    if family != machine.device:
        return 0
    used = [gpu for gpu in machine.gpus if gpu.id in spec.launch.devices] or list(machine.gpus[:count])
    return min((gpu.free_bytes for gpu in used), default=0)


def estimate(
    spec: RunSpec,
    machine: Machine,
    shape: ModelShape | None,
    why: str = "the model's config.json is not at hand",
    longest: int = 0,
    rows: int | None = None,
) -> Estimate:
    """The account of `spec`. `longest` is the longest row in tokens, `rows` how many there are, if known.

    `why` says why there is no shape, as the end of a sentence.
    """
    room = capacity(spec, machine)
    if shape is None:
        return Estimate((), room, why)
    account = Account(spec, machine, shape, longest)
    return Estimate((*account.device(), *account.host(), *account.disk(rows)), room)


@dataclass(frozen=True)
class Account:
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

    @property
    def length(self) -> int:
        """Tokens of the longest row in a batch."""
        cut = self.spec.data.max_length
        return min(cut, self.longest) if self.longest and not self.spec.data.packing else cut

    @property
    def tokens(self) -> int:
        """Tokens that a device works on at once."""
        return self.spec.train.batch_size * self.length

    def device(self) -> list[Row]:
        """What is held all the time, and the rows of the largest peak."""
        steady = self._steady()
        peak = max(self._forward(), self._step(), self._evaluation(), key=lambda rows: sum(row.bytes for row in rows))
        return [row for row in (*steady, *peak) if row.bytes]

    def _steady(self) -> list[Row]:
        spec, width = self.spec, self.width
        optimizer = self._optimizer
        rows = [
            Row("Frozen weights", self.frozen * width, f"{self.frozen:,} x {width} bytes"),
            Row("Trained weights", self.trained * 4, f"{self.trained:,} x 4 bytes: trained weights stay in fp32"),
            Row(
                "Optimizer state",
                round(self.trained * optimizer.state_bytes),
                f"{self.trained:,} x {optimizer.state_bytes:g} bytes for {optimizer.label}",
            ),
        ]
        if processes(spec) > 1:
            rows.append(Row("Gradient buckets", self.trained * 4, f"{self.trained:,} x 4 bytes: DDP's parcels"))
        base = LIBRARIES if self.cpu else CONTEXT + (COLLECTIVES if processes(spec) > 1 else 0)
        words = "Python and its libraries" if self.cpu else "context, kernels, workspaces of the device"
        return [*rows, Row("Overhead", base, f"{words}, about")]

    def _forward(self) -> list[Row]:
        """The end of the forward pass."""
        spec, rows = self.spec, [self._activations(), self._loss()]
        if self.width == 2:
            cast = self._cast()
            rows.append(Row("Copies for mixed precision", cast * 2, f"{cast:,} trained weights x 2 bytes"))
        if spec.train.accumulation > 1:
            rows.append(Row("Gradients", self.trained * 4, f"{self.trained:,} x 4 bytes, kept over accumulation"))
        else:
            head = self._head_gradient()
            rows.append(Row("Gradients", head * 4, f"{head:,} x 4 bytes of the output layer, the first to come"))
        if self.cpu:
            share = HOLES[spec.method.kind]
            kept = round(share * self._layers() * self.tokens * self._layer())
            rows.append(Row("Held by the allocator", kept, f"{share:.0%} of all activations, as measured"))
        return rows

    def _step(self) -> list[Row]:
        """The optimizer's step."""
        adam = self.spec.train.optimizer == "adamw"
        largest = max((leaf.parameters for leaf in (*self.shape.layer, *self.shape.outside)), default=0)
        work = min(self.trained, largest) * 2 if self.cpu else self.trained if adam else 0
        return [
            Row("Gradients", self.trained * 4, f"{self.trained:,} x 4 bytes"),
            Row("Optimizer's work", work * 4, f"{work:,} x 4 bytes while it steps"),
        ]

    def _evaluation(self) -> list[Row]:
        """The loss of an evaluation's batch, which may be larger than one of training."""
        if self.spec.evaluation.when == "no":
            return []
        batch = self.spec.evaluation.batch_size
        tokens = batch * self.length
        rows, words = min(tokens, TILE_TOKENS), min(self.shape.vocabulary, TILE_WORDS)
        each = self.width + (TILE_FORWARD if self._plain_loss() else 0)
        size = rows * words * each + tokens * self._layer()
        return [Row("Evaluation", size, f"{batch} x {self.length} tokens: a layer, and a tile of the loss")]

    def _plain_loss(self) -> bool:
        """Whether the loss is computed without Triton."""
        return device(self.spec, self.machine) not in ("cuda", "xpu")

    def _cast(self) -> int:
        """Trained weights of linear layers: autocast keeps a copy of each for the backward pass."""
        if self.adapter:
            return self.trained
        linear = sum(leaf.parameters for leaf in self.shape.layer if leaf.inputs) * self.shape.layers
        return min(linear, self.trained)

    def _head_gradient(self) -> int:
        """Parameters of the output layer, if it is trained: its gradient comes while activations are full."""
        size = self.shape.vocabulary * self.shape.hidden
        if self.spec.method.kind == "full":
            return size
        names = self.spec.method.lora_modules_to_save if self.adapter else self.spec.method.freeze_also
        return size if "lm_head" in names or (self.shape.tied and "embed_tokens" in names) else 0

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
        low_rank = self.spec.method.lora_rank * len(taught) * width if self.adapter else 0
        return self._norms() + inputs + attention + kept + back + low_rank

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
        size = f"{spec.train.batch_size} x {self.length} tokens"
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
        batch, length = spec.train.batch_size, self.length
        if spec.data.packing:
            batch, length = 1, batch * length  # packed rows lie one behind the other
        masked = self.width if spec.data.packing or batch > 1 else 0
        scores = 8 if shape.model_type == "gemma2" else 12 if self.cpu and shape.model_type == "gpt2" else 0
        return batch * length**2 * (masked + scores * shape.heads)

    def _loss(self) -> Row:
        shape, width = self.shape, self.width
        rows, words = min(self.tokens, TILE_TOKENS), min(shape.vocabulary, TILE_WORDS)
        each = width + (TILE_COPIES if self._plain_loss() else 0)
        weights = words * shape.hidden * ((2 + 4 * self.cpu) if width == 2 else 0)
        return Row("Loss", rows * words * each + weights, f"a tile of {rows:,} tokens x {words:,} words x {each} bytes")

    def host(self) -> list[Row]:
        """RAM beside the devices: on a CPU run the processes themselves are the device."""
        if self.cpu:
            return []
        count = processes(self.spec)
        loaded = self.shape.parameters * (self.width if self.adapter else 4)
        return [
            Row("Libraries", count * LIBRARIES, f"{count} x Python and its libraries, about", "host"),
            Row(
                "Weights on their way", count * loaded, f"{count} x {loaded:,} bytes until the device has them", "host"
            ),
        ]

    def disk(self, rows: int | None) -> list[Row]:
        """Checkpoints and the trained model."""
        spec, found = self.spec, []
        weights = self.trained * 4 if self.adapter else self.trained * 4 + self.frozen * self.width
        if spec.checkpoint.when != "no":
            state = 0 if spec.checkpoint.weights_only else round(self.trained * self._optimizer.state_bytes)
            count = self._checkpoints(rows)
            each = weights + state + PAPERS
            words = f"{count} x {each:,} bytes of weights{' and optimizer state' if state else ''}, tokenizer"
            found.append(Row("Checkpoints", count * each, words, "disk"))
        if spec.checkpoint.save_model:
            whole = not self.adapter or spec.checkpoint.merge
            stored = STORED.get(self.shape.dtype, 4)
            size = self.shape.parameters * stored if whole else weights
            words = f"{self.shape.parameters:,} x {stored} bytes" if whole else f"{self.trained:,} x 4 bytes"
            found.append(Row("Trained model", size + PAPERS, f"{words}, tokenizer", "disk"))
        return found

    @property
    def _optimizer(self) -> catalog.Optimizer:
        return catalog.OPTIMIZERS[self.spec.train.optimizer]

    def _checkpoints(self, rows: int | None) -> int:
        """Checkpoints on the disk at once: the kept ones and the one that is being written."""
        checkpoint, whole = self.spec.checkpoint, steps(self.spec, rows)
        made = None
        if checkpoint.when == "steps" and whole is not None:
            made = math.ceil(whole / checkpoint.steps)
        elif checkpoint.when == "epoch" and self.spec.train.length == "epochs":
            made = math.ceil(self.spec.train.epochs)
        if checkpoint.keep:
            return min(checkpoint.keep + 1, made or checkpoint.keep + 1)
        return made or 1


def _end(leaf: Leaf) -> str:
    return leaf.path.rpartition(".")[2]
