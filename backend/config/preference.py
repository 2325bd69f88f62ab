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
    """How answers are compared, and how far the model may leave what it was."""

    beta: Annotated[float, Field(gt=0, le=100), Ui("Beta", when=WITH_BETA)] = 0.1
    """DPO and KTO: how tightly the model is held to what it was; ORPO: how much preferring counts beside learning."""
    dpo_loss_type: Annotated[str, *one_of(registry.DPO_LOSSES), Ui("Loss", when=DPO)] = "sigmoid"
    """How a pair is turned into a loss."""
    label_smoothing: Annotated[
        float,
        Field(ge=0, lt=0.5),
        Ui("Label smoothing", when={**DPO, "preference.dpo_loss_type": ("robust", "exo_pair", "aot", "aot_unpaired")}),
    ] = 0.0
    """The share of pairs that may be labelled the wrong way round."""
    sft_loss_weight: Annotated[float, Field(ge=0, le=100), Ui("SFT loss weight", when=DPO)] = 0.0
    """Above 0 the chosen answer is learned too, against its fading beside the rejected one; 1 is usual."""
    kto_loss_type: Annotated[str, *one_of(registry.KTO_LOSSES), Ui("Loss", when=KTO)] = "kto"
    """How a labelled answer is turned into a loss."""
    desirable_weight: Annotated[float, Field(ge=0, le=1000), Ui("Weight of good answers", when=KTO)] = 1.0
    """Raise it where good answers are the rarer ones."""
    undesirable_weight: Annotated[float, Field(ge=0, le=1000), Ui("Weight of bad answers", when=KTO)] = 1.0
    """Raise it where bad answers are the rarer ones."""
    precompute_ref_log_probs: Annotated[bool, Ui("Reference computed beforehand", when=WITH_REFERENCE)] = False
    """What the untouched model says is computed once, before training: no second model in memory."""
    center_rewards_coefficient: Annotated[float, Field(ge=0, le=10), Ui("Centring of rewards", when=REWARD)] = 0.0
    """Above 0 it pulls the mean reward towards zero; 0.01 is usual."""
