"""What a method trains: LoRA adapters, copies of modules (modules_to_save), unfrozen layers, or all parameters."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

from backend.config import Lora, Method, RunSpec
from backend.modelspec.modules import SCORE, ModelShape, ModuleSpec, matches, matches_any, names_of

TOKEN_ROWS = ".token_adapter"  # where peft has the trained rows of an embedding


@lru_cache(maxsize=64)  # one check calls this dozens of times
def lora_modules(lora: Lora, shape: ModelShape, each_layer: bool = False) -> list[ModuleSpec]:
    """The modules that get a LoRA adapter; those of equal layers are one entry, unless `each_layer` is set."""
    custom = lora.target_modules if lora.targets == "custom" else ()
    modules = shape.all_modules() if each_layer else shape.modules(custom)
    found = [leaf for leaf in modules if leaf.accepts_lora and leaf.path != shape.head]
    if lora.targets == "all-linear":
        return found
    if lora.targets == "attention":
        return [leaf for leaf in found if is_attention(leaf.path)]
    names = set(custom)
    return [leaf for leaf in found if any(name in names for name in leaf.lora_names())]


def is_attention(path: str) -> bool:
    """Whether lora.targets: attention selects the linear layer with this path."""
    return "attn" in path or "attention" in path


@lru_cache(maxsize=64)
def adaptable_names(shape: ModelShape, names: tuple[str, ...]) -> frozenset[str]:
    """The names among `names` that select a module in lora.target_modules."""
    return frozenset(names).intersection(name for leaf in shape.modules(names) for name in leaf.lora_names())


@lru_cache(maxsize=64)
def existing_names(shape: ModelShape, names: tuple[str, ...]) -> frozenset[str]:
    """The names among `names` that belong to a module, or to a module that contains others."""
    return frozenset(names).intersection(name for leaf in shape.modules(names) for name in names_of(leaf.path))


def trained_modules(spec: RunSpec, shape: ModelShape) -> list[ModuleSpec]:
    """The modules with trainable parameters or adapters."""
    if spec.method.kind == "full":
        return list(shape.modules())
    if spec.method.kind == "lora":
        names, adapted = list(spec.lora.modules_to_save), lora_modules(spec.lora, shape)
    else:
        names, adapted = unfrozen_modules(spec.method, shape), []
    return adapted + _matching(shape, names)


def _matching(shape: ModelShape, names: Collection[str]) -> list[ModuleSpec]:
    """The modules that match one of these names."""
    known = frozenset(names)
    return [leaf for leaf in shape.modules(known) if matches_any(leaf.path, known)]


def trainable_parameters(spec: RunSpec, shape: ModelShape) -> int:
    """Trainable parameters of `spec`, adapters included."""
    return _trainable(spec.method, spec.lora, shape) + sum(rows.parameters for rows in token_rows(spec, shape))


def token_rows(spec: RunSpec, shape: ModelShape) -> list[ModuleSpec]:
    """The rows of the embeddings that an adapter trains for added tokens: of the input embedding (the first module that
    is not in a layer) and, unless its weights are tied, of the output layer. A module that is trained in full has no
    such rows."""
    count = len(spec.data.added_tokens) if spec.method.kind == "lora" else 0
    others = [] if shape.tied or shape.head == SCORE else [shape.head]
    paths = [path for path in (shape.embedding, *others) if not matches_any(path, frozenset(spec.lora.modules_to_save))]
    size = count * shape.hidden
    return [ModuleSpec(f"{path}{TOKEN_ROWS}", size, shape.hidden, count) for path in paths if count]


def all_parameters(spec: RunSpec, shape: ModelShape) -> int:
    """All parameters of the trained model, adapters included, as peft's `get_nb_trainable_parameters` counts."""
    added = trainable_parameters(spec, shape) if spec.method.kind == "lora" else 0
    return shape.parameters + added


@lru_cache(maxsize=64)
def _trainable(method: Method, lora: Lora, shape: ModelShape) -> int:
    if method.kind == "full":
        return shape.parameters
    if method.kind == "lora":
        adapters = sum(lora_parameters(lora, leaf) * leaf.count for leaf in lora_modules(lora, shape))
        added = saved_copy_parameters(shape, SCORE) + adapters
        return added + sum(saved_copy_parameters(shape, name) for name in lora.modules_to_save)
    return sum(leaf.parameters * leaf.count for leaf in _matching(shape, unfrozen_modules(method, shape)))


