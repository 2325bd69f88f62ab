"""Model types of transformers 5.23 that cannot be trained, or not with every method.

Measured on a small model of each causal type (tests/process/test_architectures.py).
"""

from __future__ import annotations

from collections.abc import Mapping

_LOSS = (
    "TRL computes the loss from the output of the last decoder layer and the weight of the output layer, and this "
    "architecture has further layers between them"
)
# Encoders that a config can make a decoder (is_decoder); all have a dense layer and a norm before the output layer.
_BERT = """
    bert big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta roberta-prelayernorm roc_bert
    roformer xlm-roberta xlm-roberta-xl xmod
"""
UNTRAINABLE: Mapping[str, str] = {  # the end of a sentence
    **dict.fromkeys(_BERT.split(), _LOSS),
    "inkling_text": _LOSS,
    "modernbert-decoder": _LOSS,
    "longcat_flash": "its router may send no token to any expert, so that the processes of a run call different "
    "modules and wait for each other; and it reads the weight of its classifier without calling the layer",
    "reformer": "in training, its attention accepts only sequences whose length is a multiple of its chunk length",
    "xlstm": _LOSS,
}
NO_LAYER_LIST = frozenset({"blt", "hrm_text"})  # none of their lists has num_hidden_layers layers
_IN_PLACE = "it changes the output of its shared expert in place, which torch refuses for a layer that is divided"
_ORDER = "the joint projections of its experts would be saved with their columns in another order"
NO_TENSOR_PARALLELISM: Mapping[str, str] = {  # although transformers has a plan for them
    "doge": "its attention adds a mask for all heads to the scores of the heads on one device",
    "hrm_text": "transformers cuts its joint projection of queries, keys and values into other parts while it loads",
    "inkling2": _ORDER,
    "inkling2_text": _ORDER,
    "llama4": _IN_PLACE,
    "llama4_text": _IN_PLACE,
}
_CONVOLUTION = "transformers loads the convolutions of its linear attention in another order"
NO_TENSOR_FSDP2: Mapping[str, str] = {  # tensor parallelism over more than one group of devices
    "bailing_hybrid": _CONVOLUTION,
    "kimi_linear": _CONVOLUTION,
    "olmo_hybrid": _CONVOLUTION,
}
NO_ZERO3 = frozenset({"blt", "rwkv", "youtu"})  # they initialize weights by shape, after ZeRO-3 has sharded them
_CONVERTS = "converts hidden states to the dtype of a linear layer's weights"
_LIMITS = "limits the weights of linear layers in place"
UNQUANTIZABLE: Mapping[str, str] = {  # quantized weights are packed integers, and the outputs of their layers are views
    "dots3_note": _CONVERTS,
    "dots3_note_text": _CONVERTS,
    "gemma3n": _LIMITS,
    "gemma3n_text": _LIMITS,
    "hy_v4": _CONVERTS,
    "mamba": "multiplies with the weights of a linear layer without calling it",
    "roc_bert": "changes the outputs of linear layers in place",
    "rwkv": "divides its weights for evaluation and generation",
}
# Their forward pass reads the device of the embedding's weights before FSDP2 gathers them.
READS_EMBEDDING = frozenset({"llama4", "llama4_text"})
# accelerate does not find the norm before their output layer, next to the embedding or in the base model.
NESTED_NORM = frozenset({"blt", "hrm_text", "qwen4_exp", "qwen4_exp_text"})
NO_NEW_TOKENS: Mapping[str, str] = {  # the end of a sentence
    "blt": "its tokens are bytes, and several of its tables have one entry for each",
    "moshi": "its embedding has one entry more than its output layer, and the enlarged model cannot be loaded again",
}
LIGER_VERSION = "0.8.5"  # of the following list; later versions may have more
LIGER_TYPES = frozenset({
    "deepseek_v2", "deepseek_v3", "deepseek_v4", "exaone4", "falcon_h1", "gemma", "gemma2", "gemma3", "gemma3_text",
    "gemma4", "gemma4_text", "glm4", "glm4v", "glm4v_moe", "gpt_oss", "granite", "hunyuan_v1_dense",
    "hunyuan_v1_moe", "internvl", "llama", "llama4", "llama4_text", "llava", "ministral", "mistral", "mixtral",
    "mllama", "mllama_text_model", "muse_glimmer", "nemotron", "olmo2", "olmo3", "paligemma", "phi3", "pixtral",
    "qwen2", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_vl", "qwen2_vl_text", "qwen3", "qwen3_5", "qwen3_5_moe",
    "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe", "qwen3_vl_moe_text",
    "qwen3_vl_text", "smollm3", "smolvlm",
})  # fmt: skip
NO_PURE_BF16 = frozenset({"inkling2_text"})  # its router multiplies its input in fp32 with its weights as they are
# Their forward pass ignores the attention mask, so padding before a prompt changes what follows.
NO_PADDING = frozenset({"rwkv", "xlnet", "xlstm"})
# Linear layers whose weight the forward pass reads without calling the layer, so that an adapter has no effect.
NOT_CALLED: Mapping[str, tuple[str, ...]] = {
    "falcon_mamba": ("dt_proj",),
    "gemma3n": ("correction_coefs",),
    "gemma3n_text": ("correction_coefs",),
    "jamba": ("dt_proj",),
    "mamba": ("dt_proj",),
}
_CONVERTED = """
    afmoe aria_text axk1 axk2 bailing_hybrid beam cohere2_moe deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 dots1
    dots3_note_text ernie4_5_moe exaone_moe flex_olmo flint fuyu gemma3 glm4_moe glm4_moe_lite glm_moe_dsa got_ocr2
    gpt_neox granitemoe granitemoehybrid granitemoeshared hrm_text hunyuan_v1_moe hy_v3 hy_v4 inkling2_text jamba
    kimi_linear kolibri1 laguna lfm2_moe lfm3 longcat_flash mellum mimo_v2_flash minimax minimax_m2 mixtral
    nemotron_h olmo_hybrid olmoe phimoe qwen2_moe qwen3_5_moe_text qwen3_moe qwen3_next qwen4_exp_text solar_open
"""
CONVERTED_WEIGHTS = frozenset(_CONVERTED.split())
"""Types whose weights have other names or another layout in transformers than in the files of save_pretrained."""

# Models with a table of position embeddings (MPT: of distances); others compute their position embeddings.
POSITION_TABLES = ("gpt2", "opt", "gpt_neo", "gpt_bigcode", "gptj", "codegen", "biogpt", "openai-gpt", "ctrl", "mpt")
