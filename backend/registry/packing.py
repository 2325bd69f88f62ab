"""Model types whose packed sequences are isolated from each other.

Measured with transformers 5.23 on a small model of each causal type (tests/process/test_architectures.py): two
sequences in one packed batch, as TRL's SFT trainer makes it. PACKING_ISOLATED: other tokens in the first sequence do
not change a logit of the second one. PACKING_PACKAGES: transformers refuses packed sequences without these packages.
With all other types, the sequences influence each other, or the forward pass fails.
"""

from __future__ import annotations

from collections.abc import Mapping

_ISOLATED = """
    apertus arcee aria_text axk1 axk2 beam bitnet codegen cohere cohere2 cohere2_moe cohere_compass_text ctrl cwm
    dbrx deepseek_v2 deepseek_v3 deepseek_v32 diffllama doge dots1 emu3 ernie4_5 ernie4_5_moe exaone4 exaone_moe
    flex_olmo flint fuyu gemma gemma2 gemma3 gemma3_text gemma3n_text gemma4 gemma4_text gemma4_unified
    gemma4_unified_text git glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neo
    gpt_neox gpt_neox_japanese gptj granite granite_swa granitemoe granitemoe_swa granitemoeshared helium hrm_text
    hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax internlm3 iquestcoder jais2 jetmoe kolibri1 laguna llama
    longcat_flash mellum mimo_v2_flash minicpm3 minimax_m2 ministral ministral3 mistral mixtral modernbert-decoder
    moshi moss_transcribe_diarize nanochat nemotron olmo olmo2 olmo3 olmoe persimmon phi phi3 phi4_multimodal phimoe
    qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma whisper youtu
"""
PACKING_ISOLATED = frozenset(_ISOLATED.split())
# Their attention has a mask of max_position_embeddings tokens, which all packed sequences of a batch share.
PACKING_WITHIN_POSITIONS = frozenset({"gpt_neo"})
CONV1D, MAMBA, FLA = "causal_conv1d", "mamba_ssm", "flash-linear-attention"
# Their kernels keep packed sequences apart; transformers' own code does not, and raises an error.
_MAMBA = "bamba falcon_h1 granitemoehybrid mamba2 nemotron_h zamba2"
_FLA = """
    bailing_hybrid kimi_linear olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp
    qwen4_exp_text
"""
PACKING_PACKAGES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(["lfm2", "lfm2_moe", "zamba"], (CONV1D,)),
    **dict.fromkeys(_MAMBA.split(), (CONV1D, MAMBA)),
    **dict.fromkeys(_FLA.split(), (CONV1D, FLA)),
}
PACKING_NEEDS_CONV1D = frozenset(PACKING_PACKAGES)
