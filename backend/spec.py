"""RunSpec: everything a person decides about a run, each option declared once.

Floor 1. An option is one line (type, limits, label, when it is shown, default) and its help is the docstring
below it. Nothing derived and nothing about this machine stands here. Type and limits of one field are pydantic's;
whatever needs two fields, or the machine, is a rule (`backend/rules`). Hidden options are without effect: a
spec is written without them (`options.effective`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from backend import catalog

When = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Ui:
    """How an option is shown: its label, when (option -> allowed values, all must hold), the widget's kind."""

    label: str
    when: When = field(default_factory=dict)
    widget: Literal["", "lines", "text", "list"] = ""
    unit: str = ""
    choices: Mapping[str, str] = field(default_factory=dict)  # labels of a Literal's values


@dataclass(frozen=True)
class OneOf:
    """The table that a text option chooses from."""

    table: Mapping[str, catalog.Choice]


def one_of(table: Mapping[str, catalog.Choice]) -> tuple[OneOf, AfterValidator]:
    """Annotations for a text option whose value is a key of `table`."""

    def known(value: str) -> str:
        if value not in table:
            raise ValueError(f"must be one of {', '.join(table)}")
        return value

    return OneOf(table), AfterValidator(known)


def _parts(pattern: str) -> BeforeValidator:
    """Accept one text for a list: a form's field, or a value on the command line."""

    def split(value: Any) -> Any:
        return tuple(p.strip() for p in re.split(pattern, value) if p.strip()) if isinstance(value, str) else value

    return BeforeValidator(split)


def _pairs(value: Any) -> Any:
    """Accept lines of NAME=value for a table of environment variables."""
    if not isinstance(value, str):
        return value
    pairs = {}
    for line in filter(None, (line.strip() for line in value.splitlines())):
        name, equals, text = line.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name.strip()):
            raise ValueError(f"write one NAME=value a line, not {line!r}")
        pairs[name.strip()] = text.strip()
    return pairs


def _named(value: dict[str, str]) -> dict[str, str]:
    for name in value:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"{name!r} is no name for an environment variable")
    return value


Lines = Annotated[tuple[str, ...], _parts(r"[\n]")]
Names = Annotated[tuple[str, ...], _parts(r"[\s,]+")]
Ids = Annotated[tuple[Annotated[int, Field(ge=0)], ...], _parts(r"[\s,]+")]
Pairs = Annotated[dict[str, str], BeforeValidator(_pairs), AfterValidator(_named)]

LORA: When = {"method.kind": ("lora",)}
FREEZE: When = {"method.kind": ("freeze",)}
SFT: When = {"train.stage": ("sft",)}
DDP: When = {"parallel.strategy": ("ddp",)}
MANY: When = {"parallel.strategy": catalog.MANY}
OWN_DATA: When = {"data.source": ("files", "hub")}
TEMPLATED: When = {"train.stage": ("sft",)}
BETAS: When = {"train.optimizer": ("adamw", "adamw_fused")}
EVALUATED: When = {"evaluation.when": ("steps", "epoch")}
SAVED: When = {"checkpoint.when": ("steps", "epoch")}


class Section(BaseModel):
    """A part of the spec; unknown names are refused, nothing is changed in place."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, validate_default=True
    )


class Model(Section):
    """Which weights to start from."""

    source: Annotated[Literal["builtin", "path", "hub"], Ui("Model from")] = "builtin"
    """Built in needs no network; a folder holds config.json and weights; a hub id is downloaded."""
    builtin: Annotated[str, *one_of(catalog.MODELS), Ui("Model", when={"model.source": ("builtin",)})] = (
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

    @property
    def name(self) -> str:
        """In a word: a built-in's name, the last part of a path or of a hub id."""
        last = (self.path if self.source == "path" else self.hub_id).rstrip("/").rpartition("/")[2]
        return self.builtin if self.source == "builtin" else last


