"""Model: the weights that training starts from."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from backend import registry
from backend.config.fields import (
    Section,
    Ui,
    one_of,
)

RUN_ID = re.compile(r"\d{4}-\d\d-\d\d_\d{6}_(.+)")  # the folder of a run


class Model(Section):
    """The base model."""

    source: Annotated[Literal["builtin", "path", "hub"], Ui("Model source")] = "builtin"
    """Where the base model comes from: built into Footplate, a local folder, or the Hugging Face Hub (downloaded by the
    run)."""
    builtin: Annotated[
        str, *one_of(registry.BUILTIN_MODELS), Ui("Built-in model", when={"model.source": ("builtin",)})
    ] = "smollm2-135m-instruct"
    """Models that need no account and no access to the Hugging Face Hub; SmolLM2 135M suits a first run."""
    path: Annotated[str, Ui("Model folder", when={"model.source": ("path",)}, path="folder")] = ""
    """Folder with config.json, weights and tokenizer, as written by save_pretrained."""
    hub_id: Annotated[str, Ui("Hub model ID", when={"model.source": ("hub",)})] = ""
    """Model on the Hugging Face Hub, such as Qwen/Qwen3-8B. Gated models need a token: Hugging Face
    token on the page, hf auth login, or HF_TOKEN in the environment of the server."""
    revision: Annotated[str, Ui("Revision", when={"model.source": ("hub",)})] = "main"
    """Branch, tag or commit of the Hub repository; set a commit to make the run reproducible."""
    trust_remote_code: Annotated[bool, Ui("Trust remote code", when={"model.source": ("path", "hub")})] = False
    """Runs the Python files of a model repository with your permissions; enable it only for sources that you trust."""
    attn_implementation: Annotated[str, *one_of(registry.ATTENTIONS), Ui("Attention implementation")] = "auto"
    """Attention kernel; the run fails if it is not available. Automatic is usual; FlashAttention is faster on long
    sequences."""

    @property
    def name(self) -> str:
        """A short name: the built-in model, or the last part of the path or Hub ID; for the model of a run, the part of
        the run's name after the date."""
        parts = (self.path if self.source == "path" else self.hub_id).rstrip("/").split("/")
        of_run = RUN_ID.fullmatch(parts[-2]) if len(parts) > 1 and parts[-1] == "model" else None
        last = of_run[1] if of_run else parts[-1]
        return self.builtin if self.source == "builtin" else last
