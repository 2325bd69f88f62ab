"""What is learned from the rows: the stages, and the losses that compare answers.

Floor 0.
"""

from __future__ import annotations

from collections.abc import Mapping

from backend.registry.types import Choice, Dataset, Stage

NEXT_TOKEN_FORMATS = ("messages", "sharegpt", "alpaca", "prompt_completion", "text")
STAGES: Mapping[str, Stage] = {
    "sft": Stage(
        "Supervised fine-tuning",
        "Learn to answer: conversations, or prompts with completions.",
        formats=NEXT_TOKEN_FORMATS,
        generates=True,
    ),
    "pretraining": Stage("Pre-training", "Learn every token of plain text.", formats=NEXT_TOKEN_FORMATS),
    "dpo": Stage(
        "DPO",
        "Learn from pairs to prefer the chosen answer to the rejected one, held to the model as it was.",
        formats=("pairs",),
        generates=True,
        sequences_per_example=2,
        uses_reference_model=True,
    ),
    "kto": Stage(
        "KTO",
        "Learn from single answers that are marked good or bad, held to the model as it was.",
        formats=("labels", "pairs"),
        generates=True,
        uses_reference_model=True,
    ),
    "orpo": Stage(
        "ORPO",
        "Learn the chosen answer and to prefer it in one go; no reference model. Experimental in TRL.",
        formats=("pairs",),
        generates=True,
        sequences_per_example=2,
    ),
    "reward": Stage(
        "Reward model",
        "Learn to score answers: the chosen one above the rejected one. One number instead of words.",
        formats=("pairs",),
        sequences_per_example=2,
        is_reward_model=True,
    ),
}
NEXT_TOKEN_STAGES = tuple(
    name for name, row in STAGES.items() if row.formats is NEXT_TOKEN_FORMATS
)  # every row is one answer or text
PREFERENCE_STAGES = tuple(name for name in STAGES if name not in NEXT_TOKEN_STAGES)

DPO_LOSSES: Mapping[str, Choice] = {
    "sigmoid": Choice("Sigmoid (DPO)", "The usual one."),
    "ipo": Choice("IPO", "A square instead of a logarithm: does not run away where one answer always wins."),
    "hinge": Choice("Hinge (SLiC)", "Nothing more is learned from a pair that is far enough apart."),
    "robust": Choice("Robust", "For labels of which some are swapped; label smoothing says how many."),
    "exo_pair": Choice("EXO", "Reverse KL of two answers; needs label smoothing, 0.001 is usual."),
    "nca_pair": Choice("NCA", "Raises the chosen answer itself, not only the distance."),
    "bco_pair": Choice("BCO", "A classifier of good and bad: each answer for itself."),
    "sppo_hard": Choice("SPPO", "Drives each answer towards a fixed probability of winning."),
    "aot": Choice("AOT", "Compares the sorted rewards of a batch instead of each pair."),
    "aot_unpaired": Choice("AOT, unpaired", "As AOT, chosen and rejected sorted each for itself."),
    "apo_zero": Choice("APO zero", "For chosen answers that are better than the model's own."),
    "apo_down": Choice("APO down", "For chosen answers that are worse than the model's own."),
    "discopop": Choice("DiscoPOP", "A blend of losses that was found by search."),
    "sigmoid_norm": Choice("Sigmoid by length", "As the usual one, with each answer's mean instead of its sum."),
}
KTO_LOSSES: Mapping[str, Choice] = {
    "kto": Choice("KTO", "Gains and losses against what the model would say anyway (its KL)."),
    "apo_zero_unpaired": Choice("APO zero", "Without the KL estimate: quicker, any batch size and order."),
}

DATASETS: Mapping[str, Dataset] = {
    "trains": Dataset(
        "Trains (demo)", "Free sentences about trains, each with one JSON object to extract.", format="messages"
    ),
    "train-pairs": Dataset(
        "Trains, right and wrong (demo)",
        "The same task: to each sentence the right JSON, and one with a plausible mistake.",
        format="pairs",
    ),
}