class Data(Section):
    """What to learn from."""

    source: Annotated[Literal["builtin", "files", "hub"], Ui("Data from")] = "builtin"
    """The demo needs no network; files lie on this machine; a hub id is downloaded."""
    builtin: Annotated[str, *one_of(catalog.DATASETS), Ui("Dataset", when={"data.source": ("builtin",)})] = "trains"
    """Small and made for Footplate."""
    files: Annotated[Lines, Ui("Files", when={"data.source": ("files",)}, widget="lines")] = ()
    """One path a line: .json, .jsonl, .csv or .parquet. Shell patterns (*.jsonl) work."""
    hub_id: Annotated[str, Ui("Dataset id", when={"data.source": ("hub",)})] = ""
    """As on the hub: organisation/name."""
    hub_config: Annotated[str, Ui("Configuration", when={"data.source": ("hub",)})] = ""
    """The dataset's subset, if it has several."""
    hub_split: Annotated[str, Ui("Split", when={"data.source": ("hub",)})] = "train"
    """The part to train on; slices such as train[:10%] work."""
    format: Annotated[str, *one_of(catalog.FORMATS), Ui("Format", when=OWN_DATA)] = "auto"
    """How a row is written."""
    messages_column: Annotated[
        str, Ui("Conversation column", when={**OWN_DATA, "data.format": ("messages", "sharegpt")})
    ] = ""
    """Empty: messages, or conversations for ShareGPT."""
    prompt_column: Annotated[
        str, Ui("Prompt column", when={**OWN_DATA, "data.format": ("prompt_completion", "alpaca")})
    ] = ""
    """Empty: prompt, or instruction for Alpaca."""
    completion_column: Annotated[
        str, Ui("Completion column", when={**OWN_DATA, "data.format": ("prompt_completion", "alpaca")})
    ] = ""
    """Empty: completion, or output for Alpaca."""
    text_column: Annotated[str, Ui("Text column", when={**OWN_DATA, "data.format": ("text",)})] = ""
    """Empty: text."""
    system: Annotated[str, Ui("System prompt", when=SFT, widget="text")] = ""
    """Put before every conversation that brings none of its own."""
    template: Annotated[str, *one_of(catalog.TEMPLATES), Ui("Chat template", when=TEMPLATED)] = "model"
    """How a conversation becomes text. It is saved with the trained model."""
    template_file: Annotated[str, Ui("Template file", when={**TEMPLATED, "data.template": ("file",)})] = ""
    """A Jinja file, as tokenizers store it."""
    learn: Annotated[Literal["answers", "all"], Ui("Learn", when=SFT)] = "answers"
    """Answers: the loss counts the assistant's turns (every one), or the completion. All: every token."""
    max_length: Annotated[int, Field(ge=8, le=4_194_304), Ui("Cut-off length", unit="tokens")] = 512
    """Longer rows are cut here. Memory grows with it."""
    packing: Annotated[bool, Ui("Pack rows")] = False
    """Fill every row up to the cut-off length with several examples: less padding, quicker epochs."""
    max_samples: Annotated[int, Field(ge=0), Ui("Sample limit")] = 0
    """Train on the first so many rows after shuffling; 0 takes all."""
    validation: Annotated[Literal["none", "split", "files"], Ui("Validation", when=OWN_DATA)] = "split"
    """Rows that are never trained on: for the evaluation curve and the answers before and after."""
    validation_split: Annotated[
        float,
        Field(gt=0, lt=1),
        Ui("Validation share", when={**OWN_DATA, "data.validation": ("split",)}),
    ] = 0.05
    """Share of the rows kept back, chosen by the seed."""
    validation_files: Annotated[
        Lines, Ui("Validation files", when={**OWN_DATA, "data.validation": ("files",)}, widget="lines")
    ] = ()
    """One path a line, in the same format."""
    workers: Annotated[int, Field(ge=1, le=256), Ui("Preparation processes")] = 1
    """Processes that tokenize. More than one pays from some ten thousand rows."""


