"""What a method trains of a model: adapters, layers, copies."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

from backend.config import Lora, Method, RunSpec
from backend.modelspec.modules import SCORE, Leaf, ModelShape, matches


@lru_cache(maxsize=64)  # an estimate asks for it a dozen times
def adapted(lora: Lora, shape: ModelShape) -> list[Leaf]:
    """The modules that get a LoRA adapter."""
    found = [leaf for leaf in shape.leaves() if leaf.adapts and leaf.path != shape.head]
    if lora.targets == "all-linear":
        return found
    if lora.targets == "attention":
        return [leaf for leaf in found if "attn" in leaf.path or "attention" in leaf.path]
    return [leaf for leaf in found if any(leaf.carries(name) for name in lora.target_modules)]


def trainable(spec: RunSpec, shape: ModelShape) -> int:
    """Parameters that the method trains, adapters included."""
    return _trainable(spec.method, spec.lora, shape)


@lru_cache(maxsize=64)
def _trainable(method: Method, lora: Lora, shape: ModelShape) -> int:
    if method.kind == "full":
        return shape.parameters
    if method.kind == "lora":
        added = kept(shape, SCORE) + sum(low_rank(lora, leaf) for leaf in adapted(lora, shape))
        return added + sum(kept(shape, name) for name in lora.modules_to_save)
    names = unfrozen(method, shape)
    return sum(leaf.parameters for leaf in shape.leaves() if any(matches(leaf.path, name) for name in names))


def unfrozen(method: Method, shape: ModelShape) -> list[str]:
    """Names of the modules that are trained where the others are frozen."""
    wanted = method.freeze_trainable_layers
    layers = range(shape.layers)[-wanted:] if wanted > 0 else range(min(-wanted, shape.layers))
    return [SCORE, *method.freeze_extra_modules, *(f"{shape.stack}.{number}" for number in layers if wanted)]


def ranks(lora: Lora, leaf: Leaf) -> int:
    """Rows of an adapter's A: the rank, of each expert, and for each layer that was put into one."""
    return lora.r * max(1, leaf.stacked) * max(1, len(leaf.names))


def low_rank(lora: Lora, leaf: Leaf) -> int:
    """Parameters that an adapter adds to a module; DoRA has a length for each of its outputs."""
    return ranks(lora, leaf) * (leaf.inputs + leaf.outputs) + (leaf.outputs if lora.use_dora else 0)


@lru_cache(maxsize=64)
def kept(shape: ModelShape, name: str) -> int:
    """Parameters of the copies that `modules_to_save` makes of modules called `name`; a tied head is copied too."""
    found = sum(leaf.parameters for leaf in shape.leaves() if matches(leaf.path, name))
    return found or (shape.vocabulary * shape.hidden if shape.tied and matches(shape.head, name) else 0)


@lru_cache(maxsize=64)
def tensors(method: Method, lora: Lora, shape: ModelShape) -> tuple[Leaf, ...]:
    """Trained tensors: `outputs` rows and `inputs` columns, or 0 and 0 for a vector."""
    found = tuple(_listed(method, lora, shape))
    rest = _trainable(method, lora, shape) - sum(leaf.parameters for leaf in found)
    return (*found, Leaf("", rest)) if rest > 0 else found


@lru_cache(maxsize=64)
def alike(method: Method, lora: Lora, shape: ModelShape) -> Mapping[Leaf, int]:
    """Trained tensors that are the same but for their layer's number, which is left out, and how many they are."""
    return Counter(replace(leaf, path=re.sub(r"\.\d+\.", ".", leaf.path)) for leaf in tensors(method, lora, shape))


def _listed(method: Method, lora: Lora, shape: ModelShape) -> Iterator[Leaf]:
    if method.kind == "lora":
        for leaf in adapted(lora, shape):
            rank = ranks(lora, leaf)
            yield Leaf(f"{leaf.path}.lora_A", rank * leaf.inputs, leaf.inputs, rank)
            yield Leaf(f"{leaf.path}.lora_B", rank * leaf.outputs, rank, leaf.outputs)
    full = method.kind == "full"
    names = [SCORE, *lora.modules_to_save] if method.kind == "lora" else [] if full else unfrozen(method, shape)
    for leaf in shape.leaves():
        if full or any(matches(leaf.path, name) for name in names):
            yield from _split(leaf, shape.hidden)


def _split(leaf: Leaf, hidden: int) -> Iterator[Leaf]:
    """A module's matrix and its bias."""
    rows, columns = leaf.outputs, leaf.inputs
    if not rows and leaf.parameters > 2 * hidden and leaf.parameters % hidden == 0:
        rows, columns = leaf.parameters // hidden, hidden  # embeddings
    if not leaf.parameters:
        return  # tied
    size = rows * columns * max(1, leaf.stacked)
    if leaf.parameters >= size > 0:
        yield replace(leaf, parameters=size, inputs=columns, outputs=rows)
    if bias := leaf.parameters - size:
        yield Leaf(f"{leaf.path}.bias", bias)
