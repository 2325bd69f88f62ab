"""Rules about the model's files, architecture and chat template."""

from __future__ import annotations

from dataclasses import replace

from backend import registry
from backend.rules.base import Case, Example, Fix, Violation, error, warning
from backend.rules.common_fixes import hub_id_violation
from backend.rules.examples import DEMO, LOCAL_MODEL, SMOL

CHECKPOINTING = {"train.activation_checkpointing": True}
JETMOE = replace(SMOL, architecture="JetMoeForCausalLM", supports_activation_checkpointing=False)
LATENT = replace(SMOL, architecture="DeepseekV3ForCausalLM", latent_kv_heads=SMOL.heads)  # multi-head latent attention
BUILTIN_MODEL = Fix("Use the built-in model", {"model.source": "builtin"}, safe=False, cost="a different, small model")


@error(
    "MDL001",
    fields=("model.path",),
    title="The model folder cannot be loaded",
    source="transformers: the files that save_pretrained writes",
    fixes=(BUILTIN_MODEL,),
    fails_on=Example(
        LOCAL_MODEL,
        facts=replace(
            DEMO,
            shape=None,
            shape_unknown_reason="there is no config.json",
            model_problem="There is no config.json in model.",
        ),
    ),
    passes_on=Example(LOCAL_MODEL),
    proof="launch",
)
def incomplete_model_folder(case: Case) -> str | None:
    """A model folder needs config.json, weights (*.safetensors) and a tokenizer."""
    return case.facts.model_problem if case.spec.model.source == "path" and case.facts.model_problem else None


@error(
    "MDL002",
    fields=("model.hub_id",),
    title="The model id cannot be used",
    source="huggingface_hub 2.4 utils/_validators.py: validate_repo_id",
    fixes=(BUILTIN_MODEL,),
    manual_fix="Set model.hub_id to organization/name, as on the model's page on the Hub.",
    fails_on=Example({"model.source": "hub"}),
    passes_on=Example({"model.source": "hub", "model.hub_id": "HuggingFaceTB/SmolLM2-135M"}),
    proof="launch",
)
def invalid_model_hub_id(case: Case) -> Violation | None:
    """A model is downloaded from the Hugging Face Hub by its id, organization/name."""
    return hub_id_violation("model.hub_id", case.spec.model.hub_id) if case.spec.model.source == "hub" else None


@error(
    "MDL003",
    fields=("data.chat_template", "model.path"),
    title="The tokenizer has no chat template",
    source="transformers 5.23: apply_chat_template rejects a tokenizer without one",
    fixes=(Fix("Use the ChatML template", {"data.chat_template": "chatml"}, safe=False),),
    fails_on=Example(LOCAL_MODEL, facts=replace(DEMO, has_chat_template=False)),
    passes_on=Example({**LOCAL_MODEL, "data.chat_template": "chatml"}, facts=replace(DEMO, has_chat_template=False)),
    proof="launch",
)
def missing_chat_template(case: Case) -> Violation | None:
    """Conversations become text through the tokenizer's chat template, which base models often lack. A template that is
    set in data.chat_template, such as ChatML, is saved with the trained model."""
    data, facts = case.spec.data, case.facts
    if case.spec.train.stage == "pretraining" or data.chat_template != "model" or facts.has_chat_template is not False:
        return None
    if all((facts.format if each.format == "auto" else each.format) == "text" for each in data.datasets):
        return None
    plain_text = Fix("Train on plain text", {"train.stage": "pretraining"}, safe=False, cost="no chat format")
    message = f"data.chat_template is model, and the tokenizer of {case.spec.model.name} has no chat template."
    return Violation(message, (plain_text,) if case.spec.train.stage == "sft" else ())


@error(
    "MDL005",
    fields=("model.path", "model.hub_id"),
    title="The tokenizer cannot be loaded",
    source="transformers 5.23: AutoTokenizer.from_pretrained",
    fixes=(BUILTIN_MODEL,),
    manual_fix="Replace the tokenizer files of the model with those of the original model.",
    fails_on=Example(
        LOCAL_MODEL,
        facts=replace(DEMO, tokenizer_problem="The tokenizer of model cannot be loaded: tokenizer.json is not JSON."),
    ),
    passes_on=Example(LOCAL_MODEL),
)
def unloadable_tokenizer(case: Case) -> str | None:
    """The model's tokenizer turns every example into token ids. The run loads it first and ends if it cannot."""
    problem = case.facts.tokenizer_problem
    if case.spec.model.source == "builtin" or case.facts.model_problem:  # see incomplete_model_folder
        return None
    return problem or None


