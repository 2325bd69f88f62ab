"""Module table -> ModelShape: every decoder architecture that transformers can build.

A table comes from `backend.train.describe_model`, by way of `backend.modelspec.worker`. Parameters, linear layers and
everything that LoRA or freezing trains follow from the table exactly. The memory of activations is modeled for layers
of attention and an MLP (or experts); for others `ModelShape.activations_unknown` says why it is not known.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from backend.modelspec.architectures import NotCausalLM, UnknownArchitecture, prequantized
from backend.modelspec.modules import ModelShape, ModuleSpec, first_equal

Table = Mapping[str, Any]
Entry = Mapping[str, Any]

KINDS = {
    "encoder": "an encoder", "encoder-decoder": "an encoder-decoder model", "image-text": "an image-text model",
    "other": "another kind of model",
}  # fmt: skip
EXPERTS_PER_TOKEN = (
    "num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "moe_k", "top_k_experts",
)  # fmt: skip
MAIN_KIND_SHARE = (
    0.75  # of the layers must be of one kind, which then represents all layers in the memory of activations
)
# Layer types whose attention is modeled; others are state-space layers, linear attention or convolutions.
ATTENTIONS = ("full_attention", "sliding_attention", "chunked_attention")

SEVERAL_ATTENTIONS = re.compile(
    r"\.\d+\.|cross_att|encoder_att"
)  # names in paths of layers with more than one attention block


def shape_from_table(table: Table, config: Mapping[str, Any]) -> ModelShape:
    """The shape of the model of `table`; `config` is its config.json. Raises UnknownArchitecture."""
    kind = str(table.get("model_type"))
    if table.get("kind") == "unknown":
        raise NotCausalLM(f"transformers {table.get('transformers')} has no architecture {kind}")
    if table.get("kind") != "decoder":
        what = KINDS.get(str(table.get("kind")), KINDS["other"])
        raise NotCausalLM(f"{kind} is {what}, not a causal language model")
    if not table.get("causal_lm"):
        raise NotCausalLM(f"transformers has no causal language model for {kind}")
    try:
        return first_equal(TableReader(table, config).shape())
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        if isinstance(error, UnknownArchitecture):
            raise
        reason = f"the architecture {kind} could not be read completely: {type(error).__name__} {error}"
        raise UnknownArchitecture(reason) from None


@dataclass(frozen=True)
class TableReader:
    """The quantities of one module table."""

    table: Table
    config: Mapping[str, Any]
    facts: Mapping[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "facts", self.table["facts"])

    def shape(self) -> ModelShape:
        """All quantities as a ModelShape."""
        layers = self.table["layers"]
        if not layers["count"] or not self.table["head"]:
            raise UnknownArchitecture(f"{self.table['class']} has no recognizable list of layers or output layer")
        text = self.config.get("text_config") or self.config
        dtype = next((str(c[n]) for c in (text, self.config) for n in ("dtype", "torch_dtype") if c.get(n)), "float32")
        architectures = text.get("architectures") or self.config.get("architectures") or [self.table["class"]]
        several = len(self.layer_kinds) > 1
        return ModelShape(
            layers=int(layers["count"]),
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate=self.experts_inner if self.experts else self.dense_inner,
            vocabulary=self._number("vocab_size") or self._embedding[0],
            max_positions=max(0, self._number("max_position_embeddings", "max_seq_len")),
            tied=self.tied,
            gated_mlp=self.gated_mlp,
            dtype=dtype.removeprefix("torch."),
            architecture=str(architectures[0]),
            model_type=str(text.get("model_type") or self.table["model_type"]),
            activation=str(next((self.facts[n] for n in ACTIVATIONS if self.facts.get(n)), "")),
            **prequantized(text.get("quantization_config") or self.config.get("quantization_config") or {}),
            latent_kv_heads=self._number("num_key_value_heads") if self.facts.get("kv_lora_rank") else 0,
            unsupported_attentions=tuple(self.table["unsupported_attentions"]),
            tensor_parallel_plan=str(self.table["tensor_parallel_plan"]),
            supports_activation_checkpointing=bool(self.table["activation_checkpointing"]),
            has_sliding_window=self._has_sliding_window(),
            sliding_window=int(self.facts.get("sliding_window") or 0),
            experts=self.experts,
            experts_per_token=self.experts_per_token,
            layers_path=str(layers["path"]),
            layer=self.layer,
            non_layer_modules=self._non_layer_modules(),
            layer_kinds=self.layer_kinds if several else (),
            layer_kind_indices=tuple(layers["order"]) if several else (),
            activations_unknown=self._why_unknown(),
        )

    # Modules.

    @cached_property
    def layer_kinds(self) -> tuple[tuple[ModuleSpec, ...], ...]:
        """The modules of each kind of layer."""
        listed = self.table["layers"]["kinds"]
        return tuple(tuple(leaf for entry in kind["modules"] for leaf in self._module_specs(entry)) for kind in listed)

    @cached_property
    def _main_layer_kind(self) -> Mapping[str, Any]:
        return max(self.table["layers"]["kinds"], key=lambda kind: int(kind["count"]))

    @cached_property
    def layer(self) -> tuple[ModuleSpec, ...]:
        """The modules of the most frequent kind of layer."""
        return self.layer_kinds[self.table["layers"]["kinds"].index(self._main_layer_kind)]

    def _non_layer_modules(self) -> tuple[ModuleSpec, ...]:
        """The embeddings first, the output layer last."""
        head, first = self.table["head"], self.table["embeddings"]
        listed = self.table["non_layer_modules"]
        entries = sorted(listed, key=lambda entry: (entry["path"] == head) - (entry["path"] == first))
        if entries[-1]["path"] != head:
            raise UnknownArchitecture(f"the output layer {head} of {self.table['class']} has no parameters of its own")
        return tuple(leaf for entry in entries for leaf in self._module_specs(entry))

    def _module_specs(self, entry: Entry) -> Iterator[ModuleSpec]:
        """The ModuleSpec of a table entry; of stacked experts, one for each parameter."""
        path, shapes = entry["path"], entry["parameters"]
        sizes = {name: 0 if name in entry.get("tied", ()) else math.prod(shape) for name, shape in shapes.items()}
        weight = shapes.get("weight", ())
        if names := self._names(f"{path}.weight") if len(weight) == 2 else ():
            yield ModuleSpec(path, sum(sizes.values()), weight[1], weight[0], 1, names)
        elif entry["type"] in ("linear", "conv1d"):
            out, into = weight if entry["type"] == "linear" else reversed(weight)
            yield ModuleSpec(path, sum(sizes.values()), into, out, supports_lora=self._adaptable(path))
        elif entry["type"] == "experts":
            for name, shape in shapes.items():
                if len(shape) == 3:
                    yield ModuleSpec(path, sizes.pop(name), shape[2], shape[1], shape[0], self._names(f"{path}.{name}"))
            if sizes:
                yield ModuleSpec(path, sum(sizes.values()))
        else:
            yield ModuleSpec(path, sum(sizes.values()))

    def _names(self, parameter: str) -> tuple[str, ...]:
        """The target_modules names for which peft adapts a parameter of stacked experts."""
        targets, fused = self.table["expert_targets"], self.table["expert_fused"]
        for new in dict.fromkeys(targets.values()):
            if f".{parameter}".endswith(f".{new}"):
                return tuple(fused.get(new) or (old for old, other in targets.items() if other == new))
        return ()

    def _adaptable(self, path: str) -> bool:
        """Whether peft adapts a linear layer. In mixtures of experts for which peft maps names of linear layers to
        stacked experts, these names no longer select linear layers (peft 0.21 transformers_weight_conversion.py,
        _convert_peft_config_moe)."""
        end = path.rpartition(".")[2]
        return end not in self.table["expert_targets"] and end not in self.table["lora_refused"]

    @cached_property
    def tied(self) -> bool:
        """Whether the output layer has the same weight as the embeddings."""
        both = {f"{self.table['head']}.weight", f"{self.table['embeddings']}.weight"}
        return any(both <= set(names) for names in self.table["tied"])

    # Widths.

    def _number(self, *names: str) -> int:
        """The first of several facts that is a number; 0 if none is."""
        for name in names:
            value = self.facts.get(name)
            value = max(value, default=None) if isinstance(value, list) else value
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        return 0

    @cached_property
    def _embedding(self) -> tuple[int, int]:
        """Rows and columns of the embeddings."""
        for entry in self.table["non_layer_modules"]:
            if entry["path"] == self.table["embeddings"] and "weight" in entry["parameters"]:
                rows, columns = entry["parameters"]["weight"]
                return int(rows), int(columns)
        raise UnknownArchitecture(f"{self.table['class']} has no recognizable embeddings")

    @cached_property
    def hidden(self) -> int:
        """The hidden size."""
        return self._number("hidden_size") or self._embedding[1]

    @cached_property
    def heads(self) -> int:
        """Attention heads; 0 for a model without attention."""
        return self._number("num_attention_heads")

    @cached_property
    def kv_heads(self) -> int:
        """Key and value heads. Multi-head latent attention expands its keys and values for every head."""
        if self.facts.get("kv_lora_rank"):
            return self.heads
        if self.facts.get("multi_query") and not self.facts.get("new_decoder_architecture"):
            return 1
        return self._number("num_key_value_heads", "num_kv_heads") or self.heads

    @cached_property
    def head_dim(self) -> int:
        """Width of a query head."""
        latent = self._number("qk_nope_head_dim") + self._number("qk_rope_head_dim")
        if self.facts.get("kv_lora_rank") and latent:
            return latent
        return self._number("head_dim") or (self.hidden // self.heads if self.heads else 0)

    @cached_property
    def _attention(self) -> list[ModuleSpec]:
        return [leaf for leaf in self.layer if leaf.in_features and "att" in leaf.path.lower()]

    @cached_property
    def _mlp(self) -> list[ModuleSpec]:
        return [leaf for leaf in self.layer if leaf.is_linear and "att" not in leaf.path.lower()]

    @cached_property
    def _stacked(self) -> list[ModuleSpec]:
        return [leaf for leaf in self.layer if leaf.stacked > 1]

    @cached_property
    def dense_inner(self) -> int:
        """Inner width of the dense MLP: the input size of its down projection."""
        down = [leaf.in_features for leaf in self._mlp if leaf.out_features == self.hidden]
        return max(down, default=self._number("intermediate_size"))

    @cached_property
    def experts(self) -> int:
        """Experts of a layer; 0 if it has none."""
        return max((leaf.stacked for leaf in self._stacked), default=0)

    @cached_property
    def _expert(self) -> int:
        """Elements of the matrices of one expert, biases left out."""
        return sum(leaf.in_features * leaf.out_features for leaf in self._stacked if leaf.stacked == self.experts)

    @cached_property
    def experts_inner(self) -> int:
        """Inner width of one expert: the config's, if two or three matrices of that width have that many elements."""
        for name in ("moe_intermediate_size", "intermediate_size"):
            inner = self._number(name)
            if self._expert and self._expert in (2 * inner * self.hidden, 3 * inner * self.hidden):
                return inner
        widths = [
            size for leaf in self._stacked for size in (leaf.in_features, leaf.out_features) if size != self.hidden
        ]
        return min(widths, default=self.hidden)

    @cached_property
    def experts_per_token(self) -> int:
        """Experts per token; a dense MLP next to them (shared experts) counts as additional experts."""
        routed = self._number(*EXPERTS_PER_TOKEN)
        shared = max((leaf.in_features for leaf in self._mlp if leaf.out_features == self.hidden), default=0)
        return routed + round(shared / self.experts_inner) if self.experts and routed else 0

    @cached_property
    def gated_mlp(self) -> bool:
        """Whether the MLP multiplies two projections of its input (as in SwiGLU)."""
        if self.experts:
            return self._expert >= 3 * self.experts_inner * self.hidden
        sizes = [(leaf.in_features, leaf.out_features) for leaf in self._mlp]
        up = sum(outputs for inputs, outputs in sizes if inputs == self.hidden != outputs)
        return up >= 2 * self.dense_inner > 0

    # The kind of attention, and what is not modeled.

    def _has_sliding_window(self) -> bool:
        """Whether some layers have sliding-window or chunked attention."""
        if kinds := self.facts.get("layer_types"):
            return any("sliding" in name or "chunked" in name for name in kinds)
        return bool(self.facts.get("sliding_window")) and self.facts.get("use_sliding_window") is not False

    def _why_unknown(self) -> str:
        """Why the memory of activations is not known, as the end of a sentence; '' if it is."""
        what = f"the activation memory of {self.table['class']} is not modeled"
        unmodeled = [name for name in self.facts.get("layer_types") or () if name not in ATTENTIONS]
        share = self._main_layer_kind["count"] / self.table["layers"]["count"]
        if unmodeled:
            return f"{what}: it has layers of type {unmodeled[0]}"
        if share < MAIN_KIND_SHARE:
            kinds = f"{len(self.layer_kinds)} kinds, none of which is {MAIN_KIND_SHARE:.0%} of the layers"
            return f"{what}: its layers differ ({kinds})"
        for entry in self._main_layer_kind["modules"]:
            if not _simple(entry):
                return f"{what}: its layers contain a {entry['class']}"
        if any(leaf.stacked > 1 for leaf in self._attention):
            return f"{what}: its attention has experts"
        if any(SEVERAL_ATTENTIONS.search(leaf.path) for leaf in self._attention):
            return f"{what}: its layers have several attention blocks"
        if self.experts and not self.experts_per_token:
            return f"{what}: config.json does not say how many experts are active per token"
        widths = {leaf.in_features for leaf in self._attention if leaf.out_features == self.hidden}
        known = {self.heads * self.head_dim, self.heads * self._number("v_head_dim")} - {0}
        if not widths & known:
            return f"{what}: the size of its attention heads is unknown"
        return "" if self.experts or self.dense_inner else f"{what}: its layers have no MLP"


ACTIVATIONS = ("hidden_act", "activation_function", "hidden_activation")


def _simple(entry: Entry) -> bool:
    """Whether the estimate models this kind of module: a linear layer, experts, a router, or vectors such as norms."""
    if entry["type"] in ("linear", "conv1d", "experts"):
        return True
    name = entry["class"].lower()
    flat = all(sum(size > 1 for size in shape) < 2 for shape in entry["parameters"].values())
    return (flat and "conv" not in name) or "router" in name or "gate" in name
