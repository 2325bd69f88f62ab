"""Matrix multiplications of a training step, for Model FLOPs Utilization (MFU; Chowdhery et al. 2022, PaLM, appendix
B)."""

from __future__ import annotations

from collections.abc import Iterable

from backend.config import RunSpec
from backend.modelspec.modules import ModelShape, ModuleSpec
from backend.modelspec.trainable import lora_modules, lora_parameters


def flops_per_token(spec: RunSpec, shape: ModelShape) -> int | None:
    """FLOPs of forward and backward pass per token: 2 per weight forward, 2 for the gradient of the input, and 2 for
    that of a trained weight. The scores of attention and recomputed activations do not count. None for the method
    freeze, whose backward pass ends somewhere in the model."""
    weights = _active_weights(shape, shape.modules())
    if spec.method.kind == "full":
        return 6 * weights
    if spec.method.kind == "lora":
        return 4 * weights + 6 * sum(
            lora_parameters(spec.lora, leaf) * leaf.count for leaf in lora_modules(spec.lora, shape)
        )
    return None


def _active_weights(shape: ModelShape, modules: Iterable[ModuleSpec]) -> int:
    """Elements of the matrices that one token is multiplied with; embeddings are looked up."""
    return sum(leaf.in_features * leaf.out_features * _active(shape, leaf) * leaf.count for leaf in modules)


def _active(shape: ModelShape, leaf: ModuleSpec) -> int:
    """How many of the matrices of a parameter one token is multiplied with."""
    return min(leaf.stacked, shape.experts_per_token) if leaf.stacked > 1 else 1
