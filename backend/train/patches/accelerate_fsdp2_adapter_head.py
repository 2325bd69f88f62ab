"""accelerate's FSDP2 leaves the output layer of some models sharded in the forward pass.

accelerate utils/fsdp_utils.py, `_find_final_norm`, looks for the norm before the output layer in the children of the
base model, and takes peft's model for it. In OPT and Llama 4, the base model has no norm of its own either. The norm
and the output layer share a unit that is gathered when the norm is called; without the norm, the unit waits for a call
of the output layer, and TRL's losses read its weights only. Without the patch, a trained output layer (of a full
fine-tuning, or in lora.modules_to_save) gets on each rank the gradient of this rank's examples alone.

`fsdp2_prepare_auto_wrap_policy` may choose the norm or the output layer for a unit of its own, with the same result:
the norm is then of a class in parallel.transformer_layer_cls_to_wrap, or the output layer is larger than
min_num_params. Or it chooses the base model, which contains the norm; then the first step fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate.utils import fsdp_utils

from backend.train.run_log import TrainError

LIBRARY, SEEN_IN = "accelerate", "1.15.0"
original = fsdp_utils._find_final_norm
original_policy = fsdp_utils.fsdp2_prepare_auto_wrap_policy


def norm_before_head(model: Any) -> Any:
    """The last norm next to the input embedding of a model, also of one with an adapter; None if there is none. Raises
    TrainError if the output layer would get wrong gradients without it."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    embedding = base.get_input_embeddings()
    decoder = next((each for each in base.modules() if any(child is embedding for child in each.children())), base)
    # peft wraps a norm in lora.modules_to_save.
    norms = [child for child in decoder.children() if "Norm" in type(getattr(child, "original_module", child)).__name__]
    found = norms[-1] if norms else original(base)
    head = base.get_output_embeddings()
    if found is None and head is not None and head.weight is not embedding.weight and _is_trained(head):
        raise TrainError(
            f"parallel.strategy: FSDP2 cannot train the output layer of {type(base).__name__}, because the norm before "
            "it is unknown. Set parallel.strategy to another strategy, or do not train the output layer."
        )
    return found


def _is_trained(layer: Any) -> bool:
    return any(parameter.requires_grad for parameter in layer.parameters())


def policy_for_layers(plugin: Any, model: Any) -> Callable[[Any], bool] | None:
    """accelerate's policy, which says whether a module becomes a unit, without the modules that accelerate puts into
    units itself (the embedding, and the norm with the output layer), their parts, and what contains them."""
    policy = original_policy(plugin, model)
    if policy is None:
        return None
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    ends = (base.get_input_embeddings(), norm_before_head(model), base.get_output_embeddings())
    placed = {id(part) for end in ends if end is not None for part in end.modules()}
    placed |= {id(module) for module in model.modules() if any(id(part) in placed for part in module.modules())}
    return lambda module: id(module) not in placed and policy(module)


def apply() -> None:
    """Replace the functions."""
    fsdp_utils._find_final_norm = norm_before_head
    fsdp_utils.fsdp2_prepare_auto_wrap_policy = policy_for_layers
