"""Matrix multiplications of a training step, for Model FLOPs Utilization (MFU; Chowdhery et al. 2022, PaLM, appendix
B) and for the time of a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from backend.config import RunSpec
from backend.modelspec.modules import ModelShape, ModuleSpec
from backend.modelspec.trainable import lora_modules, lora_parameters, trained_modules


class TokenWeights(NamedTuple):
    """Elements of the matrices that one token is multiplied with. In a mixture of experts, only the active experts and
    the router count; embeddings are looked up. A product takes 2 FLOPs per element in the forward pass, 2 for the
    gradient of its input, and, if the matrix is trained, 2 for the gradient of the matrix."""

    layers: int  # the decoder layers, without adapters
    trained: int  # the trained ones of `layers`
    head: int  # the output layer
    trained_head: int
    adapters: int  # LoRA's matrices


def token_weights(spec: RunSpec, shape: ModelShape) -> TokenWeights:
    """The matrices that one token is multiplied with in a model of this shape, by what the method trains."""
    trained = trained_modules(spec, shape) if spec.method.kind != "lora" else []
    head = [shape.non_layer_modules[-1]] if shape.non_layer_modules else []
    layers = [leaf for leaf in shape.modules() if leaf not in head]
    return TokenWeights(
        _active_weights(shape, layers),
        _active_weights(shape, [leaf for leaf in trained if leaf not in head]),
        _active_weights(shape, head),
        _active_weights(shape, [leaf for leaf in trained if leaf in head]),
        _adapter_weights(spec, shape),
    )


def stored_weights(shape: ModelShape) -> int:
    """Elements of all matrices of the decoder layers, including inactive experts."""
    layers = shape.modules()[: -len(shape.non_layer_modules) or None]
    return sum(leaf.in_features * leaf.out_features * max(1, leaf.stacked) * leaf.count for leaf in layers)


def flops_per_token(spec: RunSpec, shape: ModelShape) -> int | None:
    """FLOPs of forward and backward pass per token: 2 per weight forward, 2 for the gradient of the input, and 2 for
    the gradient of a trained weight. Attention scores and recomputed activations do not count. None for the method
    freeze, whose backward pass ends at an unknown layer."""
    weights = _active_weights(shape, shape.modules())
    if spec.method.kind == "full":
        return 6 * weights
    return 4 * weights + 6 * _adapter_weights(spec, shape) if spec.method.kind == "lora" else None


def _adapter_weights(spec: RunSpec, shape: ModelShape) -> int:
    if spec.method.kind != "lora":
        return 0
    return sum(lora_parameters(spec.lora, leaf) * leaf.count for leaf in lora_modules(spec.lora, shape))


def _active_weights(shape: ModelShape, modules: Iterable[ModuleSpec]) -> int:
    """Elements of the matrices that one token is multiplied with; embeddings are looked up."""
    return sum(leaf.in_features * leaf.out_features * _active(shape, leaf) * leaf.count for leaf in modules)


def _active(shape: ModelShape, leaf: ModuleSpec) -> int:
    """How many of the matrices of a parameter one token is multiplied with."""
    return min(leaf.stacked, shape.experts_per_token) if leaf.stacked > 1 else 1
