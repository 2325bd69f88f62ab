"""ModuleSpec and ModelShape: a model as a list of its modules with parameters, over which all counts are sums."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

SCORE = "score"  # transformers' name of the scalar head of a reward model


@dataclass(frozen=True)
class ModuleSpec:
    """One module with parameters. `path` is its name within a layer or the model; `in_features` and `out_features` are
    0 for modules without a weight matrix, such as norms.

    `stacked`: number of matrices in one parameter, for experts of a mixture; 1 for their router, 0 for other modules.
    `target_names`: names in lora.target_modules that select stacked experts, which have no module of that name.
    `supports_lora`: peft can put an adapter on it. `count`: how many equal modules it stands for, each in a layer of
    its own; `path` belongs to the first one.
    """

    path: str
    parameters: int
    in_features: int = 0
    out_features: int = 0
    stacked: int = 0
    target_names: tuple[str, ...] = ()
    supports_lora: bool = True
    count: int = 1

    @property
    def accepts_lora(self) -> bool:
        """Whether peft's all-linear puts an adapter on it."""
        return self.in_features > 0 and self.supports_lora and (not self.stacked or bool(self.target_names))

    @property
    def is_linear(self) -> bool:
        """Whether it is a linear layer, which can be quantized and has projected gradients."""
        return self.in_features > 0 and not self.stacked

    def lora_names(self) -> Iterator[str]:
        """Every name in lora.target_modules that selects it; the name may include the layer number."""
        if self.stacked:
            yield from self.target_names
        elif self.accepts_lora:
            yield from _ends(self.path)


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model. `layer` lists the modules of one decoder layer, `non_layer_modules` all others: the
    embeddings first, the output layer last."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    max_positions: int
    tied: bool
    gated_mlp: bool
    dtype: str
    architecture: str
    model_type: str
    activation: str = "silu"
    weight_bits: int = 0  # bits per weight of a prequantized checkpoint; 0: not quantized
    group_size: int = 0  # quantized weights that share a scale and a zero point
    latent_kv_heads: int = 0  # num_key_value_heads of multi-head latent attention, which has as many as query heads
    unsupported_attentions: tuple[str, ...] = ()  # rows of registry.ATTENTIONS that transformers lacks for the model
    tensor_parallel_plan: str = "layers"  # what the plan of transformers shards: layers, only the head, or nothing ('')
    supports_activation_checkpointing: bool = True
    has_sliding_window: bool = False  # some layers have sliding-window or chunked attention
    sliding_window: int = 0  # tokens that such a layer sees; 0: unknown, or there is none
    experts: int = 0  # per layer; `intermediate` is then the intermediate size of one expert
    experts_per_token: int = 0
    layers_path: str = "model.layers"  # path of the list of decoder layers
    layer: tuple[ModuleSpec, ...] = field(default=(), repr=False)
    non_layer_modules: tuple[ModuleSpec, ...] = field(default=(), repr=False)
    # Where layers differ: the modules of each kind of layer, and the kind of each layer. `layer` is the most frequent.
    layer_kinds: tuple[tuple[ModuleSpec, ...], ...] = field(default=(), repr=False)
    layer_kind_indices: tuple[int, ...] = field(default=(), repr=False)
    activations_unknown: str = ""  # why the memory of activations cannot be estimated, as the end of a sentence

    def __hash__(self) -> int:
        """The hash of only a few fields: caches hash a shape hundreds of times in one check."""
        return hash((self.model_type, self.layers, self.hidden, self.intermediate, self.vocabulary, self.weight_bits))

    @cached_property
    def layer_parameters(self) -> int:
        """Parameters of one layer; where layers differ, of the largest one."""
        return max(sum(leaf.parameters for leaf in layer) for layer in self.layer_kinds or (self.layer,))

    @cached_property
    def parameters(self) -> int:
        """Parameters of the whole model; tied embeddings count once."""
        return sum(leaf.parameters * leaf.count for leaf in self.modules())

    @property
    def supports_sdpa(self) -> bool:
        """Whether the model has SDPA; otherwise, transformers uses eager attention unless another implementation is
        requested."""
        return "sdpa" not in self.unsupported_attentions

    @property
    def layer_modules(self) -> tuple[ModuleSpec, ...]:
        """The modules of one layer of each kind."""
        return tuple(leaf for layer in self.layer_kinds or (self.layer,) for leaf in layer)

    @property
    def most_experts(self) -> int:
        """Experts of the layer that has most of them; 0 if no layer has experts. `experts` are those of the most
        frequent kind of layer, which has none in some mixtures."""
        return max((leaf.stacked for leaf in self.layer_modules if leaf.stacked > 1), default=0)

    @property
    def lora_target_names(self) -> tuple[str, ...]:
        """Names for lora.target_modules: q_proj, k_proj, ..."""
        found = (leaf.target_names or (target_name(leaf.path),) for leaf in self.layer_modules if leaf.accepts_lora)
        return tuple(dict.fromkeys(name for names in found for name in names))

    @property
    def module_names(self) -> tuple[str, ...]:
        """The last name part of every module with parameters, not counting parameters outside of all modules."""
        ends = (_end(leaf.path) for leaf in (*self.layer_modules, *self.non_layer_modules))
        return tuple(dict.fromkeys(filter(None, ends)))

    @property
    def head(self) -> str:
        """Path of the output layer, which does not get an adapter."""
        return self.non_layer_modules[-1].path

    @property
    def embedding(self) -> str:
        """Path of the input embedding."""
        return self.non_layer_modules[0].path

    def with_vocabulary(self, rows: int) -> ModelShape:
        """The same model with this many rows in the input embedding and the output layer."""
        first, *others, last = self.non_layer_modules
        first = replace(first, parameters=first.parameters * rows // self.vocabulary)
        if last.out_features == self.vocabulary:
            last = replace(last, parameters=last.parameters * rows // self.vocabulary, out_features=rows)
        return first_equal(replace(self, vocabulary=rows, non_layer_modules=(first, *others, last)))

    @property
    def with_score_head(self) -> ModelShape:
        """The same model with a scalar head instead of the output layer."""
        modules = (*self.non_layer_modules[:-1], ModuleSpec(SCORE, self.hidden, self.hidden, 1))
        plan = "" if self.tensor_parallel_plan == "head" else self.tensor_parallel_plan
        return first_equal(replace(self, tied=False, non_layer_modules=modules, tensor_parallel_plan=plan))

    def modules(self, names: Iterable[str] = ()) -> tuple[ModuleSpec, ...]:
        """The modules of the model with their full names. Those of equal layers are one entry with their `count`. A
        layer whose number is a part of one of `names`, such as 3 in "layers.3.mlp", has separate entries, so that such
        a name selects all modules of an entry or none."""
        parts = {part for name in names for part in name.split(".")}
        return _modules(self, frozenset(int(part) for part in parts if LAYER_NUMBER.fullmatch(part)))

    def all_modules(self) -> tuple[ModuleSpec, ...]:
        """Every module of every layer, with its full name."""
        return _modules(self, frozenset(range(self.layers)))

    def layer_groups(self, apart: Collection[int]) -> list[tuple[int, int, tuple[ModuleSpec, ...]]]:
        """(first layer, number of layers, modules of one of them) of equal layers; layers whose numbers are in `apart`
        stand alone."""
        kinds: Mapping[int, int] | tuple[int, ...] = self.layer_kind_indices or dict.fromkeys(apart, 0)
        found = [(n, 1, self._kind(kinds[n])) for n in apart if n < self.layers]
        if not self.layer_kinds:
            first = next((n for n in range(self.layers) if n not in apart), self.layers)
            rest = {0: (first, self.layers - len(found))}
        else:
            together = [(n, kind) for n, kind in enumerate(self.layer_kind_indices) if n not in apart]
            rest = {}
            for n, kind in together:
                start, count = rest.get(kind, (n, 0))
                rest[kind] = (start, count + 1)
        found += [(first, count, self._kind(kind)) for kind, (first, count) in rest.items() if count]
        return sorted(found, key=lambda group: group[0])

    def _kind(self, number: int) -> tuple[ModuleSpec, ...]:
        return self.layer_kinds[number] if self.layer_kinds else self.layer


LAYER_NUMBER = re.compile(r"[0-9]{1,9}")


@lru_cache(maxsize=256)
def _modules(shape: ModelShape, apart: frozenset[int]) -> tuple[ModuleSpec, ...]:
    layers = [
        replace(leaf, path=f"{shape.layers_path}.{first}.{leaf.path}".rstrip("."), count=count)
        for first, count, layer in shape.layer_groups(apart)
        for leaf in layer
    ]
    return (*layers, *shape.non_layer_modules)


@lru_cache(maxsize=64)
def first_equal(shape: ModelShape) -> ModelShape:
    """The first shape that was equal to this one: its list of modules is computed already, and caches find it without
    comparing all modules."""
    return shape


def target_name(path: str) -> str:
    """The end of `path` for lora.target_modules. A number alone would also select a decoder layer."""
    found = re.search(r"[^.]+(\.\d+)*$", path)
    return found.group() if found else path


def _end(path: str) -> str:
    return path.rpartition(".")[2]


def _ends(path: str) -> Iterator[str]:
    """The path, then the path without its first name part, without its first two, and so on."""
    yield path
    while "." in path:
        path = path.partition(".")[2]
        yield path


def matches(path: str, name: str) -> bool:
    """Whether the module `path`, or a module that contains it, is called `name`; complete name parts are compared."""
    return f".{name}." in f".{path}."


def names_of(path: str) -> Iterator[str]:
    """Every name that `matches` the path. Looking up thousands of names in this set is faster than comparing each."""
    for end in _ends(path):
        parts = end.split(".")
        yield from (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def matches_any(path: str, names: Collection[str]) -> bool:
    """Whether one of `names`, a set, matches the path."""
    return any(name in names for name in names_of(path))
