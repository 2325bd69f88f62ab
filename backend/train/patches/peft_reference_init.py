"""TRL's reference adapter changes the base model if the adapter was initialized from the base weights.

PiSSA and OLoRA subtract the initial adapter from the base weights (peft tuners/lora/layer.py, `pissa_init` and
`olora_init`). For DPO and KTO, TRL adds a second adapter, "ref", with the same config, and then overwrites its values
with those of the first (trl trainer/dpo_trainer.py and kto_trainer.py). peft subtracts it, too. Without the patch both
the trained and the reference model lack this part of every adapted weight, which no loss at the first step shows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from peft import LoraConfig, PeftModel

LIBRARY, SEEN_IN = "peft", "0.21.2"
REFERENCE = "ref"
original = PeftModel.add_adapter


def add_adapter(model: Any, adapter_name: str, peft_config: LoraConfig, *args: Any, **more: Any) -> None:
    """Initialize the reference as usual: its values are overwritten."""
    plain = replace(peft_config, init_lora_weights=True) if adapter_name == REFERENCE else peft_config
    original(model, adapter_name, plain, *args, **more)


def apply() -> None:
    """Replace the method."""
    PeftModel.add_adapter = add_adapter