class Method(Section):
    """Which weights are trained."""

    kind: Annotated[str, *one_of(catalog.METHODS), Ui("Method")] = "lora"
    """What is trained decides most of the memory."""
    lora_rank: Annotated[int, Field(ge=1, le=4096), Ui("Rank", when=LORA)] = 16
    """Width of the adapter. 8 to 64 is usual; more learns more and costs more."""
    lora_alpha: Annotated[float, Field(gt=0, le=65536), Ui("Alpha", when=LORA)] = 32.0
    """The adapter is scaled by alpha / rank. Twice the rank is usual."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1), Ui("Dropout", when=LORA)] = 0.0
    """Against learning by heart on small data; 0.05 is usual, 0 is quicker."""
    lora_targets: Annotated[str, *one_of(catalog.LORA_TARGETS), Ui("Adapted layers", when=LORA)] = "all-linear"
    """Where adapters are put."""
    lora_target_modules: Annotated[
        Names, Ui("Module names", when={**LORA, "method.lora_targets": ("custom",)}, widget="list")
    ] = ()
    """The ends of module names, such as q_proj, v_proj."""
    lora_modules_to_save: Annotated[Names, Ui("Also train in full", when=LORA, widget="list")] = ()
    """Modules trained and saved whole beside the adapters, such as embed_tokens, lm_head."""
    freeze_layers: Annotated[int, Field(ge=-1024, le=1024), Ui("Trained layers", when=FREEZE)] = 2
    """The last so many layers are trained; a negative number takes the first."""
    freeze_also: Annotated[Names, Ui("Also train", when=FREEZE, widget="list")] = ()
    """Names of further modules to train, such as embed_tokens, norm, lm_head."""


class Train(Section):
    """How long, how fast, with what."""

    stage: Annotated[str, *one_of(catalog.STAGES), Ui("Stage")] = "sft"
    """What is learned from the rows."""
    length: Annotated[Literal["epochs", "steps"], Ui("Length in", choices={"steps": "Steps"})] = "epochs"
    """Count passes over the data, or optimizer steps."""
    epochs: Annotated[float, Field(gt=0, le=10_000), Ui("Epochs", when={"train.length": ("epochs",)})] = 3.0
    """Passes over the data."""
    max_steps: Annotated[int, Field(ge=1), Ui("Steps", when={"train.length": ("steps",)})] = 100
    """Optimizer steps."""
    batch_size: Annotated[int, Field(ge=1, le=65536), Ui("Batch size per device")] = 4
    """Rows a device works on at once. Memory grows with it."""
    accumulation: Annotated[int, Field(ge=1, le=65536), Ui("Accumulation")] = 1
    """Batches added up before a step. The batch that counts: size x accumulation x processes."""
    learning_rate: Annotated[float, Field(gt=0, le=10), Ui("Learning rate")] = 2e-4
    """The peak. 1e-4 to 1e-3 for LoRA, 1e-5 to 5e-5 for full training."""
    scheduler: Annotated[str, *one_of(catalog.SCHEDULERS), Ui("Schedule")] = "cosine"
    """How the learning rate moves after warm-up."""
    warmup: Annotated[float, Field(ge=0), Ui("Warm-up")] = 0.03
    """Steps of rising rate; below 1 it is a share of all steps."""
    optimizer: Annotated[str, *one_of(catalog.OPTIMIZERS), Ui("Optimizer")] = "adamw"
    """Turns gradients into steps; its state takes memory."""
    weight_decay: Annotated[float, Field(ge=0, le=10), Ui("Weight decay")] = 0.0
    """Pulls weights towards zero; 0.01 to 0.1 is usual for full training."""
    beta1: Annotated[float, Field(ge=0, lt=1), Ui("Beta 1", when=BETAS)] = 0.9
    """Memory of the gradient's mean."""
    beta2: Annotated[float, Field(ge=0, lt=1), Ui("Beta 2", when=BETAS)] = 0.999
    """Memory of its square; 0.95 is usual for pre-training."""
    epsilon: Annotated[float, Field(gt=0, le=1), Ui("Epsilon", when=BETAS)] = 1e-8
    """Keeps the division finite."""
    max_grad_norm: Annotated[float, Field(ge=0), Ui("Gradient clipping")] = 1.0
    """Longest gradient that is let through; 0 switches clipping off."""
    neftune: Annotated[float, Field(ge=0, le=100), Ui("NEFTune noise")] = 0.0
    """Noise on the embeddings, often better answers on small data; 5 is usual, 0 is off."""
    group_by_length: Annotated[bool, Ui("Group by length")] = False
    """Rows of like length together: less padding, a less random order."""
    activation_checkpointing: Annotated[bool, Ui("Activation checkpointing")] = False
    """Compute activations twice instead of keeping them: far less memory, about a third slower."""
    dataloader_workers: Annotated[int, Field(ge=0, le=256), Ui("Loader processes")] = 0
    """Processes a device that put batches together; 0 does it in the training process."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1), Ui("Seed")] = 42
    """Order of the rows, split, adapters and dropout."""


class Precision(Section):
    """In what numbers to compute."""

    compute: Annotated[str, *one_of(catalog.PRECISIONS), Ui("Precision")] = "auto"
    """Trained weights stay in fp32; frozen ones are held in this precision."""


class Parallel(Section):
    """How many processes work together, and how."""

    strategy: Annotated[str, *one_of(catalog.STRATEGIES), Ui("Strategy")] = "single"
    """How a model and its batches are spread over devices."""
    find_unused_parameters: Annotated[bool, Ui("Find unused parameters", when=DDP)] = False
    """For models whose parts are skipped in some steps. Costs time."""
    bucket_mb: Annotated[int, Field(ge=1, le=4096), Ui("Gradient bucket", when=MANY, unit="MB")] = 25
    """Gradients are sent in parcels of this size."""
    timeout: Annotated[int, Field(ge=1), Ui("Time-out", when=MANY, unit="s")] = 1800
    """A rank that waits longer for the others ends the run."""


class Evaluation(Section):
    """What is looked at beside the loss."""

    when: Annotated[Literal["no", "steps", "epoch"], Ui("Evaluate")] = "epoch"
    """The loss on validation rows, drawn beside the training loss."""
    steps: Annotated[int, Field(ge=1), Ui("Every", when={"evaluation.when": ("steps",)}, unit="steps")] = 50
    """Steps between evaluations."""
    batch_size: Annotated[int, Field(ge=1, le=65536), Ui("Batch size", when=EVALUATED)] = 8
    """Rows a device evaluates at once."""
    samples: Annotated[int, Field(ge=0, le=10_000), Ui("Answers before and after", when=SFT)] = 0
    """Validation rows answered by the model before and after training and compared with what was wanted; 0 is off."""
    max_new_tokens: Annotated[int, Field(ge=1, le=32_768), Ui("Longest answer", when=SFT, unit="tokens")] = 128
    """Where an answer is cut."""


class Checkpoint(Section):
    """What is kept on the way, and at the end."""

    when: Annotated[Literal["no", "steps", "epoch"], Ui("Save checkpoints")] = "epoch"
    """A stopped or failed run goes on from the last complete one."""
    steps: Annotated[int, Field(ge=1), Ui("Every", when={"checkpoint.when": ("steps",)}, unit="steps")] = 100
    """Steps between checkpoints."""
    keep: Annotated[int, Field(ge=0), Ui("Keep", when=SAVED)] = 2
    """Older checkpoints are deleted; 0 keeps all."""
    weights_only: Annotated[bool, Ui("Weights only", when=SAVED)] = False
    """Smaller, but such a checkpoint cannot be resumed from."""
    best: Annotated[bool, Ui("End with the best", when={**SAVED, **EVALUATED})] = False
    """Load the checkpoint with the lowest validation loss at the end."""
    start: Annotated[Literal["continue", "anew", "path"], Ui("Start from")] = "continue"
    """Started again, a run continues from its last complete checkpoint, begins anew, or takes one that you name."""
    path: Annotated[str, Ui("Checkpoint folder", when={"checkpoint.start": ("path",)})] = ""
    """A checkpoint-N folder of a run with the same model and method."""
    save_model: Annotated[bool, Ui("Save the trained model")] = True
    """In the run's folder under model/, as `from_pretrained` loads it."""
    merge: Annotated[bool, Ui("Merge the adapter", when={**LORA, "checkpoint.save_model": ("true",)})] = False
    """Save whole weights with the adapter added in, instead of the adapter alone."""


