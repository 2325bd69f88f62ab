"""Data: the examples that the model is trained and evaluated on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from backend import registry
from backend.config.fields import (
    CHAT,
    NEXT_TOKEN,
    SFT,
    USER_DATA,
    Lines,
    Section,
    Ui,
    one_of,
)

WITH_PROMPT = ("prompt_completion", "alpaca", "pairs", "labels")


class Data(Section):
    """What to learn from."""

    source: Annotated[Literal["builtin", "files", "hub"], Ui("Data from")] = "builtin"
    """The demo needs no network; files lie on this machine; a hub id is downloaded."""
    builtin: Annotated[str, *one_of(registry.DATASETS), Ui("Dataset", when={"data.source": ("builtin",)})] = "trains"
    """Small and made for Footplate."""
    files: Annotated[Lines, Ui("Files", when={"data.source": ("files",)}, widget="lines")] = ()
    """One path a line: .json, .jsonl, .csv or .parquet. Shell patterns (*.jsonl) work."""
    hub_id: Annotated[str, Ui("Dataset id", when={"data.source": ("hub",)})] = ""
    """As on the hub: organisation/name."""
    hub_config: Annotated[str, Ui("Configuration", when={"data.source": ("hub",)})] = ""
    """The dataset's subset, if it has several."""
    hub_split: Annotated[str, Ui("Split", when={"data.source": ("hub",)})] = "train"
    """The part to train on; slices such as train[:10%] work."""
    format: Annotated[str, *one_of(registry.FORMATS), Ui("Format", when=USER_DATA)] = "auto"
    """How a row is written."""
    messages_column: Annotated[
        str, Ui("Conversation column", when={**USER_DATA, "data.format": ("messages", "sharegpt")})
    ] = ""
    """Empty: messages, or conversations for ShareGPT."""
    prompt_column: Annotated[str, Ui("Prompt column", when={**USER_DATA, "data.format": WITH_PROMPT})] = ""
    """Empty: prompt, or instruction for Alpaca; of compared answers also a conversation."""
    completion_column: Annotated[
        str, Ui("Completion column", when={**USER_DATA, "data.format": ("prompt_completion", "alpaca", "labels")})
    ] = ""
    """Empty: completion, or output for Alpaca."""
    chosen_column: Annotated[str, Ui("Chosen column", when={**USER_DATA, "data.format": ("pairs",)})] = ""
    """Empty: chosen."""
    rejected_column: Annotated[str, Ui("Rejected column", when={**USER_DATA, "data.format": ("pairs",)})] = ""
    """Empty: rejected."""
    label_column: Annotated[str, Ui("Label column", when={**USER_DATA, "data.format": ("labels",)})] = ""
    """Empty: label, or kto_tag. True marks a good answer."""
    text_column: Annotated[str, Ui("Text column", when={**USER_DATA, "data.format": ("text",)})] = ""
    """Empty: text."""
    system_prompt: Annotated[str, Ui("System prompt", when=CHAT, widget="text")] = ""
    """Put before every conversation that brings none of its own."""
    chat_template: Annotated[str, *one_of(registry.TEMPLATES), Ui("Chat template", when=CHAT)] = "model"
    """How a conversation becomes text. It is saved with the trained model."""
    chat_template_file: Annotated[str, Ui("Template file", when={**CHAT, "data.chat_template": ("file",)})] = ""
    """A Jinja file, as tokenizers store it."""
    loss_on: Annotated[Literal["completions", "all_tokens"], Ui("Learn", when=SFT)] = "completions"
    """Answers: the loss counts the assistant's turns (every one), or the completion. All: every token."""
    max_length: Annotated[int, Field(ge=8, le=4_194_304), Ui("Cut-off length", unit="tokens")] = 512
    """Longer rows are cut here. Memory grows with it."""
    packing: Annotated[bool, Ui("Pack rows", when=NEXT_TOKEN)] = False
    """Fill every row up to the cut-off length with several examples: less padding, quicker epochs."""
    max_samples: Annotated[int, Field(ge=0), Ui("Sample limit")] = 0
    """Train on the first so many rows after shuffling; 0 takes all."""
    validation: Annotated[Literal["none", "split", "files"], Ui("Validation", when=USER_DATA)] = "split"
    """Rows that are never trained on: for the evaluation curve and the answers before and after."""
    validation_split: Annotated[
        float,
        Field(gt=0, lt=1),
        Ui("Validation share", when={**USER_DATA, "data.validation": ("split",)}),
    ] = 0.05
    """Share of the rows kept back, chosen by the seed."""
    validation_files: Annotated[
        Lines, Ui("Validation files", when={**USER_DATA, "data.validation": ("files",)}, widget="lines")
    ] = ()
    """One path a line, in the same format."""
    dataset_num_proc: Annotated[int, Field(ge=1, le=256), Ui("Preparation processes")] = 1
    """Processes that tokenize. More than one pays from some ten thousand rows."""
