"""Rules about tokens that are added to the vocabulary: what can train their embeddings."""

from __future__ import annotations

from dataclasses import replace

from backend import registry
from backend.modelspec import SCORE, matches_any, token_rows, unfrozen_modules
from backend.rules.base import Case, Example, Fix, Violation, error, names, warning
from backend.rules.common_fixes import DDP, FSDP2, ZERO2, ZERO3
from backend.rules.examples import DEMO, H100, LLAMA_8B, LOCAL_MODEL, TWO_H100
from backend.rules.llamafactory import MEGATRON_SPEC, READABLE
from backend.rules.unsloth import UNSLOTH, WITH_UNSLOTH, WITHOUT_UNSLOTH
from backend.wording import counted

SPECIAL, PLAIN = "data.add_special_tokens", "data.add_tokens"
WITH_END = {SPECIAL: ("<|im_end|>",)}
UNTIED = replace(DEMO, shape=LLAMA_8B)
TENSOR_FULL = {
    **WITH_END, "parallel.strategy": "tensor", "method.kind": "full", "train.learning_rate": 1e-5,
    "save.strategy": "no",
}  # fmt: skip
FREEZE = {"method.kind": "freeze", "train.learning_rate": 1e-5}


def _tokens(case: Case) -> str:
    """The added tokens, in a sentence: <a>, <b> and 3 more."""
    tokens = case.spec.data.added_tokens
    return names([*tokens[:3], f"{len(tokens) - 3} more"] if len(tokens) > 4 else [*tokens])


def _tokens_are(case: Case) -> str:
    return f"{_tokens(case)} {'are' if len(case.spec.data.added_tokens) > 1 else 'is'}"


@error(
    "MDL016",
    fields=(PLAIN, SPECIAL),
    title="A token is added both as a special and as an ordinary one",
    source="transformers 5.23 tokenization_utils_base.py: decode leaves out special tokens with skip_special_tokens",
    fails_on=Example({**WITH_END, PLAIN: ("<tool>", "<|im_end|>")}),
    passes_on=Example({**WITH_END, PLAIN: ("<tool>",)}),
)
def token_in_both_lists(case: Case) -> Violation | None:
    """A special token is left out of decoded text, and an ordinary one stays in it, so a token cannot be both."""
    data = case.spec.data
    both = [token for token in data.add_tokens if token in data.add_special_tokens]
    if not both:
        return None
    rest = tuple(token for token in data.add_tokens if token not in both)
    fix = Fix(f"Add {names(both)} only as a special token", {PLAIN: rest}, False, "left out of decoded text")
    other = tuple(token for token in data.add_special_tokens if token not in both)
    ordinary = Fix(f"Add {names(both)} only as an ordinary token", {SPECIAL: other}, False, "stays in decoded text")
    return Violation(f"{names(both)} is in {SPECIAL} and in {PLAIN}.", (fix, ordinary))


@error(
    "MTH012",
    fields=(SPECIAL, PLAIN, "parallel.strategy"),
    title="The strategy cannot train the embeddings of added tokens",
    source="peft 0.21 tuners/trainable_tokens/layer.py: the layer reads the weights of the embedding outside of its "
    "forward pass, where ZeRO-3 and tensor parallelism have no complete weights; accelerate 1.15 utils/fsdp_utils.py: "
    "FSDP2 would shard tied weights twice; verified by running",
    fixes=(ZERO2, DDP),
    fails_on=Example({**WITH_END, "parallel.strategy": "fsdp2"}, TWO_H100),
    passes_on=Example({**WITH_END, "parallel.strategy": "fsdp2"}, TWO_H100, UNTIED),
)
def token_rows_with_sharded_weights(case: Case) -> Violation | None:
    """LoRA also trains the embeddings of the added tokens: at each step, peft copies them into the full embedding
    matrix. This fails with ZeRO-3 and tensor parallelism, which shard that matrix. With FSDP2 it works if the input
    embedding and the output layer are not tied, except in Llama 4."""
    shape = case.shape
    if case.spec.method.kind != "lora" or not case.spec.data.added_tokens or not case.strategy.shards_weights:
        return None
    is_early = shape is not None and shape.model_type in registry.READS_EMBEDDING
    is_gathered = case.run.engine.gathers_layers and not (shape and shape.tied) and not is_early
    if is_gathered or (shape and not token_rows(case.spec, shape)):
        return None
    if shape is None and case.spec.lora.modules_to_save:  # perhaps the embeddings: a trainer knows no names of layers
        return None
    fixes: tuple[Fix, ...] = ()
    if shape and not shape.tied:
        known = case.spec.lora.modules_to_save
        whole = [name.rpartition(".")[2] for name in (shape.embedding, shape.head)]
        saved = {"lora.modules_to_save": (*known, *(name for name in whole if name not in known))}
        in_full = Fix("Train the embeddings in full", saved, False, "much more memory, and a large adapter")
        fixes = (in_full,) if is_early else (FSDP2, in_full)
    tied = ", the model has tie_word_embeddings set," if shape and shape.tied else ""
    message = f"The strategy is {case.strategy.label}{tied} and LoRA is to train the embeddings of {_tokens(case)}."
    return Violation(message, fixes)


