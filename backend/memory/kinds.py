"""The kinds of memory that pictures color: which kind each row of a device belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from backend.memory.context import Row

# From the bottom of a column to its top: what stays comes first, what exists only at the peak last.
KINDS: Mapping[str, str] = {
    "overhead": "Device context and libraries",
    "quantized": "Quantized base model",
    "weights": "Weights",
    "optimizer": "Optimizer state and its temporaries",
    "gradients": "Gradients",
    "gathered": "Gathered weights and buffers",
    "activations": "Activations",
}

_NAMES: Mapping[str, tuple[str, ...]] = {
    "overhead": ("Device context and libraries", "Python and libraries"),
    "quantized": ("Quantized parameters", "Quantization scales", "Loading the quantized base model"),
    "weights": (
        "Frozen parameters", "Trainable parameters", "Parameters", "Reference model", "Reference adapter",
        "Adapter with optimizer state",
    ),
    "optimizer": ("Optimizer state", "fp32 master weights", "Optimizer step"),
    "gradients": (
        "Gradients", "Unsharded gradients", "Gradients in reduce-scatter", "Gradient of the output layer",
        "Gradient of the embeddings", "DDP gradient buckets",
    ),
    "gathered": (
        "Gathered parameters", "DeepSpeed buckets", "Parameters gathered for generation",
        "Autocast copies of parameters", "Dequantized weight", "Expert weights with adapters",
        "Embedding with trained rows",
    ),
    "activations": (
        "Activations", "Backward pass of one layer", "Logits and loss", "DoRA weight norm", "Evaluation batch",
        "KV cache for generation", "Allocator fragmentation",
    ),
}  # fmt: skip
KIND_OF: Mapping[str, str] = {name: kind for kind, names in _NAMES.items() for name in names}


def kind_label(kind: str, device: str) -> str:
    """The label of a kind of memory on a device type; a CPU run has no device context."""
    return "Python and libraries" if (kind, device) == ("overhead", "cpu") else KINDS[kind]


def bytes_by_kind(rows: Iterable[Row]) -> dict[str, int]:
    """The bytes of a device by kind, in the order of KINDS, without kinds of which it has nothing."""
    sums = dict.fromkeys(KINDS, 0)
    for row in rows:
        if row.where == "device":
            sums[KIND_OF[row.name]] += row.bytes
    return {kind: size for kind, size in sums.items() if size}