@error(
    "MDL006",
    fields=("model.path", "model.hub_id"),
    title="The tokenizer has more tokens than the model's embedding",
    source="torch 2.13: nn.Embedding raises an IndexError for an id beyond its size",
    fixes=(BUILTIN_MODEL,),
    manual_fix="Use the tokenizer of this model, or resize the model's embedding and save the model again.",
    fails_on=Example(LOCAL_MODEL, facts=replace(DEMO, known_size=128_256)),
    passes_on=Example(LOCAL_MODEL, facts=replace(DEMO, known_size=49_152)),
)
def tokenizer_larger_than_embedding(case: Case) -> str | None:
    """A token id that the embedding does not have raises an IndexError on a CPU and a device-side assert on a GPU, at
    the first example that contains the token."""
    size, shape = case.facts.known_size, case.shape  # added tokens get rows
    if case.spec.model.source == "builtin" or shape is None or size <= shape.vocabulary:
        return None
    return (
        f"The tokenizer has {size:,} tokens, but the model's embedding has room for only {shape.vocabulary:,} tokens."
    )


@error(
    "MDL007",
    fields=("model.path",),
    title="The weights do not match config.json",
    source="transformers 5.23 modeling_utils.py: from_pretrained initializes missing weights at random, and refuses "
    "weights of another size",
    fixes=(BUILTIN_MODEL,),
    manual_fix="Copy config.json and the weight files of the same model into the folder.",
    fails_on=Example(
        LOCAL_MODEL,
        facts=replace(
            DEMO,
            weights_problem="config.json describes 30 decoder layers, and the weight files have no weights for layer "
            "24: they do not belong to the same model.",
        ),
    ),
    passes_on=Example(LOCAL_MODEL),
)
def weights_do_not_match_config(case: Case) -> str | None:
    """The weights of a layer that is not in the files are initialized at random, which transformers only logs. Weights
    of another size cannot be loaded."""
    return case.facts.weights_problem if case.spec.model.source == "path" and case.facts.weights_problem else None


@error(
    "MDL008",
    fields=("model.path", "model.hub_id"),
    title="The model is not a causal language model",
    source="transformers 5.23 models/auto/modeling_auto.py: the model types of AutoModelForCausalLM",
    fixes=(BUILTIN_MODEL,),
    manual_fix="Use a decoder model, which is trained to predict the next token.",
    fails_on=Example(
        LOCAL_MODEL,
        facts=replace(
            DEMO,
            shape=None,
            shape_unknown_reason="bert is an encoder, not a causal language model",
            architecture_problem="The model type of config.json is not supported: bert is an encoder, not a causal "
            "language model.",
        ),
    ),
    passes_on=Example(LOCAL_MODEL),
)
def not_a_causal_language_model(case: Case) -> str | None:
    """All training stages train a decoder, in which a token attends only to the tokens before it. An encoder such as
    BERT also attends to the token that it should predict, so its loss means nothing. AutoModelForCausalLM does not load
    encoder-decoder models such as T5."""
    problem = case.facts.architecture_problem
    return problem if problem and case.spec.model.source != "builtin" else None


@error(
    "MDL014",
    fields=("model.path", "model.hub_id"),
    title="config.json has a value that no model can have",
    source="Footplate's limits, far above every known model: backend/modelspec/config_limits.py; torch 2.13 "
    "nn/modules/sparse.py: padding_idx",
    fixes=(BUILTIN_MODEL,),
    manual_fix="Correct the value in config.json, or download the file again.",
    fails_on=Example(
        LOCAL_MODEL,
        facts=replace(
            DEMO,
            shape=None,
            shape_unknown_reason="config.json: num_hidden_layers must be an integer from 1 to 4,096",
            config_problem="config.json: num_hidden_layers must be an integer from 1 to 4,096, but is 1,000,000,000.",
        ),
    ),
    passes_on=Example(LOCAL_MODEL),
)
def config_out_of_range(case: Case) -> str | None:
    """Memory and time of building a model grow with the sizes in its config.json. With an absurd value, each check
    would take gigabytes and minutes, and so would the run. torch builds no embeddings whose padding token is outside
    the vocabulary."""
    problem = case.facts.config_problem
    return problem if problem and case.spec.model.source != "builtin" else None


