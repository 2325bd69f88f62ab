"""peft cannot save an adapter whose frozen modules_to_save are not in the state dict.

peft utils/other.py, `ModulesToSaveWrapper.adapter_state_dict`, expects the weights of every adapter. Under ZeRO-3
DeepSpeed gathers only the trained parameters, and TRL adds a frozen copy of the adapter, "ref", for DPO and KTO.
Without the patch the first checkpoint ends with KeyError: 'modules_to_save.ref.weight'.
"""

from __future__ import annotations

from typing import Any

from peft.utils.other import ModulesToSaveWrapper

LIBRARY, SEEN_IN = "peft", "0.21.2"
REFERENCE = "ref"
original = ModulesToSaveWrapper.adapter_state_dict


def gathered_state_dict(wrapper: Any, adapter_name: str, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The adapter's modules; none for the reference if they were not gathered."""
    prefix = f"modules_to_save.{adapter_name}."
    if adapter_name == REFERENCE and not any(key.startswith(prefix) for key in state_dict):
        return {}
    found: dict[str, Any] = original(wrapper, adapter_name, state_dict)
    return found


def apply() -> None:
    """Replace the method."""
    ModulesToSaveWrapper.adapter_state_dict = gathered_state_dict
