"""TRL's reference adapter for DPO and KTO, "ref", changes the base model, or is trained.

PiSSA and OLoRA subtract the initial adapter from the base weights (peft tuners/lora/layer.py, `pissa_init` and
`olora_init`). TRL adds the second adapter with the same config, and then overwrites its values with those of the first
(trl trainer/dpo_trainer.py and kto_trainer.py). peft subtracts it, too. Without the patch both the trained and the
reference model lack this part of every adapted weight, which no loss at the first step shows.

With bf16 or fp16 weights, peft casts the embedding rows of the second adapter to fp32, and the new parameters are
trainable (tuners/tuners_utils.py, `cast_adapter_dtype`). So the optimizer gets them, and DDP ends with an error, since
they have no gradients.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from peft import LoraConfig, PeftModel

from backend import registry

LIBRARY, SEEN_IN = "peft", "0.21.2"
REFERENCE = "ref"
original = PeftModel.add_adapter


def add_adapter(model: Any, adapter_name: str, peft_config: LoraConfig, *args: Any, **more: Any) -> None:
    """Initialize the reference as usual, since its values are overwritten, and freeze it."""
    if adapter_name != REFERENCE:
        original(model, adapter_name, peft_config, *args, **more)
        return
    if registry.is_residual(peft_config.init_lora_weights):
        peft_config = replace(peft_config, init_lora_weights=True)
    original(model, adapter_name, peft_config, *args, **more)
    for name, parameter in model.named_parameters():
        if REFERENCE in name.split("."):
            parameter.requires_grad_(False)


def apply() -> None:
    """Replace the method."""
    PeftModel.add_adapter = add_adapter
