"""What a method trains of a model: adapters, layers, copies."""

from __future__ import annotations

from functools import lru_cache

from backend.shape.table import SCORE, Leaf, ModelShape, matches
from backend.spec import Method, RunSpec


@lru_cache(maxsize=64)  # an estimate asks for it a dozen times
def adapted(method: Method, shape: ModelShape) -> list[Leaf]:
    """The modules that get a LoRA adapter."""
    found = [leaf for leaf in shape.leaves() if leaf.inputs and leaf.path != shape.head]
    if method.lora_targets == "all-linear":
        return found
    if method.lora_targets == "attention":
        return [leaf for leaf in found if "attn" in leaf.path or "attention" in leaf.path]
    return [leaf for leaf in found if any(leaf.carries(name) for name in method.lora_target_modules)]


def trainable(spec: RunSpec, shape: ModelShape) -> int:
    """Parameters that the method trains, adapters included."""
    return _trainable(spec.method, shape)


@lru_cache(maxsize=64)
def _trainable(method: Method, shape: ModelShape) -> int:
    if method.kind == "full":
        return shape.parameters
    if method.kind == "lora":
        added = kept(shape, SCORE) + sum(low_rank(method, leaf) for leaf in adapted(method, shape))
        return added + sum(kept(shape, name) for name in method.lora_modules_to_save)
    names = unfrozen(method, shape)
    return sum(leaf.parameters for leaf in shape.leaves() if any(matches(leaf.path, name) for name in names))


def unfrozen(method: Method, shape: ModelShape) -> list[str]:
    """Names of the modules that are trained where the others are frozen."""
    wanted = method.freeze_layers
    layers = range(shape.layers)[-wanted:] if wanted > 0 else range(min(-wanted, shape.layers))
    return [SCORE, *method.freeze_also, *(f"{shape.stack}.{number}" for number in layers if wanted)]


def ranks(method: Method, leaf: Leaf) -> int:
    """Rows of an adapter's A: the rank, of each expert, and for each layer that was put into one."""
    return method.lora_rank * max(1, leaf.stacked) * max(1, len(leaf.names))


def low_rank(method: Method, leaf: Leaf) -> int:
    """Parameters that an adapter adds to a module; DoRA has a length for each of its outputs."""
    return ranks(method, leaf) * (leaf.inputs + leaf.outputs) + (leaf.outputs if method.lora_dora else 0)


@lru_cache(maxsize=64)
def kept(shape: ModelShape, name: str) -> int:
    """Parameters of the copies that `modules_to_save` makes of modules called `name`; a tied head is copied too."""
    found = sum(leaf.parameters for leaf in shape.leaves() if matches(leaf.path, name))
    return found or (shape.vocabulary * shape.hidden if shape.tied and matches(shape.head, name) else 0)
