"""ModelShape: layers, widths and parameters of a model, counted in closed form from its config.json.

Floor 1. Imports: spec. A model is a table of leaf modules (path, inputs, outputs, parameters); everything else is
a sum over it: all parameters, what LoRA adds, what freeze leaves. Checked against the libraries' own counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from backend import catalog
from backend.spec import Method, RunSpec

SCORE = "score"  # transformers' name for the head of a model that gives numbers instead of words


class Unknown(ValueError):
    """A config that cannot be counted, and why, as the end of a sentence."""


@dataclass(frozen=True)
class Leaf:
    """One module with weights of its own: `path` ends its name, `inputs` and `outputs` are 0 unless linear."""

    path: str
    parameters: int
    inputs: int = 0
    outputs: int = 0


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
    stack: str = "model.layers"
    layer: tuple[Leaf, ...] = field(default=(), repr=False)
    outside: tuple[Leaf, ...] = field(default=(), repr=False)

    @cached_property
    def layer_parameters(self) -> int:
        """Parameters of one layer."""
        return sum(leaf.parameters for leaf in self.layer)

    @cached_property
    def parameters(self) -> int:
        """Parameters of the whole model; tied embeddings count once."""
        return self.layers * self.layer_parameters + sum(leaf.parameters for leaf in self.outside)

    @property
    def linear(self) -> tuple[str, ...]:
        """Name ends of the linear modules that can carry an adapter: q_proj, k_proj, ..."""
        return tuple(dict.fromkeys(_end(leaf.path) for leaf in self.layer if leaf.inputs))

    @property
    def modules(self) -> tuple[str, ...]:
        """Name ends of every module with weights."""
        return tuple(dict.fromkeys(_end(leaf.path) for leaf in (*self.layer, *self.outside)))

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
        stacked = (
            Leaf(f"{self.stack}.{number}.{leaf.path}", leaf.parameters, leaf.inputs, leaf.outputs)
            for number in range(self.layers)
            for leaf in self.layer
        )
        return *stacked, *self.outside


def _end(path: str) -> str:
    return path.rpartition(".")[2]


def matches(path: str, name: str) -> bool:
    """Whether the module `path`, or one that it lies in, is called `name` (whole parts of the name, at its end)."""
    return f".{name}." in f".{path}."


@lru_cache(maxsize=64)  # an estimate asks for it a dozen times
def adapted(method: Method, shape: ModelShape) -> list[Leaf]:
    """The linear modules that get a LoRA adapter."""
    linear = [leaf for leaf in shape.leaves() if leaf.inputs and leaf.path != shape.head]
    if method.lora_targets == "all-linear":
        return linear
    if method.lora_targets == "attention":
        return [leaf for leaf in linear if "attn" in leaf.path or "attention" in leaf.path]
    names = tuple(f".{name}" for name in method.lora_target_modules)
    return [leaf for leaf in linear if f".{leaf.path}".endswith(names)] if names else []


def trainable(spec: RunSpec, shape: ModelShape) -> int:
    """Parameters that the method trains, adapters included."""
    method = spec.method
    if method.kind == "full":
        return shape.parameters
    if method.kind == "lora":
        added = kept(shape, SCORE) + sum(low_rank(method, leaf) for leaf in adapted(method, shape))
        return added + sum(kept(shape, name) for name in method.lora_modules_to_save)
    wanted = method.freeze_layers
    layers = range(shape.layers)[-wanted:] if wanted > 0 else range(min(-wanted, shape.layers))
    names = [SCORE, *method.freeze_also, *(f"{shape.stack}.{number}" for number in layers if wanted)]
    return sum(leaf.parameters for leaf in shape.leaves() if any(matches(leaf.path, name) for name in names))


def low_rank(method: Method, leaf: Leaf) -> int:
    """Parameters that an adapter adds to a linear module; DoRA has a length for each of its outputs."""
    return method.lora_rank * (leaf.inputs + leaf.outputs) + (leaf.outputs if method.lora_dora else 0)


def kept(shape: ModelShape, name: str) -> int:
    """Parameters of the copies that `modules_to_save` makes of modules called `name`; a tied head is copied too."""
    found = sum(leaf.parameters for leaf in shape.leaves() if matches(leaf.path, name))
    return found or (shape.vocabulary * shape.hidden if shape.tied and matches(shape.head, name) else 0)


# --- Reading config.json ---

Config = Mapping[str, Any]


def from_config(config: Config) -> ModelShape:
    """The shape that a config.json describes. Raises Unknown with the reason."""
    config = config.get("text_config") or config
    kind = str(config.get("model_type") or "")
    if not kind:
        raise Unknown("config.json names no model_type")
    if any(int(config.get(key) or 0) > 1 for key in ("num_local_experts", "num_experts", "n_routed_experts")):
        raise Unknown(f"{kind} is a mixture of experts, which Footplate does not count yet")
    if kind not in FAMILIES:
        raise Unknown(f"Footplate does not know how a {kind} is built")
    try:
        return FAMILIES[kind](config)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        if isinstance(error, Unknown):
            raise
        raise Unknown(f"config.json of this {kind} holds a value that is no number: {error}") from None


def _number(config: Config, *names: str, default: int | None = None) -> int:
    """The first of several keys that is there. Raises Unknown naming it where none is."""
    for name in names:
        if config.get(name) is not None:
            return int(config[name])
    if default is None:
        raise Unknown(f"config.json has no {names[0]}")
    return default


def _linear(path: str, inputs: int, outputs: int, bias: bool = False) -> Leaf:
    return Leaf(path, inputs * outputs + (outputs if bias else 0), inputs, outputs)


def _common(config: Config, head_dim: int | None = None, inner: str = "intermediate_size") -> dict[str, Any]:
    """What nearly every config.json says, under any of its usual names."""
    hidden = _number(config, "hidden_size", "n_embd")
    heads = _number(config, "num_attention_heads", "n_head")
    architectures = config.get("architectures") or [str(config["model_type"])]
    return {
        "layers": _number(config, "num_hidden_layers", "n_layer"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": _number(config, "num_key_value_heads", default=heads),
        "head_dim": _number(config, "head_dim", default=head_dim or hidden // heads),
        "intermediate": _number(config, inner, default=4 * hidden),
        "vocabulary": _number(config, "vocab_size"),
        "max_positions": _number(config, "max_position_embeddings", "n_positions", default=0),
        "dtype": str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        "architecture": str(architectures[0]),
        "model_type": str(config["model_type"]),
        **_came_packed(config.get("quantization_config") or {}),
        "activation": str(config.get("hidden_act") or config.get("activation_function") or ""),
    }


def _came_packed(found: Config) -> dict[str, int]:
    """Bits and group of packed linear layers. What is unpacked while loading counts as its dtype says."""
    row = catalog.PACKED.get(str(found.get("quant_method") or ""))
    if row is None or not row.adapters:
        return {}
    if row.label == "bitsandbytes":
        return {"bits": 8, "group": 0} if found.get("load_in_8bit") else {"bits": 4, "group": 64}
    inner = (found.get("quant_config") or {}).get("weight_quant_params") or {}  # HQQ's own nesting
    group = int(found.get("group_size") or inner.get("group_size") or 128)
    return {"bits": int(found.get("bits") or found.get("w_bit") or inner.get("nbits") or 4), "group": max(0, group)}


@dataclass(frozen=True)
class Llama:
    """How a relative of Llama differs: biases, norms, defaults that config.json may leave out."""

    qkv_bias: bool | None = None  # None: as attention_bias says
    o_bias: bool | None = None
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    qk_norm: str = ""  # "head": width of a head; "all": width of all heads
    tied: bool = False
    head_dim: int | None = None
    fused: bool = False  # one linear for q, k and v, one for gate and up

    def __call__(self, config: Config) -> ModelShape:
        """The shape of one such model."""
        found = _common(config, self.head_dim)
        hidden, wide = found["hidden"], found["heads"] * found["head_dim"]
        tied = bool(config.get("tie_word_embeddings", self.tied))
        vocabulary = found["vocabulary"] * hidden
        layer = (*self._attention(config, found), *self._mlp(config, found))
        layer += tuple(Leaf(name, hidden) for name in self.norms)
        if self.qk_norm:
            narrow = found["kv_heads"] * found["head_dim"]
            widths = (wide, narrow) if self.qk_norm == "all" else (found["head_dim"],) * 2
            layer += (Leaf("self_attn.q_norm", widths[0]), Leaf("self_attn.k_norm", widths[1]))
        outside = (
            Leaf("model.embed_tokens", vocabulary),
            Leaf("model.norm", hidden),
            Leaf("lm_head", 0 if tied else vocabulary, hidden, found["vocabulary"]),
        )
        return ModelShape(**found, tied=tied, gated=True, layer=layer, outside=outside)

    def _attention(self, config: Config, found: Mapping[str, Any]) -> tuple[Leaf, ...]:
        hidden, wide = found["hidden"], found["heads"] * found["head_dim"]
        narrow = found["kv_heads"] * found["head_dim"]
        said = bool(config.get("attention_bias", False))
        bias = said if self.qkv_bias is None else self.qkv_bias
        output = _linear("self_attn.o_proj", wide, hidden, said if self.o_bias is None else self.o_bias)
        if self.fused:
            return _linear("self_attn.qkv_proj", hidden, wide + 2 * narrow, bias), output
        parts = (("q", wide), ("k", narrow), ("v", narrow))
        return *(_linear(f"self_attn.{name}_proj", hidden, size, bias) for name, size in parts), output

    def _mlp(self, config: Config, found: Mapping[str, Any]) -> tuple[Leaf, ...]:
        hidden, inner = found["hidden"], found["intermediate"]
        bias = bool(config.get("mlp_bias", False))
        down = _linear("mlp.down_proj", inner, hidden, bias)
        if self.fused:
            return _linear("mlp.gate_up_proj", hidden, 2 * inner, bias), down
        return *(_linear(f"mlp.{name}_proj", hidden, inner, bias) for name in ("gate", "up")), down


def _gpt2(config: Config) -> ModelShape:
    found = _common(config, inner="n_inner")
    hidden, inner, tied = found["hidden"], found["intermediate"], bool(config.get("tie_word_embeddings", True))
    layer = (
        _linear("attn.c_attn", hidden, 3 * hidden, True),
        _linear("attn.c_proj", hidden, hidden, True),
        _linear("mlp.c_fc", hidden, inner, True),
        _linear("mlp.c_proj", inner, hidden, True),
        Leaf("ln_1", 2 * hidden),
        Leaf("ln_2", 2 * hidden),
    )
    vocabulary = found["vocabulary"] * hidden
    outside = (
        Leaf("transformer.wte", vocabulary),
        Leaf("transformer.wpe", found["max_positions"] * hidden),
        Leaf("transformer.ln_f", 2 * hidden),
        Leaf("lm_head", 0 if tied else vocabulary, hidden, found["vocabulary"]),
    )
    return ModelShape(**found, tied=tied, gated=False, stack="transformer.h", layer=layer, outside=outside)


def _gpt_neox(config: Config) -> ModelShape:
    found = _common(config)
    hidden, inner, tied = found["hidden"], found["intermediate"], bool(config.get("tie_word_embeddings", False))
    bias = bool(config.get("attention_bias", True))
    layer = (
        _linear("attention.query_key_value", hidden, 3 * hidden, bias),
        _linear("attention.dense", hidden, hidden, bias),
        _linear("mlp.dense_h_to_4h", hidden, inner, True),
        _linear("mlp.dense_4h_to_h", inner, hidden, True),
        Leaf("input_layernorm", 2 * hidden),
        Leaf("post_attention_layernorm", 2 * hidden),
    )
    vocabulary = found["vocabulary"] * hidden
    outside = (
        Leaf("gpt_neox.embed_in", vocabulary),
        Leaf("gpt_neox.final_layer_norm", 2 * hidden),
        Leaf("lm_head", 0 if tied else vocabulary, hidden, found["vocabulary"]),
    )
    return ModelShape(**found, tied=tied, gated=False, stack="gpt_neox.layers", layer=layer, outside=outside)


def _phi(config: Config) -> ModelShape:
    found = _common(config)
    hidden, inner, tied = found["hidden"], found["intermediate"], bool(config.get("tie_word_embeddings", False))
    wide, narrow = found["heads"] * found["head_dim"], found["kv_heads"] * found["head_dim"]
    layer = (
        _linear("self_attn.q_proj", hidden, wide, True),
        _linear("self_attn.k_proj", hidden, narrow, True),
        _linear("self_attn.v_proj", hidden, narrow, True),
        _linear("self_attn.dense", wide, hidden, True),
        _linear("mlp.fc1", hidden, inner, True),
        _linear("mlp.fc2", inner, hidden, True),
        Leaf("input_layernorm", 2 * hidden),
    )
    vocabulary = found["vocabulary"] * hidden
    outside = (
        Leaf("model.embed_tokens", vocabulary),
        Leaf("model.final_layernorm", 2 * hidden),
        Leaf("lm_head", found["vocabulary"] + (0 if tied else vocabulary), hidden, found["vocabulary"]),
    )
    return ModelShape(**found, tied=tied, gated=False, layer=layer, outside=outside)


_FOUR = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_AFTER = ("post_attention_layernorm", "post_feedforward_layernorm")

FAMILIES: Mapping[str, Callable[[Config], ModelShape]] = {
    "llama": Llama(),
    "mistral": Llama(qkv_bias=False, o_bias=False),
    "qwen2": Llama(qkv_bias=True, o_bias=False),
    "qwen3": Llama(qk_norm="head", head_dim=128),
    "smollm3": Llama(tied=True),
    "granite": Llama(),
    "olmo2": Llama(norms=_AFTER, qk_norm="all"),
    "gemma": Llama(tied=True, head_dim=256),
    "gemma2": Llama(norms=_FOUR, tied=True, head_dim=256),
    "gemma3_text": Llama(norms=_FOUR, qk_norm="head", tied=True, head_dim=256),
    "phi3": Llama(qkv_bias=False, o_bias=False, fused=True),
    "phi": _phi,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
}
