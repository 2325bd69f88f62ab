"""Model types that DeepSpeed-Ulysses trains as one process does.

Measured with transformers 5.23 on a small model of each causal type (tests/process/test_sequence_parallel.py): for the
second half of a sequence, transformers' attention function gets the same inputs as for the whole sequence, with the
positions that Ulysses gathers and no mask but the causal or a sliding one, and nothing else mixes tokens. In all other
types a state-space layer, a convolution, a position embedding or an attention mask would see only a rank's own tokens,
or the run fails.
"""

from __future__ import annotations

_TYPES = """
    afmoe apertus arcee aria_text axk1 beam biogpt bitnet cohere cohere2 cohere2_moe cwm dbrx deepseek_v2
    deepseek_v3 diffllama dots1 emu3 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo gemma gemma3 gemma3_text
    gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite gpt-sw3
    gpt2 gpt_neox granite granitemoe granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3
    hyperclovax internlm3 iquestcoder jais2 jetmoe kolibri1 laguna llama longcat_flash mellum minicpm3
    minimax_m2 ministral ministral3 mistral mixtral mllama modernbert-decoder moss_transcribe_diarize nanochat
    nemotron olmo olmo2 olmo3 olmoe opt phi phi3 phi4_multimodal phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss
    smollm3 solar_open stablelm starcoder2 youtu
"""
SEQUENCE_PARALLEL_TYPES = frozenset(_TYPES.split())
