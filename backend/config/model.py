"""Model: the weights that training starts from."""

from __future__ import annotations

from typing import Annotated, Literal

from backend import registry
from backend.config.fields import (
    Section,
    Ui,
    one_of,
)


class Model(Section):
    """Which weights to start from."""

    source: Annotated[Literal["builtin", "path", "hub"], Ui("Model from")] = "builtin"
    """Built in needs no network; a folder holds config.json and weights; a hub id is downloaded."""
    builtin: Annotated[str, *one_of(registry.BUILTIN_MODELS), Ui("Model", when={"model.source": ("builtin",)})] = (
        "smollm2-135m-instruct"
    )
    """Ready to train without an account."""
    path: Annotated[str, Ui("Model folder", when={"model.source": ("path",)})] = ""
    """A folder with config.json, weights and tokenizer, as `save_pretrained` writes it."""
    hub_id: Annotated[str, Ui("Hub id", when={"model.source": ("hub",)})] = ""
    """As on the hub: organisation/name."""
    revision: Annotated[str, Ui("Revision", when={"model.source": ("hub",)})] = "main"
    """Branch, tag or commit. A commit makes the run repeatable."""
    trust_remote_code: Annotated[bool, Ui("Run the model's own code", when={"model.source": ("path", "hub")})] = False
    """Some models bring Python files. They run with your rights: only for sources that you trust."""
    attn_implementation: Annotated[str, *one_of(registry.ATTENTIONS), Ui("Attention")] = "auto"
    """How attention is computed. What is asked for is taken, or the run ends: nothing is replaced in silence."""

    @property
    def name(self) -> str:
        """In a word: a built-in's name, the last part of a path or of a hub id."""
        last = (self.path if self.source == "path" else self.hub_id).rstrip("/").rpartition("/")[2]
        return self.builtin if self.source == "builtin" else last