def unfrozen_modules(method: Method, shape: ModelShape) -> list[str]:
    """Names of the modules that are trained with method.kind freeze."""
    count, extra = method.freeze_trainable_layers, method.freeze_extra_modules
    layers = range(shape.layers)[-count:] if count > 0 else range(min(-count, shape.layers))  # negative: the first
    tied = [shape.embedding] if shape.tied and matches_any(shape.head, frozenset(extra)) else []  # the same weights
    return [SCORE, *extra, *tied, *(f"{shape.layers_path}.{number}" for number in layers if count)]


def stacked_rank(lora: Lora, leaf: ModuleSpec) -> int:
    """Rows of an adapter's lora_A: the rank, times experts and fused projections of a stacked parameter."""
    return lora.r * max(1, leaf.stacked) * max(1, len(leaf.target_names))


def lora_parameters(lora: Lora, leaf: ModuleSpec) -> int:
    """Parameters of a module's adapter; DoRA adds a magnitude per output feature."""
    magnitudes = leaf.out_features if lora.use_dora else 0
    return stacked_rank(lora, leaf) * (leaf.in_features + leaf.out_features) + magnitudes


@lru_cache(maxsize=64)
def saved_copy_parameters(shape: ModelShape, name: str) -> int:
    """Parameters of the copies that modules_to_save makes of the modules called `name`; a tied head is copied too."""
    found = sum(leaf.parameters * leaf.count for leaf in _matching(shape, [name]))
    return found or (shape.vocabulary * shape.hidden if shape.tied and matches(shape.head, name) else 0)


@lru_cache(maxsize=64)
def trainable_tensors(
    method: Method, lora: Lora, shape: ModelShape, each_layer: bool = False
) -> tuple[ModuleSpec, ...]:
    """The trainable tensors: `out_features` rows and `in_features` columns, or 0 and 0 for a vector. Tensors of equal
    layers are one entry with their `count`, unless `each_layer` is set."""
    found = tuple(_listed(method, lora, shape, each_layer))
    rest = _trainable(method, lora, shape) - sum(leaf.parameters * leaf.count for leaf in found)
    return (*found, ModuleSpec("", rest)) if rest > 0 else found


@lru_cache(maxsize=64)
def count_equal_tensors(method: Method, lora: Lora, shape: ModelShape) -> Mapping[ModuleSpec, int]:
    """The trainable tensors without their layer number, and how often each occurs."""
    found: Counter[ModuleSpec] = Counter()
    for leaf in trainable_tensors(method, lora, shape):
        found[replace(leaf, path=re.sub(r"\.\d+\.", ".", leaf.path), count=1)] += leaf.count
    return found


def _listed(method: Method, lora: Lora, shape: ModelShape, each_layer: bool) -> Iterator[ModuleSpec]:
    if method.kind == "lora":
        for leaf in lora_modules(lora, shape, each_layer):
            rank, inputs, outputs = stacked_rank(lora, leaf), leaf.in_features, leaf.out_features
            yield ModuleSpec(f"{leaf.path}.lora_A", rank * inputs, inputs, rank, count=leaf.count)
            yield ModuleSpec(f"{leaf.path}.lora_B", rank * outputs, rank, outputs, count=leaf.count)
    full = method.kind == "full"
    listed = [SCORE, *lora.modules_to_save] if method.kind == "lora" else unfrozen_modules(method, shape)
    names = frozenset() if full else frozenset(listed)
    for leaf in shape.all_modules() if each_layer else shape.modules(names):
        if full or matches_any(leaf.path, names):
            yield from _split(leaf, shape.hidden)


def _split(leaf: ModuleSpec, hidden: int) -> Iterator[ModuleSpec]:
    """A module's matrix and its bias."""
    rows, columns = leaf.out_features, leaf.in_features
    if not rows and leaf.parameters > 2 * hidden and leaf.parameters % hidden == 0:
        rows, columns = leaf.parameters // hidden, hidden  # the embeddings
    if not leaf.parameters:
        return  # tied
    size = rows * columns * max(1, leaf.stacked)
    if leaf.parameters >= size > 0:
        yield replace(leaf, parameters=size, in_features=columns, out_features=rows)
    if bias := leaf.parameters - size:
        yield ModuleSpec(f"{leaf.path}.bias", bias, count=leaf.count)
