"""A model as a table of its modules with weights: path, inputs, outputs, parameters.

Everything else is a sum over it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

SCORE = "score"  # transformers' name for the head of a model that gives numbers instead of words


@dataclass(frozen=True)
class Leaf:
    """One module with weights of its own: `path` ends its name, `inputs` and `outputs` are 0 unless it multiplies.

    `stacked`: so many matrices lie in one weight, which is no linear layer: a mixture's experts, or 1, their router.
    `names`: of the linear layers that they once were, by which adapters are told of them.
    `adaptable`: peft can put an adapter on it.
    """

    path: str
    parameters: int
    inputs: int = 0
    outputs: int = 0
    stacked: int = 0
    names: tuple[str, ...] = ()
    adaptable: bool = True

    @property
    def adapts(self) -> bool:
        """Whether peft's all-linear puts an adapter on it."""
        return self.inputs > 0 and self.adaptable and (not self.stacked or bool(self.names))

    @property
    def linear(self) -> bool:
        """Whether it is a linear layer: what is packed, projected, cast."""
        return self.inputs > 0 and not self.stacked

    def carries(self, name: str) -> bool:
        """Whether an adapter for `name` lies on it; numbers of layers may be part of it."""
        if self.stacked:
            return name in self.names
        return self.adapts and f".{self.path}".endswith(f".{name}")


@dataclass(frozen=True)
class ModelShape:
    """What decides memory. `layer` lists the modules of one layer, `outside` those beside the layers."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    max_positions: int
    tied: bool
    gated: bool
    dtype: str
    architecture: str
    model_type: str
    activation: str = "silu"
    bits: int = 0  # of weights that came packed and stay so; 0: as dtype says
    group: int = 0  # so many of them share a scale and a zero point
    sdpa: bool = True  # False: transformers computes its attention eagerly unless another kernel is requested
    sliding: bool = False  # a token of some layers sees its neighbours alone
    experts: int = 0  # of a layer; `intermediate` is then the width of one
    active: int = 0  # of these, so many work on a token
    stack: str = "model.layers"
    layer: tuple[Leaf, ...] = field(default=(), repr=False)
    outside: tuple[Leaf, ...] = field(default=(), repr=False)
    # Where layers differ: the modules of each kind of layer, and the kind of each layer. `layer` is the most frequent.
    kinds: tuple[tuple[Leaf, ...], ...] = field(default=(), repr=False)
    order: tuple[int, ...] = field(default=(), repr=False)
    activations_unknown: str = ""  # why the memory of activations cannot be estimated, as the end of a sentence

    @cached_property
    def layer_parameters(self) -> int:
        """Parameters of one layer; of the largest, where layers differ."""
        return max(sum(leaf.parameters for leaf in layer) for layer in self.kinds or (self.layer,))

    @cached_property
    def parameters(self) -> int:
        """Parameters of the whole model; tied embeddings count once."""
        layers = sum(leaf.parameters for layer in self.each for leaf in layer)
        return layers + sum(leaf.parameters for leaf in self.outside)

    @property
    def each(self) -> tuple[tuple[Leaf, ...], ...]:
        """The modules of every layer."""
        return tuple(self.kinds[kind] for kind in self.order) if self.kinds else (self.layer,) * self.layers

    @property
    def every(self) -> tuple[Leaf, ...]:
        """The modules of a layer of each kind."""
        return tuple(leaf for layer in self.kinds or (self.layer,) for leaf in layer)

    @property
    def linear(self) -> tuple[str, ...]:
        """Names by which adapters are put on modules: q_proj, k_proj, ..."""
        found = (leaf.names or (_end(leaf.path),) for leaf in self.every if leaf.adapts)
        return tuple(dict.fromkeys(name for names in found for name in names))

    @property
    def modules(self) -> tuple[str, ...]:
        """Name ends of every module with weights."""
        return tuple(dict.fromkeys(_end(leaf.path) for leaf in (*self.every, *self.outside)))

    @property
    def head(self) -> str:
        """The output layer, which cannot carry an adapter."""
        return self.outside[-1].path

    @property
    def scoring(self) -> ModelShape:
        """The same model with a head that gives one number, in the place of the output layer."""
        return replace(self, tied=False, outside=(*self.outside[:-1], Leaf(SCORE, self.hidden, self.hidden, 1)))

    def leaves(self) -> tuple[Leaf, ...]:
        """Every leaf module with its full name."""
        return self._leaves

    @cached_property
    def _leaves(self) -> tuple[Leaf, ...]:
        layers = [
            replace(leaf, path=f"{self.stack}.{number}.{leaf.path}".rstrip("."))
            for number, layer in enumerate(self.each)
            for leaf in layer
        ]
        return (*layers, *self.outside)


def _end(path: str) -> str:
    return path.rpartition(".")[2]


def matches(path: str, name: str) -> bool:
    """Whether the module `path`, or one that it lies in, is called `name` (whole parts of the name, at its end)."""
    return f".{name}." in f".{path}."