@error(
    "MTH013",
    fields=(SPECIAL, PLAIN),
    title="peft cannot train added tokens in this output layer",
    source="peft 0.21 tuners/trainable_tokens/layer.py, forward_adapters: F.linear without the bias, and a ValueError "
    "for a layer in modules_to_save; verified by running",
    fails_on=Example(
        WITH_END,
        H100,
        replace(
            DEMO,
            shape=replace(
                LLAMA_8B,
                non_layer_modules=(
                    *LLAMA_8B.non_layer_modules[:-1],
                    replace(LLAMA_8B.non_layer_modules[-1], parameters=LLAMA_8B.vocabulary * (LLAMA_8B.hidden + 1)),
                ),
            ),
        ),
    ),
    passes_on=Example(WITH_END, H100, UNTIED),
)
def token_rows_in_output_layer(case: Case) -> Violation | None:
    """LoRA trains only the weights of the added tokens in the output layer. peft then leaves out the layer's bias,
    which changes every prediction. PEFT refuses a layer that is tied to the input embedding and also trained in
    full."""
    shape, saved = case.shape, case.spec.lora.modules_to_save
    if shape is None or case.spec.method.kind != "lora" or not case.spec.data.added_tokens or shape.head == SCORE:
        return None
    if shape.tied:
        return _tied_head_in_full(case)
    head = shape.non_layer_modules[-1]
    has_bias = head.out_features == shape.vocabulary and head.parameters > head.out_features * head.in_features
    if not has_bias or matches_any(head.path, frozenset(saved)):
        return None
    name = head.path.rpartition(".")[2]
    more = {"lora.modules_to_save": (*saved, name)}
    fix = Fix(f"Train {name} in full", more, safe=False, cost="more memory, and a large adapter")
    return Violation(f"{head.path} of {shape.architecture} has a bias, and {_tokens_are(case)} to be added.", (fix,))


def _tied_head_in_full(case: Case) -> Violation | None:
    shape, saved = case.shape, case.spec.lora.modules_to_save
    whole = [name for name in saved if shape and f".{shape.head}".endswith(f".{name}")]
    if shape is None or not whole or matches_any(shape.embedding, frozenset(saved)):
        return None
    rest = {"lora.modules_to_save": tuple(name for name in saved if name not in whole)}
    message = (
        f"lora.modules_to_save has {names(whole)}, which {shape.architecture} ties to {shape.embedding}, and "
        f"{_tokens_are(case)} to be added."
    )
    return Violation(message, (Fix(f"Remove {names(whole)}", rest, False),))


@error(
    "STR059",
    fields=(SPECIAL, PLAIN, "parallel.strategy"),
    title="Tensor parallelism cannot enlarge the embeddings",
    source="transformers 5.23 modeling_utils.py, resize_token_embeddings: the mean of a DTensor; verified by running",
    fixes=(ZERO3, FSDP2),
    fails_on=Example(TENSOR_FULL, TWO_H100, replace(DEMO, shape=LLAMA_8B, added_rows=1)),
    passes_on=Example(TENSOR_FULL, TWO_H100, UNTIED),
)
def added_rows_with_tensor_parallelism(case: Case) -> str | None:
    """The model has no room for the added tokens, so its embeddings must grow. With tensor parallelism each device
    loads a shard of them, and transformers cannot resize shards."""
    if case.run.tensor_parallel_size == 1 or not case.facts.added_rows:
        return None
    number = counted(case.facts.added_rows, "token")
    return f"The strategy is {case.strategy.label}, and the embeddings must grow by {number}: {_tokens(case)}."


