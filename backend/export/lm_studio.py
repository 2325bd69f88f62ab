"""The preset of an exported model for LM Studio: the trained chat template, its system prompt and the stop tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def write(name: str, tokenizer: Any, stops: Sequence[str], trained_system: str = "") -> str:
    """The text of the preset with this name; '' without a chat template. `trained_system`: the system prompt of the
    training examples, '' for none."""
    text = tokenizer.chat_template
    if isinstance(text, Mapping):  # several by name
        text = text.get("default")
    if not text:
        return ""
    template = {"type": "jinja", "jinjaPromptTemplate": {"template": text}, "stopStrings": list(stops)}
    fields = [{"key": "llm.prediction.promptTemplate", "value": template}]
    if trained_system:
        fields.append({"key": "llm.prediction.systemPrompt", "value": trained_system})
    preset = {
        "identifier": f"@local:{name}", "name": name, "changed": False, "operation": {"fields": fields},
        "load": {"fields": []},
    }  # fmt: skip
    return json.dumps(preset, indent=2, ensure_ascii=False) + "\n"