@error(
    "MDL004",
    fields=("data.chat_template_file",),
    title="The chat template file cannot be used",
    source="transformers: a chat template is a Jinja template over messages",
    fixes=(Fix("Use the model's own template", {"data.chat_template": "model"}, safe=False),),
    fails_on=Example(
        {"data.chat_template": "file"},
        facts=replace(
            DEMO, template_problem="data.chat_template_file is empty: set the path of a Jinja chat template."
        ),
    ),
    passes_on=Example({"data.chat_template": "file", "data.chat_template_file": "t.jinja"}),
    proof="launch",
)
def unusable_chat_template_file(case: Case) -> str | None:
    """The file must be a readable Jinja template that renders the conversation in the variable messages."""
    return (
        case.facts.template_problem if case.spec.data.chat_template == "file" and case.facts.template_problem else None
    )


@error(
    "MDL009",
    fields=("model.path", "model.hub_id"),
    title="This architecture cannot be trained",
    source="measured with transformers 5.23, trl 1.16: the loss of a small model in the trainer and in transformers",
    fixes=(BUILTIN_MODEL,),
    manual_fix="Use a model of another architecture.",
    fails_on=Example(LOCAL_MODEL, facts=replace(DEMO, model_type="reformer")),
    passes_on=Example(LOCAL_MODEL),
)
def untrainable_architecture(case: Case) -> str | None:
    """With some architectures, training fails in the first step, or the trainer's loss differs from the model's
    own loss."""
    kind = next(iter(case.model_types & registry.UNTRAINABLE.keys()), "")
    if not kind or case.spec.model.source == "builtin" or case.facts.architecture_problem:
        return None
    return f"The model type {kind} is not supported: {registry.UNTRAINABLE[kind]}."


@error(
    "MDL010",
    fields=("method.freeze_trainable_layers",),
    title="This architecture has no list of decoder layers to freeze",
    source="transformers 5.23: the config of BLT has no num_hidden_layers, and HRM-Text runs two lists of layers "
    "several times",
    fixes=(
        Fix("Use LoRA", {"method.kind": "lora"}, False, "trains adapters instead of layers"),
        Fix("Train all parameters", {"method.kind": "full"}, False, "more memory"),
    ),
    fails_on=Example({**LOCAL_MODEL, "method.kind": "freeze"}, facts=replace(DEMO, model_type="blt")),
    passes_on=Example(
        {**LOCAL_MODEL, "method.kind": "freeze", "method.freeze_trainable_layers": 0,
         "method.freeze_extra_modules": ("norm",)},
        facts=replace(DEMO, model_type="blt"),
    ),
)  # fmt: skip
def freeze_without_layer_list(case: Case) -> str | None:
    """method.freeze_trainable_layers counts decoder layers from the first or the last one. This architecture has
    several stacks of layers."""
    kinds, method = case.model_types & registry.NO_LAYER_LIST, case.spec.method
    if method.kind != "freeze" or not method.freeze_trainable_layers or not kinds:
        return None
    return (
        f"method.freeze_trainable_layers is {method.freeze_trainable_layers}, and the model type {kinds.pop()} has no "
        "single list of layers."
    )


