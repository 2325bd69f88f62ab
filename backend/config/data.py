"""Data: the examples that the model is trained and evaluated on."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from backend import registry
from backend.config import merge, variables
from backend.config.fields import (
    CHAT,
    NEXT_TOKEN,
    SEVERAL,
    SFT,
    SOME_USER_DATA,
    USER_DATA,
    JsonText,
    Lines,
    Section,
    Tokens,
    Ui,
    one_of,
)
from backend.config.sources import read_sources

# Parameters of transformers' apply_chat_template and render_jinja_template, so they cannot be variables of a template.
RESERVED_KWARGS = {
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "conversations", "documents",
    "max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize",
    "tokenizer_kwargs", "tools", "truncation",
}  # fmt: skip
MAX_SOURCES = 32
SYSTEM_COLUMN = "system"  # the usual name
WITH_PROMPT = ("prompt_completion", "alpaca", "pairs", "labels")


def _template_variables(text: str) -> str:
    names = merge.parse(text)
    if wrong := [name for name in names if not re.fullmatch(r"[A-Za-z_]\w*", name)]:
        raise ValueError(f"has {wrong[0]!r}, which is not a valid variable name")
    if reserved := RESERVED_KWARGS & names.keys():
        raise ValueError(f"has {', '.join(sorted(reserved))}, which transformers sets itself")
    return text


class Source(Section):
    """One dataset."""

    source: Annotated[Literal["builtin", "files", "hub"], Ui("Data source")] = "builtin"
    """Where the dataset comes from: built into Footplate, local files, or the Hugging Face Hub (downloaded by the
    run)."""
    builtin: Annotated[str, *one_of(registry.DATASETS), Ui("Built-in dataset", when={"data.source": ("builtin",)})] = (
        "trains"
    )
    """Small demo datasets that need no network."""
    files: Annotated[Lines, Ui("Data files", when={"data.source": ("files",)}, widget="lines", path="data")] = ()
    """One path per line: a file (.jsonl, .json, .csv, .tsv, .parquet, .arrow), a document (.txt, .md), which is one
    example, a compressed text file (.jsonl.gz), a folder, or a glob pattern (data/*.jsonl)."""
    hub_id: Annotated[str, Ui("Hub dataset ID", when={"data.source": ("hub",)})] = ""
    """Dataset on the Hugging Face Hub, such as HuggingFaceH4/ultrachat_200k."""
    hub_config: Annotated[str, Ui("Dataset config", when={"data.source": ("hub",)})] = ""
    """Configuration (subset) of the Hub dataset; leave it empty for the default configuration."""
    hub_split: Annotated[str, Ui("Dataset split", when={"data.source": ("hub",)})] = "train"
    """Split of the Hub dataset to train on; slices such as train[:10%] work."""
    format: Annotated[str, *one_of(registry.FORMATS), Ui("Data format", when=USER_DATA)] = "auto"
    """Layout of an example; Automatic detects it from the columns of the first example. Choose a format if the
    detection is wrong."""
    messages_column: Annotated[
        str, Ui("Messages column", when={**USER_DATA, "data.format": ("messages", "sharegpt")})
    ] = ""
    """Column with the conversation; defaults to messages, or to conversations for ShareGPT."""
    prompt_column: Annotated[str, Ui("Prompt column", when={**USER_DATA, "data.format": WITH_PROMPT})] = ""
    """Column with the prompt, a text or (except in Alpaca) a conversation; defaults to prompt, or to instruction for
    Alpaca."""
    completion_column: Annotated[
        str, Ui("Completion column", when={**USER_DATA, "data.format": ("prompt_completion", "alpaca", "labels")})
    ] = ""
    """Column with the completion, a text or (except in Alpaca) a list of turns; defaults to completion, or to output
    for Alpaca."""
    chosen_column: Annotated[str, Ui("Chosen column", when={**USER_DATA, "data.format": ("pairs",)})] = ""
    """Column with the preferred completion or conversation; defaults to chosen."""
    rejected_column: Annotated[str, Ui("Rejected column", when={**USER_DATA, "data.format": ("pairs",)})] = ""
    """Column with the rejected completion or conversation; defaults to rejected."""
    label_column: Annotated[str, Ui("Label column", when={**USER_DATA, "data.format": ("labels",)})] = ""
    """Column that is true for desirable and false for undesirable completions; defaults to label or kto_tag."""
    text_column: Annotated[str, Ui("Text column", when={**USER_DATA, "data.format": ("text",)})] = ""
    """Column with plain text; defaults to text."""
    system_column: Annotated[
        str, Ui("System prompt column", when={**USER_DATA, "data.format": (*WITH_PROMPT, "messages", "sharegpt")})
    ] = SYSTEM_COLUMN
    """Column with the system prompt, usually system; examples without one use data.system_prompt. Leave this empty to
    ignore the column."""
    system_prompt: Annotated[str, Ui("System prompt", when=CHAT, widget="text")] = ""
    """System prompt for conversations of this dataset that have none; usually empty."""
    max_samples: Annotated[int, Field(ge=0), Ui("Max training examples")] = 0
    """Uses this many training examples of the dataset, drawn at random with train.seed, for example for a quick test; 0
    uses all. With data.streaming, the first ones are used."""
    validation: Annotated[Literal["none", "split", "files"], Ui("Validation set", when=USER_DATA)] = "split"
    """Examples for the eval loss and generation evaluation, never trained on: none, a split of the data, or files."""
    validation_split: Annotated[
        float,
        Field(gt=0, lt=1),
        Ui("Validation split", when={**USER_DATA, "data.validation": ("split",)}),
    ] = 0.05
    """Fraction of the examples that becomes the validation set, drawn at random with train.seed; 0.01 to 0.1 is
    usual."""
    validation_files: Annotated[
        Lines, Ui("Validation files", when={**USER_DATA, "data.validation": ("files",)}, widget="lines", path="data")
    ] = ()
    """One path per line, in the same format as the data files."""
    weight: Annotated[float, Field(gt=0, le=1000), Ui("Dataset weight", when=SEVERAL)] = 1.0
    """With Concatenate: how often the dataset is used per epoch; 2 uses each example twice, 0.5 uses the same half of
    the examples in every epoch. With Interleave: sampling weight relative to the other datasets. 1 is usual."""

    @property
    def name(self) -> str:
        """A short name: the built-in dataset, the name of the first data file, or the Hub ID."""
        if self.source == "files":
            more = f" and {len(self.files) - 1} more" if len(self.files) > 1 else ""
            return self.files[0].rstrip("/").rpartition("/")[2] + more if self.files else ""
        return self.builtin if self.source == "builtin" else self.hub_id

    @property
    def splits(self) -> bool:
        """Whether the validation set is split off the training data."""
        return self.source != "builtin" and self.validation == "split"


def _sources(value: Any) -> Any:
    """Accept text, as the form and the command line send it."""
    return read_sources(value) if isinstance(value, str) else value


class Data(Source):
    """The training and validation data. With data.sources, the options up to data.weight are those of the first
    dataset."""

    chat_template: Annotated[str, *one_of(registry.TEMPLATES), Ui("Chat template", when=CHAT)] = "model"
    """Renders conversations to text and is saved with the trained model. Use ChatML for base models without a chat
    template."""
    chat_template_file: Annotated[
        str, Ui("Chat template file", when={**CHAT, "data.chat_template": ("file",)}, path="file")
    ] = ""
    """Path of a Jinja chat template, such as the chat_template.jinja of a tokenizer."""
    chat_template_kwargs: Annotated[
        JsonText, AfterValidator(_template_variables), Ui("Chat template kwargs (JSON)", when=CHAT, widget="text")
    ] = ""
    """Variables that the chat template reads, such as {"enable_thinking": false}. They become defaults of the template
    that is saved with the trained model."""
    add_special_tokens: Annotated[Tokens, Ui("Special tokens to add", widget="list")] = ()
    """Special tokens, separated by commas, that the tokenizer gets if it lacks them, such as <|im_end|> for your chat
    template; LoRA also trains their embeddings. They are left out of decoded text."""
    add_tokens: Annotated[Tokens, Ui("Tokens to add", widget="list")] = ()
    """Ordinary tokens, separated by commas, that the tokenizer gets if it lacks them, such as tags that programs read
    in outputs (<tool>); LoRA also trains their embeddings. They stay in decoded text."""
    loss_on: Annotated[Literal["completions", "all_tokens"], Ui("Loss on", when=SFT)] = "completions"
    """Tokens that contribute to the SFT loss: those of every assistant turn or completion (usual), or all tokens of the
    example."""
    max_length: Annotated[int, Field(ge=8, le=4_194_304), Ui("Max length", unit="tokens")] = 512
    """Longer examples are truncated, split (pretraining) or dropped (reward model); a higher maximum needs more memory.
    1024 to 8192 is usual."""
    packing: Annotated[bool, Ui("Packing", when=NEXT_TOKEN)] = False
    """Packs several examples into one sequence, without attention between them: less padding, so faster if examples are
    short."""
    streaming: Annotated[bool, Ui("Streaming", when=NEXT_TOKEN)] = False
    """Reads and tokenizes the examples while the model trains, not before: for data that is larger than the disk or
    only partly used. Set train.dataloader_num_workers to 1 to do this in another process."""
    drop_duplicates: Annotated[bool, Ui("Drop duplicates", when=SOME_USER_DATA)] = False
    """Keeps one copy of each training example, and drops validation examples that are also training examples."""
    on_bad_example: Annotated[Literal["stop", "skip"], Ui("Bad examples", when=SOME_USER_DATA)] = "stop"
    """What happens if an example cannot be read, does not match the format, or cannot be rendered by the chat template:
    the run stops, or the example is skipped and counted in the log."""
    sources: Annotated[
        tuple[Source, ...], Field(max_length=MAX_SOURCES), BeforeValidator(_sources), Ui("Datasets", widget="sources")
    ] = ()
    """List of datasets, each with its own source, format, columns, weight and validation set. Options such as
    data.files are those of the first dataset: data.files is data.sources[0].files."""
    mixing: Annotated[
        Literal["concatenate", "interleave_first_exhausted", "interleave_all_exhausted"],
        Ui(
            "Mixing",
            when=SEVERAL,
            choices={
                "concatenate": "Concatenate",
                "interleave_first_exhausted": "Interleave (first exhausted)",
                "interleave_all_exhausted": "Interleave (all exhausted)",
            },
        ),
    ] = "concatenate"
    """How datasets are combined. Concatenate uses all examples, times the weight. Interleave samples in proportion to
    the weights until the first dataset is exhausted, or until all are, repeating those that are exhausted earlier."""
    dataset_num_proc: Annotated[int, Field(ge=1, le=256), Ui("Tokenization processes")] = 1
    """Processes that tokenize the dataset; more than 1 pays off from about 10,000 examples."""

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """The variables of the chat template."""
        return merge.parse(self.chat_template_kwargs)

    @property
    def added_tokens(self) -> tuple[str, ...]:
        """The tokens that the vocabulary gets if it lacks them, special ones first."""
        return tuple(dict.fromkeys((*self.add_special_tokens, *self.add_tokens)))

    @property
    def datasets(self) -> tuple[Source, ...]:
        """Every dataset; the first one has the options of this section."""
        return (self, *self.sources[1:])

    def title_of(self, index: int) -> str:
        """A dataset in a sentence, such as "Dataset 2 (b.jsonl)"."""
        each = self.datasets[index]
        name = variables.hide_values(super().name if index == 0 else each.name)
        return f"Dataset {index + 1} ({name})" if name else f"Dataset {index + 1}"

    @property
    def name(self) -> str:
        """The names of the first two datasets, and how many more there are."""
        first, *others = [super().name, *(each.name for each in self.datasets[1:])]
        more = f" + {len(others) - 1} more" if len(others) > 1 else ""
        return " + ".join([first, *others[:1]]) + more
