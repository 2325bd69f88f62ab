"""Training with LLaMA-Factory instead of Footplate's own trainer."""

from __future__ import annotations

from typing import Annotated

from backend.config.fields import LLAMAFACTORY, JsonText, Section, Ui, matches

TEMPLATE = r"[\w.-]+"


class LlamaFactory(Section):
    """LLaMA-Factory: where it is installed, and keys of its configuration that no option has."""

    environment: Annotated[str, Ui("LLaMA-Factory environment", when=LLAMAFACTORY)] = ""
    """Folder of the Python environment in which llamafactory is installed."""
    template: Annotated[
        str, matches(TEMPLATE, "must be the name of a template, such as qwen3"), Ui("Template", when=LLAMAFACTORY)
    ] = ""
    """LLaMA-Factory's template for the model, such as qwen3 or llama3; empty derives one from the tokenizer's chat
    template."""
    extra_args: Annotated[JsonText, Ui("Extra arguments (JSON)", when=LLAMAFACTORY, widget="text")] = ""
    """Keys merged into train.yaml, which they override, for settings without an option; usually empty."""