@error(
    "MDL017",
    fields=("model.path", "model.hub_id", "model.attn_implementation"),
    title="The KV heads of config.json do not fit multi-head latent attention",
    source="transformers 5.23 integrations/sdpa_attention.py, repeat_kv; models/deepseek_v3/modeling_deepseek_v3.py, "
    "expand_kv: the keys already have all heads; verified by running",
    fixes=(BUILTIN_MODEL,),
    manual_fix="Set num_key_value_heads in config.json to num_attention_heads. The weights do not depend on it.",
    fails_on=Example(LOCAL_MODEL, facts=replace(DEMO, shape=replace(LATENT, latent_kv_heads=LATENT.heads // 2))),
    passes_on=Example(LOCAL_MODEL, facts=replace(DEMO, shape=LATENT)),
)
def latent_attention_heads(case: Case) -> str | None:
    """Multi-head latent attention (DeepSeek V2 and V3, MiniCPM3 and others) expands its latent vector into keys and
    values for every query head. SDPA and eager attention would then repeat them for num_attention_heads /
    num_key_value_heads query heads, so the first step fails unless both numbers are equal. FlashAttention and
    FlexAttention do not repeat them."""
    shape = case.shape
    if shape is None or not shape.latent_kv_heads or shape.heads // shape.latent_kv_heads < 2:
        return None
    if case.spec.model.source == "builtin" or case.spec.model.attn_implementation not in ("auto", "sdpa", "eager"):
        return None
    return (
        f"config.json of this {shape.architecture} has num_attention_heads {shape.heads} and num_key_value_heads "
        f"{shape.latent_kv_heads}, so its attention would fail in the first step."
    )


@error(
    "MDL013",
    fields=("train.activation_checkpointing",),
    title="This architecture does not support activation checkpointing",
    source="transformers 5.23 modeling_utils.py, _activation_checkpointing_enable: refused unless the model class sets "
    "supports_gradient_checkpointing",
    fixes=(
        Fix(
            "Turn off activation checkpointing",
            {"train.activation_checkpointing": False},
            cost="more memory for activations",
        ),
    ),
    fails_on=Example(CHECKPOINTING, facts=replace(DEMO, shape=JETMOE)),
    passes_on=Example(CHECKPOINTING),
)
def unsupported_activation_checkpointing(case: Case) -> str | None:
    """Activation checkpointing needs layers that recompute their activations in the backward pass. The model classes of
    a few architectures, such as JetMoE, have none, and transformers refuses to enable it for them."""
    shape = case.shape
    if not case.spec.train.activation_checkpointing or shape is None or shape.supports_activation_checkpointing:
        return None
    return f"train.activation_checkpointing is on, but transformers does not support it for {shape.architecture}."


@warning(
    "MDL012",
    fields=("model.trust_remote_code", "model.path", "model.hub_id"),
    title="The run executes Python code from the model repository",
    source="transformers 5.23 dynamic_module_utils.py",
    fixes=(Fix("Do not trust remote code", {"model.trust_remote_code": False}, safe=False),),
    fails_on=Example({"model.source": "hub", "model.hub_id": "some/model", "model.trust_remote_code": True}),
    passes_on=Example({"model.source": "hub", "model.hub_id": "some/model"}),
)
def remote_code(case: Case) -> str | None:
    """With trust_remote_code, transformers imports Python files from the model repository. Their code can do everything
    that you can do on this machine. Most models do not need trust_remote_code."""
    model = case.spec.model
    has_none = model.source == "path" and case.facts.has_own_code is False  # a Hub revision may be a newer one
    if not model.trust_remote_code or has_none or not model.name:
        return None
    where = f"revision {model.revision} of {model.hub_id}" if model.source == "hub" else model.path
    return f"model.trust_remote_code is on, so the Python files in {where} run with your permissions."


@error(
    "MDL015",
    fields=("model.trust_remote_code", "model.path", "model.hub_id"),
    title="The model needs its own Python code",
    source="transformers 5.23 dynamic_module_utils.py: resolve_trust_remote_code",
    fixes=(
        Fix(
            "Trust remote code",
            {"model.trust_remote_code": True},
            safe=False,
            cost="the run executes the Python files of the model with your permissions",
        ),
        BUILTIN_MODEL,
    ),
    fails_on=Example(
        LOCAL_MODEL,
        facts=replace(DEMO, shape=None, shape_unknown_reason="it has its own code", needs_remote_code=True),
    ),
    passes_on=Example(LOCAL_MODEL),
)
def model_code_without_consent(case: Case) -> str | None:
    """If transformers does not include an architecture, it builds the model from Python files of the model repository,
    and only with trust_remote_code. Without it, the run ends when it loads the model."""
    model, kind = case.spec.model, case.facts.model_type
    if model.source == "builtin" or model.trust_remote_code or not case.facts.needs_remote_code:
        return None
    return (
        f"transformers does not include {f'the architecture {kind}' if kind else 'the architecture of this model'}. "
        "config.json refers to Python code of the model repository (auto_map), and model.trust_remote_code is off."
    )
