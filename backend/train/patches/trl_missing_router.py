"""TRL adds the router loss to every model whose config has `output_router_logits`.

trl/trainer/utils.py, `_fused_forward`: it gives the router logits to Mixtral's loss. Dense variants of mixtures
(Granite 4, Jamba, Doge) have no routers, so there are no logits; Doge's mixture has logits of another shape. Without
the patch training of these models fails in the first step. A dense model may have the keys of a mixture in its
config.json, too. Where the weight of the loss is 0 or the config has none (ZAYA, DeepSeek V3, GLM 4.5), DPO and KTO
leave `output_router_logits` on, as does SFT after trl_router_logits has restored it, and the loss is computed to
multiply it by 0; ZAYA's routers have one class more than experts, for which it fails. The reference model of DPO and
KTO also computes the loss for each architecture whose config.json turns the logits on.

trl/experimental/orpo/orpo_trainer.py adds the model's own `aux_loss` if config.json has `output_router_logits`. Some
mixtures compute none (Dots1, GLM 4.5, Hunyuan).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

LIBRARY, SEEN_IN = "trl", "1.16.0"
KEY, COEF = "output_router_logits", "router_aux_loss_coef"
OTHER_LOSS = ("doge",)  # the only causal types in transformers 5.23 whose load_balancing_loss_func is not Mixtral's


def apply(config: Any, model: Any, reference: Any = None) -> None:
    """Disable the router loss in the trainer's config, or ORPO's in the model's, if it cannot be computed; and that of
    the reference model, which nothing uses."""
    if reference is not None and getattr(text_config := reference.config.get_text_config(), KEY, False):
        setattr(text_config, KEY, False)
    if hasattr(config, COEF):
        if not has_router_loss(model):
            config.router_aux_loss_coef = 0.0
        text_config, coef = model.config.get_text_config(), config.router_aux_loss_coef
        if hasattr(text_config, KEY) and not (getattr(text_config, COEF, 0.0) if coef is None else coef):
            setattr(text_config, KEY, False)
    elif getattr(model.config, KEY, False) and not hasattr(model, COEF):
        setattr(model.config, KEY, False)


def has_router_loss(model: Any) -> bool:
    """Whether the model can record router logits that Mixtral's loss accepts."""
    if model.config.get_text_config().model_type in OTHER_LOSS:
        return False
    routers = tuple(_router_classes(model))
    if not routers:  # a model of older code, which gives its router logits itself, or a dense one
        whole = model.get_base_model() if hasattr(model, "get_base_model") else model  # without peft's layers around it
        return KEY in inspect.signature(type(whole.base_model).forward).parameters
    return any(isinstance(module, routers) for module in model.modules())


def _router_classes(model: Any) -> Iterator[type]:
    """Classes whose outputs transformers records as router logits (utils/output_capturing.py)."""
    for module in model.modules():
        recorded = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits", ())
        for recorder in recorded if isinstance(recorded, (list, tuple)) else (recorded,):
            target = getattr(recorder, "target_class", recorder)
            if isinstance(target, type):
                yield target