@error(
    "MTH020",
    fields=(SPECIAL, PLAIN, "model.path", "model.hub_id"),
    title="The architecture cannot get new tokens",
    source="transformers 5.23 models/blt/modeling_blt.py: the patcher and the tables of hashed bytes; "
    "models/moshi/modeling_moshi.py: nn.Embedding(vocab_size + 1); verified by running",
    fixes=(Fix("Add no tokens", {SPECIAL: (), PLAIN: ()}, False, "they are split into known tokens"),),
    fails_on=Example({**LOCAL_MODEL, **WITH_END}, H100, replace(DEMO, model_type="blt", shape=None)),
    passes_on=Example({**LOCAL_MODEL, **WITH_END}, H100, UNTIED),
)
def tokens_beyond_fixed_tables(case: Case) -> str | None:
    """transformers enlarges the input embedding and the output layer for added tokens. In these architectures, other
    tables have the size of the vocabulary, or both layers have different sizes: the first example with a new token
    raises an IndexError, or the saved model cannot be loaded."""
    kinds, data = case.model_types & registry.NO_NEW_TOKENS.keys(), case.spec.data
    have_rows = case.shape and case.facts.tokenizer_size and not case.facts.added_rows
    if not kinds or not data.added_tokens or have_rows or case.spec.model.source == "builtin":
        return None
    kind = min(kinds)
    return f"{_tokens(case)} cannot be added to the model type {kind}: {registry.NO_NEW_TOKENS[kind]}."


@warning(
    "MTH014",
    fields=(SPECIAL, PLAIN, "method.freeze_extra_modules"),
    title="The embeddings of added tokens are not trained",
    source="transformers 5.23 modeling_utils.py, resize_token_embeddings: new rows get the mean of the others",
    fails_on=Example({**WITH_END, **FREEZE}),
    passes_on=Example({**WITH_END, **FREEZE, "method.freeze_extra_modules": ("embed_tokens",)}),
)
def token_rows_are_frozen(case: Case) -> Violation | None:
    """method.kind freeze trains whole layers and modules. If the embeddings are not among them, an added token keeps
    its initial values: the mean of all tokens or, where the model has room for it, values that were never trained."""
    spec, shape = case.spec, case.shape
    if spec.method.kind != "freeze" or not spec.data.added_tokens or shape is None:
        return None
    trained = frozenset(unfrozen_modules(spec.method, shape))
    needed = [shape.embedding, *([] if shape.tied or shape.head == SCORE else [shape.head])]
    frozen = [path for path in needed if not matches_any(path, trained)]
    if not frozen:
        return None
    ends = [path.rpartition(".")[2] for path in frozen]
    more = {"method.freeze_extra_modules": (*spec.method.freeze_extra_modules, *ends)}
    fix = Fix(f"Train {names(ends)} too", more, safe=False, cost="more memory")
    message = (
        f"method.kind is freeze, {_tokens_are(case)} added, and these modules are not trained: {', '.join(frozen)}."
    )
    return Violation(message, (fix,))


@error(
    "LLF010",
    fields=(SPECIAL, PLAIN, "llamafactory.backend"),
    title="Added tokens are verified with the transformers backend only",
    source="llamafactory 0.9.5 model/patcher.py, patch_model: resize_vocab resizes a model of transformers",
    fixes=(Fix("Train with transformers in LLaMA-Factory", {"llamafactory.backend": "transformers"}, False),),
    fails_on=Example({**MEGATRON_SPEC, **WITH_END}, TWO_H100, READABLE),
    passes_on=Example(MEGATRON_SPEC, TWO_H100, READABLE),
)
def added_tokens_with_other_backend(case: Case) -> str | None:
    """Megatron-Core and KTransformers load the model with their own code. Footplate has not verified that
    the embeddings grow for added tokens there."""
    if not case.spec.other_backend or not case.spec.data.added_tokens:
        return None
    return f"llamafactory.backend is {case.spec.other_backend}, and {_tokens_are(case)} to be added."


@error(
    "UNS009",
    fields=("train.use_unsloth", SPECIAL, PLAIN),
    title="Added tokens are not verified with Unsloth",
    source="Unsloth 2026.10.9 models/llama.py: get_peft_model names no trainable_token_indices; "
    "models/rl_replacements.py: trainable token embeddings are a problem for its losses",
    fixes=(WITHOUT_UNSLOTH,),
    fails_on=Example({**UNSLOTH, **WITH_END}, WITH_UNSLOTH),
    passes_on=Example(UNSLOTH, WITH_UNSLOTH),
)
def unsloth_with_added_tokens(case: Case) -> str | None:
    """Unsloth makes the adapter with its own function, and its kernels read the output layer directly. Footplate has
    not verified that the embeddings of added tokens are trained there."""
    if not case.spec.train.use_unsloth or not case.spec.data.added_tokens:
        return None
    return f"train.use_unsloth is on, and {_tokens_are(case)} to be added."
