"""Training stages, preference losses and built-in datasets."""

from __future__ import annotations

from collections.abc import Mapping

from backend.registry.types import Choice, Dataset, Stage

NEXT_TOKEN_FORMATS = ("messages", "sharegpt", "alpaca", "prompt_completion", "text")
STAGES: Mapping[str, Stage] = {
    "sft": Stage(
        "Supervised fine-tuning",
        "Trains on conversations, or on prompts with completions.",
        formats=NEXT_TOKEN_FORMATS,
        generates=True,
    ),
    "pretraining": Stage("Pretraining", "Trains on all tokens of plain text.", formats=NEXT_TOKEN_FORMATS),
    "dpo": Stage(
        "DPO",
        "Direct preference optimization: prefers chosen over rejected completions, close to the reference model.",
        formats=("pairs",),
        generates=True,
        sequences_per_example=2,
        uses_reference_model=True,
    ),
    "kto": Stage(
        "KTO",
        "Kahneman-Tversky optimization: learns from completions labeled desirable or undesirable, without pairs.",
        formats=("labels", "pairs"),
        generates=True,
        uses_reference_model=True,
    ),
    "orpo": Stage(
        "ORPO",
        "Odds ratio preference optimization: SFT and preference loss without a reference model; experimental in TRL.",
        formats=("pairs",),
        generates=True,
        sequences_per_example=2,
    ),
    "reward": Stage(
        "Reward model",
        "Trains a scalar head that scores chosen above rejected completions.",
        formats=("pairs",),
        sequences_per_example=2,
        is_reward_model=True,
    ),
}
# Stages that train on single sequences with the next-token loss (trl's SFTTrainer), and those that compare completions.
NEXT_TOKEN_STAGES = tuple(name for name, row in STAGES.items() if row.formats is NEXT_TOKEN_FORMATS)
PREFERENCE_STAGES = tuple(name for name in STAGES if name not in NEXT_TOKEN_STAGES)

DPO_LOSSES: Mapping[str, Choice] = {
    "sigmoid": Choice("Sigmoid (DPO)", "The loss of the DPO paper; the usual choice."),
    "ipo": Choice(
        "IPO", "Squared loss with a target margin: overfits less if every rater prefers the same completion."
    ),
    "hinge": Choice("Hinge (SLiC)", "Hinge loss: pairs beyond the margin give no gradient."),
    "robust": Choice("Robust", "For noisy labels: label_smoothing is the assumed fraction of swapped pairs."),
    "exo_pair": Choice("EXO", "Reverse KL divergence; needs label_smoothing > 0, usually 0.001."),
    "nca_pair": Choice(
        "NCA", "Noise contrastive alignment: raises the absolute likelihood of chosen completions, not only the margin."
    ),
    "bco_pair": Choice("BCO", "Trains a binary classifier that scores chosen and rejected completions separately."),
    "sppo_hard": Choice(
        "SPPO", "Self-play preference optimization: regresses the reward of each completion to a fixed win probability."
    ),
    "aot": Choice(
        "AOT", "Alignment by optimal transport: compares the sorted rewards of a batch instead of single pairs."
    ),
    "aot_unpaired": Choice("AOT, unpaired", "AOT with chosen and rejected rewards sorted separately."),
    "apo_zero": Choice("APO zero", "For chosen completions that are better than the model's generations."),
    "apo_down": Choice("APO down", "For chosen completions that are worse than the model's generations."),
    "discopop": Choice("DiscoPOP", "A log-ratio modulated loss that was discovered by LLM-driven search."),
    "sigmoid_norm": Choice(
        "Sigmoid, length-normalized", "The sigmoid loss with the mean log-probability per token instead of the sum."
    ),
}
KTO_LOSSES: Mapping[str, Choice] = {
    "kto": Choice(
        "KTO", "Compares each completion's reward with an estimate of the KL divergence from the reference model."
    ),
    "apo_zero_unpaired": Choice(
        "APO zero", "Without the KL estimate: faster, and the batch size and order do not matter."
    ),
}

DATASETS: Mapping[str, Dataset] = {
    "trains": Dataset(
        "Trains (demo)", "Sentences about trains, each with the JSON object to extract from it.", format="messages"
    ),
    "train-pairs": Dataset(
        "Train pairs (demo)",
        "The same task: the correct JSON as chosen, one with a plausible mistake as rejected.",
        format="pairs",
    ),
}