class Logging(Section):
    """What is written down while it runs."""

    name: Annotated[str, Field(max_length=80), Ui("Run name")] = ""
    """Part of the folder's name; empty takes model and method."""
    steps: Annotated[int, Field(ge=1), Ui("Log every", unit="steps")] = 1
    """Steps between points of the curves."""
    level: Annotated[Literal["info", "warning", "error"], Ui("Log level")] = "warning"
    """How much the libraries say in the log."""
    report_to: Annotated[str, *one_of(catalog.REPORTERS), Ui("Also report to")] = "none"
    """A tracker that you use already."""


class Launch(Section):
    """Where it runs."""

    launcher: Annotated[Literal["torchrun", "python"], Ui("Launcher")] = "torchrun"
    """torchrun starts and watches the processes; python starts one process alone, a little sooner."""
    device: Annotated[Literal["auto", "cuda", "npu", "xpu", "mps", "cpu"], Ui("Device")] = "auto"
    """Automatic takes the accelerator that is there, otherwise the CPU."""
    devices: Annotated[
        Ids, Ui("Device ids", when={"launch.device": ("auto", "cuda", "npu", "xpu")}, widget="list")
    ] = ()
    """Which GPUs, by id: 0, 1. Empty takes the first ones."""
    processes: Annotated[int, Field(ge=1, le=1024), Ui("Processes", when=MANY)] = 2
    """One for each device."""
    threads: Annotated[int, Field(ge=0, le=1024), Ui("CPU threads a process")] = 0
    """0 shares the cores among the processes."""
    environment: Annotated[Pairs, Ui("Environment", widget="lines")] = Field(default_factory=dict)
    """Added for the run, one NAME=value a line."""


class RunSpec(Section):
    """A run, as a person described it."""

    model: Model = Model()
    data: Data = Data()
    method: Method = Method()
    train: Train = Train()
    precision: Precision = Precision()
    parallel: Parallel = Parallel()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    logging: Logging = Logging()
    launch: Launch = Launch()
