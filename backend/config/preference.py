"""Losses of the preference and reward stages."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from backend import registry
from backend.config.fields import (
    DPO,
    KTO,
    REWARD,
    WITH_BETA,
    WITH_REFERENCE,
    Section,
    Ui,
    one_of,
)


class Preference(Section):
    """Losses of DPO, KTO, ORPO and reward modeling."""

    beta: Annotated[float, Field(gt=0, le=100), Ui("Beta", when=WITH_BETA)] = 0.1
    """DPO, KTO: strength of the penalty for diverging from the reference model; ORPO: weight of the odds-ratio loss.
    0.1 is usual."""
    dpo_loss_type: Annotated[str, *one_of(registry.DPO_LOSSES), Ui("DPO loss", when=DPO)] = "sigmoid"
    """Loss function for a chosen and a rejected completion (loss_type of DPOConfig); sigmoid is usual."""
    label_smoothing: Annotated[
        float,
        Field(ge=0, lt=0.5),
        Ui("Label smoothing", when={**DPO, "preference.dpo_loss_type": ("robust", "exo_pair", "aot", "aot_unpaired")}),
    ] = 0.0
    """Assumed probability that a preference label is wrong; 0 to 0.2 is usual, 0.001 for EXO."""
    sft_loss_weight: Annotated[float, Field(ge=0, le=100), Ui("SFT loss weight", when=DPO)] = 0.0
    """Weight of an added SFT loss on chosen completions, which keeps their probability from falling; 1 is usual, 0
    disables it."""
    kto_loss_type: Annotated[str, *one_of(registry.KTO_LOSSES), Ui("KTO loss", when=KTO)] = "kto"
    """Loss function for a labeled completion (loss_type of KTOConfig); kto is usual."""
    desirable_weight: Annotated[float, Field(ge=0, le=1000), Ui("Desirable weight", when=KTO)] = 1.0
    """Loss weight of desirable completions; raise it if they are fewer than the undesirable ones. 1 is usual."""
    undesirable_weight: Annotated[float, Field(ge=0, le=1000), Ui("Undesirable weight", when=KTO)] = 1.0
    """Loss weight of undesirable completions; raise it if they are fewer than the desirable ones. 1 is usual."""
    precompute_ref_log_probs: Annotated[bool, Ui("Precompute reference log-probs", when=WITH_REFERENCE)] = False
    """Computes reference log-probabilities before training, so that no reference model stays in memory; for full
    fine-tuning."""
    center_rewards_coefficient: Annotated[
        float, Field(ge=0, le=10), Ui("Reward centering coefficient", when=REWARD)
    ] = 0.0
    """Pulls the mean reward toward zero, which makes rewards comparable; 0.01 is usual, 0 disables it."""
